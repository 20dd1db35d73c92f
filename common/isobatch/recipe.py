"""How a network is trained, as data: optimizer, schedule, losses and metrics in Keras's meaning, without any framework.

A recipe belongs to a spec (`isobatch.spec`): weights are named by the keys of its tensors, outputs by their place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from isobatch.errors import SpecError

__all__ = ["METRICS", "OPTIMIZERS", "SCHEDULES", "SHARED", "VERSION", "Loss", "Metric", "Part", "Recipe"]

VERSION = 1
"""Of the text form; it grows when an older reader would misread a recipe."""

SHARED = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "gradient_accumulation_steps",
    "loss_scale_factor",
)
"""Settings that every optimizer has, beside its learning rate."""

OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "sgd": ("momentum", "nesterov"),
    "rmsprop": ("rho", "momentum", "epsilon", "centered"),
    "adam": ("beta_1", "beta_2", "epsilon", "amsgrad"),
    "adamw": ("beta_1", "beta_2", "epsilon", "amsgrad"),
    "adagrad": ("initial_accumulator_value", "epsilon"),
    "adadelta": ("rho", "epsilon"),
    "adamax": ("beta_1", "beta_2", "epsilon"),
    "nadam": ("beta_1", "beta_2", "epsilon"),
    "lion": ("beta_1", "beta_2"),
    "ftrl": (
        "learning_rate_power",
        "initial_accumulator_value",
        "l1_regularization_strength",
        "l2_regularization_strength",
        "l2_shrinkage_regularization_strength",
        "beta",
    ),
}
"""Settings of each optimizer's own."""

SCHEDULES: dict[str, tuple[str, ...]] = {
    "ExponentialDecay": ("initial_learning_rate", "decay_steps", "decay_rate", "staircase"),
    "PiecewiseConstantDecay": ("boundaries", "values"),
    "PolynomialDecay": ("initial_learning_rate", "decay_steps", "end_learning_rate", "power", "cycle"),
    "InverseTimeDecay": ("initial_learning_rate", "decay_steps", "decay_rate", "staircase"),
    "CosineDecay": ("initial_learning_rate", "decay_steps", "alpha", "warmup_target", "warmup_steps"),
    "CosineDecayRestarts": ("initial_learning_rate", "first_decay_steps", "t_mul", "m_mul", "alpha"),
}
"""Settings of each learning-rate schedule."""

LOSSES = (
    "mean_squared_error",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_logarithmic_error",
    "cosine_similarity",
    "huber",
    "log_cosh",
    "kl_divergence",
    "poisson",
    "hinge",
    "squared_hinge",
    "categorical_hinge",
    "binary_crossentropy",
    "binary_focal_crossentropy",
    "categorical_crossentropy",
    "categorical_focal_crossentropy",
    "sparse_categorical_crossentropy",
    "categorical_generalized_cross_entropy",
    "dice",
    "tversky",
)
"""Functions of targets and outputs that give a value for each row; metrics take their running mean."""

METRICS = (
    *LOSSES,
    "accuracy",
    "binary_accuracy",
    "categorical_accuracy",
    "sparse_categorical_accuracy",
    "top_k_categorical_accuracy",
    "sparse_top_k_categorical_accuracy",
    "root_mean_squared_error",
    "precision",
    "recall",
    "auc",
)
"""Words for metrics."""


@dataclass(frozen=True, slots=True)
class Part:
    """A word with what it is set to.

    Args:
        name: The word.
        settings: Plain JSON values.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.settings.items())})"


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one output.

    Args:
        output: Which output, counted from 0.
        function: A word of `LOSSES`, with the function's settings.
        reduction: `"sum_over_batch_size"`, `"mean"`, `"sum"` or `"mean_with_sample_weight"`.
        weight: What it counts in the whole loss; `None` where Keras multiplies by nothing.
        name: Name of the output, under which the loss is reported beside others.
    """

    output: int
    function: Part
    reduction: str
    weight: float | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of one output.

    Args:
        output: Which output, counted from 0.
        function: A word of `METRICS`, with its settings.
        name: What it is reported as.
        weighted: Whether sample weights count in it.
    """

    output: int
    function: Part
    name: str
    weighted: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that training is set to.

    Args:
        optimizer: A word of `OPTIMIZERS`, with its own settings and those in `SHARED`.
        learning_rate: A number, or a word of `SCHEDULES` with its settings.
        losses: Those of the outputs that have one.
        metrics: In the order in which they are reported.
        penalties: What is added to the loss for a weight, by key: `"l1"` and `"l2"`, factors.
        frozen: Keys of weights that are not trained.
        undecayed: Keys of weights that are left out of the weight decay.
        loss_scale: Dynamic loss scaling: `initial_scale` and `dynamic_growth_steps`; `None` for none.
        dtype: What losses and metrics are computed in.
        masks: Numbers of the outputs that carry a mask, which the network returns after its outputs.

    >>> recipe = Recipe(Part("sgd", {"momentum": 0.9}), 0.1, (Loss(0, Part("mean_squared_error"), "mean"),))
    >>> Recipe.from_json(recipe.to_json()) == recipe
    True
    """

    optimizer: Part
    learning_rate: float | Part
    losses: tuple[Loss, ...] = ()
    metrics: tuple[Metric, ...] = ()
    penalties: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    frozen: tuple[str, ...] = ()
    undecayed: tuple[str, ...] = ()
    loss_scale: Mapping[str, float] | None = None
    dtype: str = "float32"
    masks: tuple[int, ...] = ()

    def check(self) -> Recipe:
        """Return this recipe if every word in it is known.

        Raises:
            SpecError: Words are unknown, or settings are; the message lists all of them.
        """
        faults = [*self._faults()]
        if faults:
            msg = f"Expected a recipe of known words; these {len(faults)} are none: {'; '.join(faults)}."
            raise SpecError(msg)
        return self

    def _faults(self) -> list[str]:
        name = self.optimizer.name
        faults = _unknown(
            "optimizer", self.optimizer, {name: (*OPTIMIZERS.get(name, ()), *SHARED)}, OPTIMIZERS
        )
        if isinstance(self.learning_rate, Part):
            faults += _unknown("schedule", self.learning_rate, SCHEDULES, SCHEDULES)
        faults += [f"loss {one.function.name!r}" for one in self.losses if one.function.name not in LOSSES]
        return faults + [
            f"metric {one.function.name!r}" for one in self.metrics if one.function.name not in METRICS
        ]

    def to_json(self) -> str:
        """Return the recipe as JSON text."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Recipe:
        """Return the recipe in a text.

        Args:
            text: From `to_json`.

        Raises:
            SpecError: It is no JSON, of another version, or no sound recipe.
        """
        try:
            body = json.loads(text)
        except ValueError as error:
            msg = f"Expected a recipe as JSON: {error}"
            raise SpecError(msg) from None
        version = body.pop("version", None) if isinstance(body, dict) else None
        if version != VERSION:
            msg = f"Expected a recipe of version {VERSION}, got {version!r}."
            raise SpecError(msg)
        try:
            return _recipe(body).check()
        except (KeyError, TypeError, AttributeError) as error:
            msg = f"Expected a whole recipe: {type(error).__name__}: {error}"
            raise SpecError(msg) from None


def _unknown(
    kind: str, part: Part, settings: Mapping[str, Sequence[str]], words: Mapping[str, Any]
) -> list[str]:
    if part.name not in words:
        return [f"{kind} {part.name!r}"]
    return [f"{key!r} of {kind} {part.name!r}" for key in part.settings if key not in settings[part.name]]


def _recipe(body: dict[str, Any]) -> Recipe:
    rate = body["learning_rate"]
    parts: dict[str, Any] = {
        "optimizer": Part(**body["optimizer"]),
        "learning_rate": Part(**rate) if isinstance(rate, dict) else float(rate),
        "losses": tuple(Loss(**_with_part(one)) for one in body["losses"]),
        "metrics": tuple(Metric(**_with_part(one)) for one in body["metrics"]),
        "frozen": tuple(body["frozen"]),
        "undecayed": tuple(body["undecayed"]),
        "masks": tuple(body.get("masks", ())),
    }
    return Recipe(**{**body, **parts})


def _with_part(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "function": Part(**body["function"])}
