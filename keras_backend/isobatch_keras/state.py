"""Running state: what a model updates in the forward pass, captured in each replica and settled once."""

# pyright: reportUntypedBaseClass=false
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import keras

from isobatch.backend import Shard, StatePolicy
from isobatch_keras.arrays import is_traced, reduce
from isobatch_keras.norms import Norm, in_step, pool

__all__ = ["Across", "Outcome", "Recording", "across", "carry", "is_seed", "settle"]

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


class Across:
    """One call of a model that other processes make too, on rows of their own.

    Args:
        rank: This process.
        add_up: Returns the sums over all processes of float tensors.
    """

    def __init__(self, rank: int, add_up: Callable[[Sequence[Any]], list[Any]]) -> None:
        self.rank = rank
        self.add_up = add_up
        self.rows: Any = 0
        self._weight: Any = None

    @property
    def weight(self) -> Any:
        """The part of all rows that this process had, a 0-d tensor; 0 where nobody had any."""
        if self._weight is None:
            own = keras.ops.cast(self.rows, "float64")
            self._weight = own / keras.ops.maximum(self.add_up([own])[0], 1.0)
        return self._weight

    def share(self, value: Any) -> Any:
        """Return what this process adds to the mean of a value over all rows; zeros if it had none, were the value NaN."""
        part = value * keras.ops.cast(self.weight, value.dtype)
        return keras.ops.where(self.weight > 0, part, keras.ops.zeros_like(part))


across: ContextVar[Across | None] = ContextVar("isobatch_keras_across", default=None)


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
        if policy == "sequential" or is_seed(variable):
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
    others = across.get()
    if others is not None:
        others.rows = sum(outcome.size for outcome in outcomes)
    touched = {id(variable): variable for outcome in outcomes for variable, _ in outcome.updates}
    pooled = _pooled(outcomes, norms, touched) if policy == "merge" else {}
    settled = [
        (variable, pooled[key] if key in pooled else _settled(variable, outcomes, policy))
        for key, variable in touched.items()
    ]
    if others is not None:
        settled = _shared(settled, pooled, policy, others)
    for variable, value in settled:
        variable.assign(value)


def _shared(
    settled: Sequence[Update], pooled: Mapping[int, Any], policy: StatePolicy, others: Across
) -> list[Update]:
    """Let float state be the mean over all processes, or that of rank 0; statistics in `pooled` are those of all rows already."""
    places = [
        i
        for i, (variable, _) in enumerate(settled)
        if id(variable) not in pooled and keras.backend.is_float_dtype(variable.dtype)
    ]
    if not places:
        return list(settled)
    values = [keras.ops.convert_to_tensor(settled[i][1]) for i in places]
    own = [
        others.share(value)
        if policy == "merge"
        else value
        if others.rank == 0
        else keras.ops.zeros_like(value)
        for value in values
    ]
    result = list(settled)
    for i, value in zip(places, others.add_up(own), strict=True):
        result[i] = (settled[i][0], value)
    return result


def _pooled(
    outcomes: Sequence[Outcome], norms: Sequence[Norm], touched: Mapping[int, keras.Variable]
) -> dict[int, Any]:
    """Return the statistics of batch normalisations, by the `id` of their variables."""
    sizes = [outcome.size for outcome in outcomes]
    others = across.get()
    updated = [
        layer for layer in norms if id(layer.moving_mean) in touched and id(layer.moving_variance) in touched
    ]
    pools = []
    for layer in updated:
        variables = layer.moving_mean, layer.moving_variance
        calls = [
            list(zip(outcome.counts.get(layer, ()), *map(outcome.values, variables), strict=True))
            for outcome in outcomes
        ]
        pools.append(pool(layer, calls, sizes if others is None else [_traced(size) for size in sizes]))
    rows = sum(sizes) if others is None else 1  # somewhere there are some
    pooled: dict[int, Any] = {}
    for layer, values in zip(updated, in_step(pools, None if others is None else others.add_up), strict=True):
        for variable, value in zip((layer.moving_mean, layer.moving_variance), values, strict=True):
            pooled[id(variable)] = _select(rows, value, variable.value)
    return pooled


def _traced(size: Any) -> Any:
    """Return a number of rows as a tensor, whose 0 counts nothing."""
    return keras.ops.convert_to_tensor(size, "int64")


def _settled(variable: keras.Variable, outcomes: Sequence[Outcome], policy: StatePolicy) -> Any:
    if policy == "sequential" or is_seed(variable):
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


def is_seed(variable: keras.Variable) -> bool:
    """Say whether a variable is the state of a seed generator."""
    return str(variable.name) == "seed_generator_state"


def _select(size: Any, value: Any, otherwise: Any) -> Any:
    return keras.ops.where(size > 0, value, otherwise) if is_traced(size) else value
