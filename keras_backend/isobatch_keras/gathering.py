"""Join what replicas left behind by the shared rules, in a traced graph too, where sizes are tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from isobatch.backend import Options, Result, Scalars
from isobatch.devices import Device
from isobatch.gather import gather
from isobatch.trees import flatten
from isobatch_keras.arrays import is_array, is_traced, join, reduce, set_mask, shape, take, without_rows
from isobatch_keras.devices import scope
from isobatch_keras.state import Outcome

__all__ = ["Joining", "add_losses", "gather_outcomes"]


class Joining:
    """What `isobatch.gather` asks of a backend, for replicas whose sizes may be tensors.

    Sizes that only the running graph knows are shown as 1 row, for all replicas alike; the sizes themselves stay here.

    Args:
        sizes: Rows of each replica.
    """

    def __init__(self, sizes: Sequence[Any]) -> None:
        self.sizes = sizes
        self.traced = any(is_traced(size) for size in sizes)

    def shape(self, value: Any) -> tuple[int, ...] | None:
        """Return an array's shape, 1 for an axis unknown while tracing."""
        known = shape(value)
        return known if known is None else tuple(1 if n is None else n for n in known)

    def take(self, array: Any, rows: slice | None, axis: int, device: Device) -> Any:
        """Return rows of an array, or all of it, on a device."""
        with scope(device):
            return (
                keras.ops.convert_to_tensor(array)
                if rows is None
                else take(array, rows.start, rows.stop, axis)
            )

    def join(self, arrays: Sequence[Any], axis: int, device: Device) -> Any:
        """Concatenate arrays on a device, leaving out those of replicas without rows."""
        with scope(device):
            return join(
                [without_rows(a, size, axis) for a, size in zip(arrays, self.sizes, strict=True)], axis
            )

    def reduce(self, arrays: Sequence[Any], _weights: Sequence[int], how: Scalars, device: Device) -> Any:
        """Reduce 0-d arrays on a device."""
        with scope(device):
            return reduce(arrays, self.sizes, how)

    def equal(self, a: Any, b: Any) -> bool:
        """Say whether two arrays are equal; while tracing let the step fail if they are not."""
        if self.traced:
            from isobatch_keras._tensorflow import check_equal

            check_equal(a, b, "Expected every replica to return the same for an output without a batch axis")
            return True
        return bool(keras.ops.all((a == b) | ((a != a) & (b != b))))  # noqa: PLR0124 - NaN equals NaN here


def gather_outcomes(
    outcomes: Sequence[Outcome],
    device: Device,
    options: Options,
    mark: Callable[[Any], Any] = lambda output: output,
) -> Any:
    """Return one output, with its masks, as if one device had computed it.

    Args:
        outcomes: Of the replicas that ran, in rank order.
        device: Where to put it.
        options: Batch axis of outputs, and how scalars are reduced.
        mark: Marks outputs that have no batch axis.
    """
    backend: Any = Joining([outcome.size for outcome in outcomes])
    output = gather(
        backend, [Result(outcome.shard, mark(outcome.output)) for outcome in outcomes], device, options
    )
    if any(outcome.masks is not None for outcome in outcomes):
        masks = gather(
            backend, [Result(outcome.shard, outcome.masks) for outcome in outcomes], device, options
        )
        for leaf, mask in zip(flatten(output, is_array)[0], flatten(masks, is_array)[0], strict=True):
            set_mask(leaf, mask)
    return output


def add_losses(add_loss: Callable[[Any], None], outcomes: Sequence[Outcome], scalars: Scalars) -> None:
    """Add the losses that layers of the template added, each counted by its replica's rows.

    Args:
        add_loss: The method of the layer whose losses they become.
        outcomes: Of the replicas that ran.
        scalars: `"sum"` where the template's losses are sums over rows; otherwise they are taken for means.
    """
    sizes = [outcome.size for outcome in outcomes]
    for values in zip(*(outcome.losses for outcome in outcomes), strict=True):
        add_loss(reduce(values, sizes, "sum" if scalars == "sum" else "mean"))
