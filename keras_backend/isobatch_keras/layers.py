"""The three kinds of layers a parallel functional model is made of: slices, replicas and a merge."""

# pyright: reportUntypedBaseClass=false, reportUntypedFunctionDecorator=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import keras

from isobatch.backend import Axis, Options, Shard
from isobatch.devices import Device
from isobatch.errors import BatchSizeError, ModelError
from isobatch.rows import Policy, row_stop
from isobatch.trees import Broadcast
from isobatch_keras.arrays import is_traced, length, take
from isobatch_keras.gathering import add_losses, gather_outcomes
from isobatch_keras.norms import norms_of
from isobatch_keras.replica import idle, run
from isobatch_keras.state import Outcome, settle
from isobatch_keras.template import functional_of

__all__ = ["Merge", "Replica", "count_rows", "no_mask", "share", "slice_rows"]


def span(rows: Any, replicas: int, rank: int, policy: Policy, min_rows: int) -> tuple[Any, Any]:
    """Return the first row of a replica and the first that is no longer its own.

    >>> span(7, 4, 1, "balanced", 1)
    (2, 4)
    """
    start = row_stop(rows, replicas, rank - 1, policy, min_rows=min_rows) if rank else 0
    return start, row_stop(rows, replicas, rank, policy, min_rows=min_rows)


@keras.saving.register_keras_serializable("isobatch")
def slice_rows(x: Any, *, rank: int, replicas: int, policy: Policy, min_rows: int, axis: int) -> Any:
    """Return the rows of one replica.

    While tracing, where nobody can know yet whether there are any, a replica without rows gets one borrowed row (of zeros if
    there is none at all), so that no operation ever sees an empty batch.

    Args:
        x: `(B, ...)`, or `None` for an optional input that is not given.
        rank: The replica.
        replicas: How many there are.
        policy: As in `isobatch.split_sizes`.
        min_rows: As in `isobatch.split_sizes`.
        axis: The batch axis.

    Returns:
        `(B / replicas, ...)`, with its part of the mask.

    >>> slice_rows(keras.ops.arange(7), rank=3, replicas=4, policy="balanced", min_rows=1, axis=0).shape
    TensorShape([1])
    """
    if x is None:
        return None
    rows = length(x, axis)
    start, stop = span(rows, replicas, rank, policy, min_rows)
    if is_traced(rows):
        from isobatch_keras._tensorflow import padded

        x = padded(x, keras.ops.maximum(1 - rows, 0), axis) if keras.ops.is_tensor(x) else x
        start = keras.ops.where(stop > start, start, 0)
        stop = keras.ops.maximum(stop, start + 1)
    return take(x, start, stop, axis)


def share(rows: Any, rank: int, replicas: int, options: Options) -> tuple[Any, range | None]:
    """Return how many rows a replica gets, and which, if that is known before a graph runs.

    Args:
        rows: Of the whole batch; `None` when there is nothing to split, which counts as one row for the first replica.
        rank: The replica.
        replicas: How many there are.
        options: The policy.

    >>> share(7, 1, 4, Options())
    (2, range(2, 4))
    """
    if rows is None:
        return int(rank == 0), None
    start, stop = span(rows, replicas, rank, options.policy, options.min_rows)
    return stop - start, None if is_traced(rows) else range(start, stop)


@keras.saving.register_keras_serializable("isobatch")
def count_rows(arrays: Sequence[Any], names: Sequence[str], axes: Sequence[int]) -> Any:
    """Return the number of rows of a batch, which all its arrays must share.

    Args:
        arrays: `(B, ...)` each, or `None`.
        names: What to call them in an error.
        axes: Their batch axes.

    Raises:
        BatchSizeError: The arrays differ; while tracing the step fails when it runs.

    >>> count_rows([keras.ops.zeros((3, 2))], ["x"], [0])
    3
    """
    given = [
        (name, x, length(x, axis)) for x, name, axis in zip(arrays, names, axes, strict=True) if x is not None
    ]
    known = {rows for _, _, rows in given if not is_traced(rows)}
    if len(known) > 1:
        lines = "\n".join(f"  {name}: {rows} rows, shape {tuple(x.shape)}" for name, x, rows in given)
        msg = (
            f"Expected every input to have the same number of rows, got\n{lines}\n"
            "Name an input without a batch axis in broadcast=(...); axis=... sets another batch axis."
        )
        raise BatchSizeError(msg)
    first = next(iter(known), given[0][2]) if given else None
    for name, _, rows in given[1:]:
        if is_traced(rows):
            from isobatch_keras._tensorflow import check_equal

            check_equal(
                rows,
                first,
                f"Expected every input to have the same number of rows as {given[0][0]}, not so: {name}",
            )
    return first


@keras.saving.register_keras_serializable("isobatch")
def no_mask(_inputs: Any, _mask: Any) -> None:
    """Say that a Lambda layer attaches the masks of its outputs itself."""


class Replica(keras.layers.Layer):
    """Call the template on one shard, forward and backward on one device.

    What comes out is an `Outcome` rather than a tensor: outputs, losses and new running state travel to the merge in it.

    Args:
        template: The model; it is shared, not copied.
        rank: Position among the replicas.
        device: Where to run.
        replicas: How many there are.
        options: How to split and what becomes of running state.
        name: Name of the layer.
    """

    def __init__(
        self,
        template: keras.Model,
        rank: int,
        device: Device,
        *,
        replicas: int,
        options: Options,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, autocast=False, dtype=template.dtype_policy)
        self.template = template
        self.rank = rank
        self.device = device
        self.replicas = replicas
        self.options = options
        self.supports_jit = False  # an XLA cluster has one device
        self.supports_masking = True
        self.built = True

    def call(self, inputs: Any, rows: Any = None, previous: Outcome | None = None) -> Outcome:
        """Run on a shard.

        Args:
            inputs: The template's inputs, sliced; a borrowed row where the shard turns out empty.
            rows: Rows of the whole batch; `None` when nothing was split.
            previous: What the replica of the rank before left behind.
        """
        size, bounds = share(rows, self.rank, self.replicas, self.options)
        known = bounds is not None or rows is None
        total: Any = 0 if bounds is None else rows
        shard = Shard(self.rank, self.device, bounds, total, (inputs,), {})
        if known and not size and (rows != 0 or self.rank):
            return idle(shard, previous)
        return run(
            self.template, shard, size, previous, policy=self.options.state, norms=norms_of(self.template)
        )

    def get_config(self) -> dict[str, Any]:
        """Refuse to be cloned: a replica belongs to its model.

        Raises:
            ModelError: Always.
        """
        msg = "Expected keras.models.clone_model to get a template, got a parallel model; write clone_model(parallel.template)."
        raise ModelError(msg)

    @property
    def metrics(self) -> list[keras.Metric]:
        """None of its own: Keras finds those of the template's layers itself, and those of its `compile` are not the wrapper's."""
        return []

    def compute_output_spec(self, *_args: Any, **_kwargs: Any) -> keras.KerasTensor:
        """Show the shape of the template's first output."""
        first = self.template.outputs[0]
        return keras.KerasTensor(first.shape, first.dtype)

    def compute_mask(self, _inputs: Any, _previous_mask: Any) -> None:
        """Leave masks to the merge."""


class Merge(keras.layers.Layer):
    """Join what the replicas left behind: outputs by concatenation, losses by rows, running state by policy.

    Args:
        template: The model.
        device: Where outputs are joined.
        options: Batch axis of outputs, how scalars are reduced, and what becomes of running state.
        name: Name of the layer.
    """

    def __init__(
        self, template: keras.Model, device: Device, options: Options, name: str | None = None
    ) -> None:
        super().__init__(name=name, autocast=False, dtype=template.dtype_policy)
        # In functions, because Keras would track the layers and wrap the containers among a layer's attributes.
        structure = functional_of(template).output
        self.settle = partial(settle, policy=options.state, norms=norms_of(template))
        self.add_losses = partial(add_losses, self.add_loss, scalars=options.scalars)
        self.gather = partial(
            gather_outcomes, device=device, options=options, mark=partial(_marked, structure, options)
        )
        self.symbols = partial(_symbols, structure, options)
        self.supports_jit = False
        self.supports_masking = True
        self.built = True

    def call(self, outcomes: Sequence[Outcome]) -> Any:
        """Join the outcomes of all replicas, in rank order."""
        ran = [outcome for outcome in outcomes if outcome.ran]
        self.settle(ran)
        self.add_losses(ran)
        return self.gather(ran)

    def compute_output_spec(self, *_args: Any, **_kwargs: Any) -> Any:
        """Return the template's own outputs, as new symbols."""
        return self.symbols()

    def compute_mask(self, _inputs: Any, _previous_mask: Any) -> None:
        """Leave the masks that are attached already."""


def _symbols(structure: Any, options: Options) -> Any:
    """Return new symbols like the template's outputs."""

    def symbol(tensor: Any) -> keras.KerasTensor:
        stacked = not tensor.shape and options.scalars == "stack"
        return keras.KerasTensor((None,) if stacked else tensor.shape, tensor.dtype)

    return keras.tree.map_structure(symbol, structure)


def _marked(structure: Any, options: Options, output: Any) -> Any:
    """Mark what has no batch axis: Keras knows it from the symbolic shape."""
    marked = [
        Broadcast(leaf) if spec.shape and spec.shape[_axis(options.output_axis, path)] is not None else leaf
        for (path, spec), leaf in zip(
            keras.tree.flatten_with_path(structure), keras.tree.flatten(output), strict=True
        )
    ]
    return keras.tree.pack_sequence_as(output, marked)


def _axis(axis: Axis, path: tuple[Any, ...]) -> int:
    if isinstance(axis, Mapping):
        return axis.get(path[0], 0) if path else 0
    return axis
