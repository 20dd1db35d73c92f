"""What a compiled Keras model is trained with, as a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.metrics.reduction_metrics import MeanMetricWrapper
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics

from isobatch.errors import ModelError, SpecError
from isobatch.recipe import LOSSES, METRICS, OPTIMIZERS, SCHEDULES, SHARED, Loss, Metric, Part, Recipe
from isobatch_keras.mirror import Mirror
from isobatch_keras.spec.refs import functional_of, plain
from isobatch_keras.spec.rules import find_rule
from isobatch_keras.spec.walk import walk

__all__ = ["template_of", "to_recipe", "variables_of"]

_SPARSE = {"sparse_categorical_crossentropy", "categorical_generalized_cross_entropy"}
"""Losses whose targets are classes, without an axis for them."""

_OWN_STATE = {
    "RootMeanSquaredError": ("root_mean_squared_error", ()),
    "Precision": ("precision", ("thresholds",)),
    "Recall": ("recall", ("thresholds",)),
    "AUC": ("auc", ("num_thresholds", "curve", "summation_method", "from_logits")),
}
"""Metrics that are no mean of a function: their word, and the settings that we know."""

_IGNORED = {
    "name",
    "dtype",
    "thresholds",
    "num_thresholds",
    "curve",
    "summation_method",
    "from_logits",
    "multi_label",
}


def to_recipe(model: Any) -> Recipe:
    """Return what a compiled model is trained with.

    Args:
        model: A compiled functional or sequential `keras.Model`, or a parallel one.

    Returns:
        The recipe; weights in it are named as in `isobatch_keras.spec.to_spec`.

    Raises:
        ModelError: The model is not compiled.
        SpecError: Something in its training has no word in a recipe; the message lists all of it.

    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="out")])
    >>> model.compile(keras.optimizers.SGD(0.5, momentum=0.9), "mse")
    >>> recipe = to_recipe(model)
    >>> recipe.optimizer.settings["momentum"], recipe.learning_rate, recipe.losses[0].function.name
    (0.9, 0.5, 'mean_squared_error')
    """
    if getattr(model, "optimizer", None) is None or not model.compiled:
        msg = f"Expected a compiled model, {model.name!r} is not. Cure: model.compile(optimizer, loss)."
        raise ModelError(msg)
    reading = _Reading(model, variables_of(model), [])
    recipe = reading.recipe()
    if reading.unsupported:
        msg = (
            f"Expected training that has words in a recipe; these {len(reading.unsupported)} have none: "
            f"{'; '.join(reading.unsupported)}."
        )
        raise SpecError(msg)
    return recipe.check()


def template_of(model: Any) -> Any:
    """Return the model that owns the weights: the template of a parallel model, another model itself."""
    return model.template if issubclass(type(model), Mirror) else model


def variables_of(model: Any) -> dict[str, Any]:
    """Return a model's variables by the keys that its spec has for them."""
    found = walk(template_of(model), find_rule)[0].variables
    return {key: one for key, one in found.items() if isinstance(one, keras.Variable)}


@dataclass(slots=True)
class _Reading:
    """One model while it is read; what has no word is collected."""

    model: Any
    variables: dict[str, Any]
    unsupported: list[str]

    def recipe(self) -> Recipe:
        optimizer = self.model.optimizer
        scale = None
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            scale = {
                "initial_scale": float(optimizer.initial_scale),
                "dynamic_growth_steps": float(optimizer.dynamic_growth_steps),
            }
            optimizer = optimizer.inner_optimizer
        losses, metrics = self._losses_and_metrics()
        self._check_rest()
        return Recipe(
            self._optimizer(optimizer),
            self._rate(optimizer),
            losses,
            metrics,
            self._penalties(),
            self._frozen(),
            tuple(key for key, one in self.variables.items() if not _decays(optimizer, one)),
            scale,
            keras.config.floatx(),
            tuple(
                number
                for number, tensor in enumerate(functional_of(template_of(self.model)).outputs)
                if getattr(tensor, "_keras_mask", None) is not None
            ),
        )

    def _optimizer(self, optimizer: Any) -> Part:
        name = type(optimizer).__name__.lower()
        known = getattr(keras.optimizers, type(optimizer).__name__, None) is type(optimizer)
        if name not in OPTIMIZERS or not known:
            self.unsupported.append(f"optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__}")
            return Part("sgd")
        config = optimizer.get_config()
        return Part(name, {key: plain(config[key]) for key in (*OPTIMIZERS[name], *SHARED) if key in config})

    def _rate(self, optimizer: Any) -> float | Part:
        rate = optimizer._learning_rate  # noqa: SLF001 - the public one is already a number
        if isinstance(rate, keras.Variable):
            return float(rate.numpy())
        name = type(rate).__name__
        if getattr(keras.optimizers.schedules, name, None) is not type(rate) or name not in SCHEDULES:
            self.unsupported.append(f"learning rate {rate!r}")
            return 0.0
        config = rate.get_config()
        return Part(name, {key: plain(config[key]) for key in SCHEDULES[name]})

    def _losses_and_metrics(self) -> tuple[tuple[Loss, ...], tuple[Metric, ...]]:
        """Let Keras decide on new objects what is meant for which output, as it would at the first batch."""
        compiled = self.model._compile_loss  # noqa: SLF001 - there is no public way to ask
        if compiled is None:
            self.unsupported.append("a model without a loss")
            return (), ()
        outputs = keras.tree.map_structure(
            lambda one: keras.KerasTensor(one.shape, one.dtype, name=one.name),
            functional_of(template_of(self.model))._outputs_struct,  # noqa: SLF001 - how the model returns them
        )
        names = list(functional_of(template_of(self.model)).output_names)
        flat = keras.tree.flatten(outputs)
        asked = CompileLoss(compiled._user_loss, compiled._user_loss_weights, output_names=names)  # noqa: SLF001
        asked.build(outputs, outputs)
        places = {id(one): number for number, one in enumerate(flat)}
        losses: list[Loss] = []
        targets: dict[int, Any] = {id(one): one for one in flat}
        for path, loss, weight, _ in asked._flat_losses:  # noqa: SLF001
            tensor = outputs
            for step in path:
                tensor = tensor[step]
            number = places[id(tensor)]
            found = self._loss(loss, number, weight, names[number])
            losses.append(found)
            if found.function.name in _SPARSE:
                targets[id(tensor)] = keras.KerasTensor(tensor.shape[:-1], "int32")
        given = keras.tree.map_structure(lambda one: targets[id(one)], outputs)
        return tuple(losses), self._metrics(given, outputs, names)

    def _loss(self, loss: Any, number: int, weight: Any, name: str) -> Loss:
        word = getattr(getattr(loss, "fn", None), "__name__", "")
        if not isinstance(loss, LossFunctionWrapper) or word not in LOSSES or not _is_ours(loss.fn):
            self.unsupported.append(f"loss {loss!r} of output {name!r}")
        if loss.reduction in {None, "none"}:
            self.unsupported.append(f"reduction {loss.reduction!r} of output {name!r}")
        if loss.dtype != keras.config.floatx():
            self.unsupported.append(f"loss of output {name!r} in {loss.dtype}")
        settings = plain(getattr(loss, "_fn_kwargs", {}))
        return Loss(
            number, Part(word, settings), str(loss.reduction), None if weight is None else float(weight), name
        )

    def _metrics(self, targets: Any, outputs: Any, names: list[str]) -> tuple[Metric, ...]:
        compiled = self.model._compile_metrics  # noqa: SLF001
        if compiled is None:
            return ()
        asked = CompileMetrics(compiled._user_metrics, compiled._user_weighted_metrics, output_names=names)  # noqa: SLF001
        asked.build(targets, outputs)
        found: list[Metric] = []
        shown = iter(asked.result())
        for weighted, lists in ((False, asked._flat_metrics), (True, asked._flat_weighted_metrics)):  # noqa: SLF001
            for number, several in enumerate(lists):
                found += [
                    Metric(number, self._metric(metric), next(shown), weighted)
                    for metric in (() if several is None else several.metrics)
                ]
        return tuple(found)

    def _metric(self, metric: Any) -> Part:
        name = type(metric).__name__
        if isinstance(metric, MeanMetricWrapper):
            function = metric._fn  # noqa: SLF001
            settings = plain(metric._fn_kwargs)  # noqa: SLF001
            if isinstance(function, LossFunctionWrapper):
                self.unsupported.append(f"metric {metric.name!r}, a loss with a reduction of its own")
            word = getattr(function, "__name__", "")
            if word in METRICS and _is_ours(function):
                return Part(word, settings)
        elif name in _OWN_STATE and getattr(keras.metrics, name) is type(metric):
            word, keys = _OWN_STATE[name]
            config = metric.get_config()
            odd = [key for key, value in config.items() if key not in _IGNORED and value not in {None, False}]
            if not odd and not config.get("multi_label"):
                return Part(word, {key: plain(config[key]) for key in keys})
        self.unsupported.append(f"metric {metric.name!r} ({name})")
        return Part("")

    def _penalties(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for key, variable in self.variables.items():
            rule = variable.regularizer
            if rule is None or not variable.trainable:
                continue
            config = rule.get_config()
            if type(rule) in {keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2}:
                found[key] = {name: float(value) for name, value in config.items()}
            else:
                self.unsupported.append(f"regularizer {type(rule).__name__} of {key!r}")
        return found

    def _frozen(self) -> tuple[str, ...]:
        """What is not trained; running statistics are named only where they do not run."""
        template = template_of(self.model)
        moving = [
            one
            for one in template._flatten_layers()  # noqa: SLF001 - nested layers too
            if isinstance(one, keras.layers.BatchNormalization) and one.trainable
        ]
        free = {id(variable) for layer in moving for variable in (layer.moving_mean, layer.moving_variance)}
        free |= {id(variable) for variable in template.trainable_variables}
        return tuple(key for key, one in self.variables.items() if id(one) not in free)

    def _check_rest(self) -> None:
        self.unsupported += [
            f"constraint {type(one.constraint).__name__} of {key!r}"
            for key, one in self.variables.items()
            if one.constraint is not None
        ]
        for layer in template_of(self.model)._flatten_layers():  # noqa: SLF001 - nested layers and cells too
            if getattr(layer, "activity_regularizer", None) is not None:
                self.unsupported.append(f"activity regularizer of layer {layer.name!r}")
        if type(template_of(self.model)).train_step is not keras.Model.train_step:
            self.unsupported.append(f"a train_step of its own in {type(template_of(self.model)).__name__}")


def _decays(optimizer: Any, variable: Any) -> bool:
    if optimizer.weight_decay is None:
        return True
    return bool(optimizer._use_weight_decay(variable))  # noqa: SLF001 - what the user excluded is kept nowhere else


def _is_ours(function: Any) -> bool:
    """Whether a function is Keras's own, not one of the user's with the same name."""
    return str(getattr(function, "__module__", "")).startswith("keras.src.")
