"""Running state: what a model updates in the forward pass, captured in each replica and settled once."""

# pyright: reportUntypedBaseClass=false
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from isobatch.backend import Shard, StatePolicy
from isobatch_keras.arrays import is_traced, reduce
from isobatch_keras.norms import Norm, pool

__all__ = ["Outcome", "Recording", "carry", "settle"]

Update = tuple[keras.Variable, Any]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Outcome:
    """What a replica left behind.

    Args:
        shard: What it was called with.
        size: Its rows: an integer, or a 0-d tensor in a traced graph, where it may turn out to be 0.
        output: What the template returned.
        masks: The masks the output's leaves carry, in the same container; `None` where there is none at all.
        losses: What layers added with `add_loss`, activity regularisers included.
        updates: Variables and their new values, in the order they were assigned.
        counts: For each call of a batch normalisation that updated it, the positions that were not masked; `None` for no mask.
        carried: Values the next replica starts from instead of the template's, by the variable's `id`.
        ran: Whether the template was called at all.
    """

    shard: Shard
    size: Any
    output: Any = None
    masks: Any = None
    losses: Sequence[Any] = ()
    updates: Sequence[Update] = ()
    counts: Mapping[Norm, Sequence[Any]] = field(default_factory=dict)
    carried: Mapping[int, Update] = field(default_factory=dict)
    ran: bool = True

    def __repr__(self) -> str:
        return f"Outcome({self.shard})"

    def values(self, variable: keras.Variable) -> list[Any]:
        """Return the values a variable was given, in order."""
        return [value for updated, value in self.updates if updated is variable]


class Recording(keras.StatelessScope):
    """A scope that keeps every assignment from happening, remembers it, and lets the code inside see it.

    Args:
        start: Values to start from where they are not the variables' own.
    """

    def __init__(self, start: Mapping[int, Update]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.state_mapping.update({key: value for key, (_, value) in start.items()})
        self.updates: list[Update] = []
        self.counts: dict[Norm, list[Any]] = {}

    def count(self, layer: Norm, positions: Callable[[], Any]) -> None:
        """Remember on how many positions a batch normalisation was called, if the call has updated its statistics."""
        made = self.counts.setdefault(layer, [])
        if sum(variable is layer.moving_mean for variable, _ in self.updates) > len(made):
            made.append(positions())

    def add_update(self, update: Update) -> None:
        """Remember an assignment."""
        self.updates.append(update)
        variable, value = update
        if variable.trainable:  # what is read from now on is the variable, so its gradient is the variable's
            before = keras.ops.cast(variable.value, value.dtype)
            value = keras.ops.stop_gradient(value) + (before - keras.ops.stop_gradient(before))
        super().add_update((variable, value))

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Return what a variable was assigned, here or in a scope around this one; `None` for nothing."""
        value = super().get_current_value(variable)
        if value is None and self.original_scope is not None:
            return self.original_scope.get_current_value(variable)
        return value


def carry(
    previous: Mapping[int, Update], updates: Sequence[Update], size: Any, policy: StatePolicy
) -> dict[int, Update]:
    """Return what the next replica starts from.

    Seeds go from replica to replica, or all would draw the same masks; with `"sequential"` everything does.

    Args:
        previous: What this replica started from.
        updates: What it assigned.
        size: Its rows; a replica without rows passes on what it got.
        policy: What becomes of running state.
    """
    carried = dict(previous)
    for variable, value in updates:
        if policy == "sequential" or _is_seed(variable):
            _, start = previous.get(id(variable), (variable, variable.value))
            carried[id(variable)] = (variable, _select(size, value, start))
    return carried


def settle(outcomes: Sequence[Outcome], policy: StatePolicy, norms: Sequence[Norm]) -> None:
    """Assign to each variable that a replica updated what the policy makes of all updates.

    Args:
        outcomes: Of the replicas that ran, in rank order.
        policy: `"merge"`, `"first"` or `"sequential"`.
        norms: The template's batch normalisations.
    """
    touched = {id(variable): variable for outcome in outcomes for variable, _ in outcome.updates}
    pooled = _pooled(outcomes, norms, touched) if policy == "merge" else {}
    settled = [
        (variable, pooled[key] if key in pooled else _settled(variable, outcomes, policy))
        for key, variable in touched.items()
    ]
    for variable, value in settled:
        variable.assign(value)


def _pooled(
    outcomes: Sequence[Outcome], norms: Sequence[Norm], touched: Mapping[int, keras.Variable]
) -> dict[int, Any]:
    """Return the statistics of batch normalisations, by the `id` of their variables."""
    sizes = [outcome.size for outcome in outcomes]
    pooled: dict[int, Any] = {}
    for layer in norms:
        variables = layer.moving_mean, layer.moving_variance
        if id(variables[0]) in touched and id(variables[1]) in touched:
            calls = [
                list(zip(outcome.counts.get(layer, ()), *map(outcome.values, variables), strict=True))
                for outcome in outcomes
            ]
            for variable, value in zip(variables, pool(layer, calls, sizes), strict=True):
                pooled[id(variable)] = _select(sum(sizes), value, variable.value)
    return pooled


def _settled(variable: keras.Variable, outcomes: Sequence[Outcome], policy: StatePolicy) -> Any:
    if policy == "sequential" or _is_seed(variable):
        return next(o.carried[id(variable)][1] for o in reversed(outcomes) if id(variable) in o.carried)
    start = variable.value
    if policy == "first" or not keras.backend.is_float_dtype(variable.dtype):
        value = start
        for outcome in reversed(outcomes):
            value = _select(outcome.size, (outcome.values(variable) or [start])[-1], value)
        return value
    sizes = [outcome.size for outcome in outcomes]
    merged = reduce([(outcome.values(variable) or [start])[-1] for outcome in outcomes], sizes, "mean")
    return _select(sum(sizes), merged, start)


def _is_seed(variable: keras.Variable) -> bool:
    return str(variable.name) == "seed_generator_state"


def _select(size: Any, value: Any, otherwise: Any) -> Any:
    return keras.ops.where(size > 0, value, otherwise) if is_traced(size) else value
