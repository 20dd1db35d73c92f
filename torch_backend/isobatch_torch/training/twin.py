"""The torch side of a compiled Keras model: a module with an optimizer, a loss, metrics and a schedule, and a small loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from isobatch.recipe import Part, Recipe
from isobatch.spec import references
from isobatch.training_state import TrainingState
from isobatch.trees import flatten
from isobatch_torch.spec.build import Twin, load_tensors, module_path, parts_of, to_tensors, to_torch
from isobatch_torch.training.losses import TotalLoss, keep_logits
from isobatch_torch.training.metrics import KerasMetric, build_metric
from isobatch_torch.training.optimizer import KerasOptimizer, RepeatedRows
from isobatch_torch.training.optimizers import optimizer_class
from isobatch_torch.training.scaling import LossScaler
from isobatch_torch.training.schedules import KerasSchedule

__all__ = ["TrainingTwin", "from_recipe", "read_state", "write_state"]


class TrainingTwin:
    """A network that trains as its Keras model does. All parts are torch's own kind and can be used in a loop of one's own.

    Args:
        module: The twin; or the twin made parallel, which trains the same weights.
        optimizer: Of its weights.
        loss: Of its outputs.
        metrics: By the names they are reported as.
        schedule: Of the learning rate; `None` for a constant one.
        scaler: Scales the loss dynamically; `None`: not so.
        masks: Numbers of the outputs whose masks the module returns after its outputs.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: KerasOptimizer,
        loss: TotalLoss,
        metrics: Mapping[str, tuple[int, bool, KerasMetric]],
        schedule: KerasSchedule | None,
        *,
        scaler: LossScaler | None = None,
        masks: Sequence[int] = (),
    ) -> None:
        self.module, self.optimizer, self.loss, self.schedule = module, optimizer, loss, schedule
        self.scaler = scaler
        self._masks = tuple(masks)
        self._metrics = dict(metrics)

    @property
    def network(self) -> Twin:
        """The twin itself, inside of a wrapper that makes it parallel."""
        found: Any = self.module
        return found if isinstance(found, Twin) else found.module

    @property
    def metrics(self) -> dict[str, float]:
        """Values since `reset_metrics`, by name."""
        return {name: metric.compute() for name, (_, _, metric) in self._metrics.items()}

    def reset_metrics(self) -> None:
        """Start metrics anew, as each epoch does."""
        for _, _, metric in self._metrics.values():
            metric.reset()

    def train_on_batch(self, x: Any, y: Any, sample_weight: Any = None) -> float:
        """Take one step.

        Args:
            x: Arrays `(B, ...)`, one for each input of the module, in a list if there are several.
            y: Targets, one for each output, in the nest that the module returns.
            sample_weight: Weights `(B,)` for all outputs.

        Returns:
            The loss before the step.
        """
        outputs, masks = self._forward(x)
        targets = _tensors(y)
        weight = None if sample_weight is None else torch.as_tensor(sample_weight)
        self.optimizer.zero_grad()
        loss = self.loss(outputs, targets, [weight] * len(outputs), masks)
        if self._step(loss) and self.schedule is not None:
            self.schedule.step()
        for place, weighted, metric in self._metrics.values():
            metric.update(targets[place], outputs[place].detach(), weight if weighted else None, masks[place])
        return float(loss.detach())

    def _step(self, loss: torch.Tensor) -> bool:
        """Let the optimizer take its step; say whether it did."""
        if self.scaler is not None:
            (loss * self.scaler.factor).backward()  # type: ignore[no-untyped-call]
            return self.scaler.step(self.optimizer)
        fixed = self.optimizer.param_groups[0].get("loss_scale_factor")
        (loss if fixed is None else loss * fixed).backward()
        self.optimizer.step()
        return True

    def fit(
        self,
        x: Any,
        y: Any,
        *,
        batch_size: int = 32,
        epochs: int = 1,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
    ) -> list[float]:
        """Take the rows in the order they have, batch by batch, as Keras does with `shuffle=False`.

        Args:
            x: As for `train_on_batch`.
            y: Likewise.
            batch_size: Rows of a batch; the last one may have fewer.
            epochs: How often the rows are seen.
            sample_weight: As for `train_on_batch`, for all rows.
            class_weight: What a row of a class counts for, 1 where nothing is said; of a model with one output.

        Returns:
            The loss of each epoch: the mean over its rows. At the end moving averages of the weights take their place, if there are any.

        Raises:
            ValueError: Both weights are given, or classes are weighted for several outputs.
        """
        inputs, targets = _tensors(x), _tensors(y)
        weights = None if sample_weight is None else torch.as_tensor(sample_weight)
        if class_weight is not None:
            weights = _weights_of_classes(targets, class_weight, weights)
        rows = len(inputs[0])
        history: list[float] = []
        for _ in range(epochs):
            self.reset_metrics()
            total = 0.0
            for start in range(0, rows, batch_size):
                part = slice(start, min(start + batch_size, rows))
                taken = None if weights is None else weights[part]
                loss = self.train_on_batch(
                    [one[part] for one in inputs], [one[part] for one in targets], taken
                )
                total += loss * (part.stop - start)
            history.append(total / rows)
        self.optimizer.use_averages()
        return history

    def _forward(self, x: Any) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        dtype = next(self.module.parameters()).dtype
        inputs = [one.to(dtype) if one.is_floating_point() else one for one in _tensors(x)]
        found: list[torch.Tensor] = flatten(self.module(*inputs))[0]
        outputs = found[: len(found) - len(self._masks)]
        masks = dict(zip(self._masks, found[len(outputs) :], strict=True))
        return outputs, [masks.get(number) for number in range(len(outputs))]


def from_recipe(recipe: Recipe, module: Twin, *, repeated_rows: RepeatedRows = "keras") -> TrainingTwin:
    """Return what trains a twin as a recipe says, from the beginning.

    Args:
        recipe: The recipe.
        module: The twin; it is put into training mode and the recipe's precision, and trains what the recipe does not freeze.
        repeated_rows: What a row of an embedding counts for that is looked up several times in a batch; see `KerasOptimizer`.
    """
    dtype = getattr(torch, recipe.dtype)
    module.to(dtype)
    parts = parts_of(module)
    optimizer = _optimizer(recipe, module, parts, repeated_rows)
    schedule = (
        KerasSchedule(optimizer, recipe.learning_rate) if isinstance(recipe.learning_rate, Part) else None
    )
    penalties = [
        (p, factors)
        for key, factors in recipe.penalties.items()
        for p in parts[key]
        if isinstance(p, nn.Parameter)
    ]
    _keep_logits(module)
    return TrainingTwin(
        _training(module, recipe, parts),
        optimizer,
        TotalLoss(recipe.losses, penalties, dtype),
        {one.name: (one.output, one.weighted, build_metric(one, dtype)) for one in recipe.metrics},
        schedule,
        scaler=None if recipe.loss_scale is None else LossScaler(**recipe.loss_scale),
        masks=recipe.masks,
    )


def read_state(training: TrainingTwin) -> TrainingState:
    """Return how far a twin's training has come.

    Args:
        training: What trains it.
    """
    module, optimizer = training.network, training.optimizer
    kept = {slot for state in optimizer.state.values() for slot in state}
    trained = {
        key for key, parts in parts_of(module).items() if any(part in optimizer.state for part in parts)
    }
    slots: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for slot in sorted(kept):
        found = to_tensors(module, partial(_kept, optimizer, slot))
        slots[slot] = {key: array for key, array in found.items() if key in trained}
    group = optimizer.param_groups[0]
    once = {name: float(group[name]) for name in optimizer.once if optimizer.state}
    once |= {} if training.scaler is None else training.scaler.state()
    name = type(optimizer).__name__.lower()
    return TrainingState(to_tensors(module), slots, optimizer.iterations, once, name)


def _kept(optimizer: KerasOptimizer, slot: str, part: torch.Tensor) -> torch.Tensor:
    """What an optimizer keeps for a tensor; the tensor itself where it keeps nothing."""
    found: torch.Tensor = optimizer.state.get(part, {}).get(slot, part.detach())
    return found


def write_state(training: TrainingTwin, state: TrainingState) -> None:
    """Let a twin's training go on from a state.

    Args:
        training: What trains it.
        state: Where to go on.
    """
    module, optimizer = training.network, training.optimizer
    load_tensors(module, state.weights)
    optimizer.iterations = state.iterations
    optimizer.state.clear()
    optimizer.prepare()
    for group in optimizer.param_groups:
        group.update({name: state.once[name] for name in optimizer.once if name in state.once})
    if training.scaler is not None and "dynamic_scale" in state.once:
        training.scaler.put(dict(state.once))
    keys = parts_of(module)
    for slot, arrays in state.slots.items():
        rest = {key: arrays.get(key, np.zeros(module.description.shapes[key])) for key in keys}
        for tensor, values in to_torch(module, rest):
            if slot in optimizer.state.get(tensor, {}):
                optimizer.state[tensor][slot].copy_(values)
    if training.schedule is not None:
        training.schedule.seek(state.iterations)


def _optimizer(
    recipe: Recipe, module: Twin, parts: Mapping[str, Sequence[torch.Tensor]], repeated_rows: RepeatedRows
) -> KerasOptimizer:
    """The optimizer of what Keras trains: a torch LSTM has a second bias, which stays zero."""
    trained = {
        key: [one for one in found if isinstance(one, nn.Parameter)]
        for key, found in parts.items()
        if key not in recipe.frozen
    }
    chosen = {id(p) for found in trained.values() for p in found}
    for p in module.parameters():
        p.requires_grad_(id(p) in chosen)
    settings = dict(recipe.optimizer.settings)
    groups = [
        {
            "params": [
                p for key, found in trained.items() for p in found if (key in recipe.undecayed) is exempt
            ]
        }
        | ({"weight_decay": None} if exempt else {})
        for exempt in (False, True)
    ]
    rate = recipe.learning_rate
    optimizer: KerasOptimizer = optimizer_class(recipe.optimizer.name)(
        [group for group in groups if group["params"]],
        0.0 if isinstance(rate, Part) else rate,
        together=[found for found in trained.values() if len(found) > 1],
        repeated_rows=repeated_rows,
        **settings,
    )
    if repeated_rows == "keras":
        for child in module.modules():
            if isinstance(child, nn.Embedding):
                optimizer.watch(child)
    return optimizer


def _training(module: Twin, recipe: Recipe, parts: Mapping[str, Sequence[torch.Tensor]]) -> Twin:
    """Put a module into training mode, but for norms whose statistics Keras does not run."""
    module.train()
    still = {id(one) for key in recipe.frozen for one in parts[key]}
    for child in module.modules():
        mean = getattr(child, "running_mean", None)
        if mean is not None and id(mean) in still:
            child.eval()
    return module


def _keep_logits(module: Twin) -> None:
    spec = module.description.spec
    nodes = {node.name: node for node in spec.nodes}
    for reference in references(spec.outputs):
        node = nodes.get(reference)
        if node is not None and node.operation in {"sigmoid", "softmax"}:
            module.get_submodule(module_path(node)).register_forward_hook(keep_logits)


def _weights_of_classes(
    targets: Sequence[torch.Tensor], class_weight: Mapping[int, float], weights: torch.Tensor | None
) -> torch.Tensor:
    """What each row counts for by its class: an integer, or the greatest of its targets."""
    if weights is not None or len(targets) > 1:
        got = "sample weights too" if weights is not None else f"{len(targets)} outputs"
        msg = f"Expected class weights alone, for a model with one output, got {got}."
        raise ValueError(msg)
    y = targets[0]
    if y.dim() > 1:
        y = y.argmax(-1) if y.shape[-1] != 1 else y.squeeze(-1)
    return torch.tensor([float(class_weight.get(int(one), 1.0)) for one in y.round()], dtype=torch.float64)


def _tensors(nest: Any) -> list[torch.Tensor]:
    return [torch.as_tensor(one) for one in flatten(nest)[0]]
