"""Call any function of rows in parallel, whatever it takes and returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras

from isobatch.backend import Options, Shard
from isobatch.devices import Device
from isobatch.placement import Placement
from isobatch.scatter import scatter
from isobatch.trees import flatten
from isobatch_keras.arrays import is_array, shape
from isobatch_keras.devices import scope
from isobatch_keras.gathering import Joining, add_losses, gather_outcomes
from isobatch_keras.layers import count_rows, share, slice_rows
from isobatch_keras.norms import norms_of
from isobatch_keras.replica import run
from isobatch_keras.state import Outcome, settle

__all__ = ["Setup", "call_parallel"]


class Setup(NamedTuple):
    """What a parallel model was made from."""

    template: keras.Model
    devices: tuple[Device, ...]
    options: Options
    output_device: Device
    placements: tuple[Placement, ...] | None = None


def call_parallel(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    setup: Setup,
    add_loss: Callable[[Any], None],
) -> Any:
    """Call a function once on each device, on a part of the rows.

    Args:
        function: The template, or a method of it.
        args: Its arguments.
        kwargs: Its keyword arguments.
        setup: Devices and options.
        add_loss: What takes the losses that layers added.

    Returns:
        Its output for all rows.
    """
    names = list(inspect.signature(getattr(function, "call", function)).parameters)
    outcomes: list[Outcome] = []
    state, norms = setup.options.state, norms_of(setup.template)
    for shard, size in _deal(args, kwargs, setup, names):
        outcomes.append(
            run(function, shard, size, outcomes[-1] if outcomes else None, policy=state, norms=norms)
        )
    settle(outcomes, state, norms)
    add_losses(add_loss, outcomes, setup.options.scalars)
    return gather_outcomes(outcomes, setup.output_device, setup.options)


def _deal(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], setup: Setup, names: Sequence[str]
) -> list[tuple[Shard, Any]]:
    """Return the shards of the replicas that run, and their sizes."""
    leaves, _ = flatten((args, dict(kwargs)), is_array)
    devices, options = setup.devices, setup.options
    if not any(None in (shape(leaf) or ()) for leaf in leaves):
        known: Any = Splitting(None, options)
        shards = scatter(known, args, kwargs, devices, options, names=names)
        return [(shard, 1 if shard.rows is None else len(shard.rows)) for shard in shards]
    traced: Any = Splitting(len(devices), options)
    one_each = replace(options, policy="balanced", min_rows=1)
    shards = scatter(traced, args, kwargs, devices, one_each, names=names)
    rows = traced.count()
    sizes = [share(rows, shard.rank, len(devices), options)[0] for shard in shards]
    dealt = zip(shards, sizes, strict=True)
    return [
        (replace(shard, rows=None, total=0), size)
        for shard, size in dealt
        if not isinstance(size, int) or size
    ] or [(shards[0], 0)]


class Splitting(Joining):
    """What `isobatch.scatter` asks of a backend, in a traced graph too, where the number of rows is unknown.

    There every array is shown as one row for each replica, and taking such a row means taking the replica's rows.

    Args:
        replicas: How many there are; `None` when shapes are known.
        options: Who gets which rows.
    """

    def __init__(self, replicas: int | None, options: Options) -> None:
        super().__init__([])
        self.replicas = replicas
        self.options = options
        self.split: list[tuple[Any, int]] = []

    def shape(self, value: Any) -> tuple[int, ...] | None:
        """Return an array's shape, or one row for each replica."""
        known = shape(value)
        return known if known is None or self.replicas is None else (self.replicas,) * len(known)

    def take(self, array: Any, rows: slice | None, axis: int, device: Device) -> Any:
        """Return the rows of a replica."""
        if self.replicas is None or rows is None:
            return super().take(keras.ops.convert_to_tensor(array), rows, axis, device)
        if rows.start == 0:
            self.split.append((array, axis))
        with scope(device):
            return slice_rows(
                array,
                rank=rows.start,
                replicas=self.replicas,
                policy=self.options.policy,
                min_rows=self.options.min_rows,
                axis=axis,
            )

    def count(self) -> Any:
        """Return the number of rows of what was split."""
        return count_rows(
            [x for x, _ in self.split],
            [f"argument {i}" for i in range(len(self.split))],
            [axis for _, axis in self.split],
        )
