"""Tensors and numpy arrays: their shape, their rows, and how the parts become one again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from isobatch.backend import Scalars
from isobatch.devices import Device
from isobatch.errors import LeafTypeError
from isobatch_torch.accelerators import memory, same_memory, send
from isobatch_torch.internals import Gather, is_confined

__all__ = ["equal", "join", "reduce", "shape", "take"]


def shape(value: Any) -> tuple[int, ...] | None:
    """Return an array's shape, `()` for a 0-d one, and `None` for what is no array.

    Packed sequences and nested tensors are arrays of one axis: their sequences.

    Args:
        value: Anything.

    >>> shape(torch.ones(2, 3)), shape(torch.tensor(1.0)), shape("text")
    ((2, 3), (), None)
    """
    if isinstance(value, torch.Tensor):
        return (value.size(0),) if value.is_nested else tuple(map(int, value.shape))  # sizes may be symbols
    if isinstance(value, np.ndarray | np.generic):
        return value.shape
    if isinstance(value, PackedSequence):
        return (int(value.batch_sizes[0]),)
    return None


def _length(array: Any, axis: int) -> int:
    plain = isinstance(array, torch.Tensor) and not array.is_nested
    return array.shape[axis] if plain else (shape(array) or ())[axis]


def take(array: Any, rows: slice | None, axis: int, device: Device) -> Any:
    """Return rows of an array on a device, as a view where that is possible.

    Args:
        array: Anything that has a shape.
        rows: Which; `None` for all.
        axis: The batch axis, 0 or more.
        device: Where they are wanted. Numpy arrays have no place.

    >>> take(torch.arange(4), slice(1, 3), 0, Device("cpu", 1))
    tensor([1, 2])
    """
    whole = rows is None or (rows.start == 0 and rows.stop == _length(array, axis))
    if isinstance(array, np.ndarray | np.generic):
        return array if whole or isinstance(array, np.generic) else array[(slice(None),) * axis + (rows,)]
    if not whole and rows is not None:
        array = _rows(array, rows, axis)
    target = memory(device)
    if isinstance(array, torch.Tensor) and same_memory(array, target):
        return array
    if isinstance(array, torch.Tensor) and array.is_meta:
        msg = f"Expected tensors with values, got one of shape {tuple(array.shape)} on the meta device, which {device} cannot take."
        raise LeafTypeError(msg)
    return send(array, target) if isinstance(array, torch.Tensor) else array.to(target)


def _rows(array: Any, rows: slice, axis: int) -> Any:
    if isinstance(array, PackedSequence):
        padded, lengths = pad_packed_sequence(array, batch_first=True)
        return _pack(padded[rows], lengths[rows], is_sorted=array.sorted_indices is None)
    if array.is_nested:
        return _nest(list(array.unbind())[rows], array)
    start, length = rows.start, rows.stop - rows.start
    if array.layout != torch.strided:
        found = array.to_sparse_coo().index_select(axis, torch.arange(start, rows.stop, device=array.device))
        return found.to_sparse(layout=array.layout)
    if is_confined():
        return array.narrow(axis, start, length)
    if array.requires_grad and torch.is_grad_enabled():
        return _Slice.apply(array, axis, start, length)  # type: ignore[no-untyped-call]
    return array.narrow(axis, start, length).data


class _Slice(torch.autograd.Function):
    """Rows of a tensor that share its memory, but not its version.

    With views a replica that edits its rows in place (a first layer `ReLU(inplace=True)`) would seem to have changed
    what the other replicas have saved for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, array: torch.Tensor, axis: int, start: int, length: int) -> torch.Tensor:
        ctx.place = (axis, start, array.shape)
        return array.narrow(axis, start, length).data

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        axis, start, shape = ctx.place
        (grad,) = grads
        before, after = list(shape), list(shape)
        before[axis], after[axis] = start, shape[axis] - start - grad.shape[axis]
        return torch.cat([grad.new_zeros(before), grad, grad.new_zeros(after)], axis), None, None, None


def join(arrays: Sequence[Any], axis: int, device: Device) -> Any:
    """Return arrays put together along an axis, on a device.

    Args:
        arrays: At least one, all of one class.
        axis: 0 or more.
        device: Where the result lies.

    >>> join([torch.ones(1, 2), torch.zeros(2, 2)], 0, Device("cpu")).shape
    torch.Size([3, 2])
    """
    first = arrays[0]
    if len(arrays) == 1:
        return take(first, None, axis, device)
    if isinstance(first, np.ndarray | np.generic):
        return np.concatenate(arrays, axis)
    target = memory(device)
    if target.type != "cpu" and all(_is_on(array, target.type) for array in arrays):
        return Gather.apply(target, axis, *arrays)  # type: ignore[no-untyped-call] # into one allocation
    return _join_tensors([take(array, None, axis, device) for array in arrays], axis)


def _join_tensors(parts: Sequence[Any], axis: int) -> Any:
    first = parts[0]
    if isinstance(first, PackedSequence):
        return _join_packed(parts)
    if first.is_nested:
        return _nest([row for part in parts for row in part.unbind()], first)
    if first.layout != torch.strided:
        return torch.cat([part.to_sparse_coo() for part in parts], axis).to_sparse(layout=first.layout)
    return torch.cat(list(parts), axis)


def _is_on(array: Any, kind: str) -> bool:
    return (
        isinstance(array, torch.Tensor)
        and array.device.type == kind
        and array.layout == torch.strided
        and not array.is_nested
    )


def _join_packed(parts: Sequence[PackedSequence]) -> PackedSequence:
    longest = max(len(part.batch_sizes) for part in parts)
    unpacked = [pad_packed_sequence(part, batch_first=True, total_length=longest) for part in parts]
    lengths = torch.cat([length for _, length in unpacked])
    is_sorted = all(part.sorted_indices is None for part in parts) and bool(
        (lengths[1:] <= lengths[:-1]).all()
    )
    return _pack(torch.cat([padded for padded, _ in unpacked]), lengths, is_sorted=is_sorted)


def _pack(padded: torch.Tensor, lengths: torch.Tensor, *, is_sorted: bool) -> PackedSequence:
    return pack_padded_sequence(
        padded[:, : int(lengths.max())], lengths, batch_first=True, enforce_sorted=is_sorted
    )


def _nest(rows: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=like.layout)


def reduce(arrays: Sequence[Any], weights: Sequence[int], how: Scalars, device: Device) -> Any:
    """Return 0-d arrays reduced to one.

    Args:
        arrays: At least one.
        weights: Rows that each stands for.
        how: `"mean"` weights by rows, `"sum"` adds, `"stack"` gives a vector.
        device: Where the result lies.

    >>> reduce([torch.tensor(1.0), torch.tensor(4.0)], [2, 1], "mean", Device("cpu"))
    tensor(2.)
    """
    if isinstance(arrays[0], np.ndarray | np.generic):
        stacked = np.stack(arrays)
        return (
            stacked
            if how == "stack"
            else np.asarray(np.sum(stacked) if how == "sum" else np.average(stacked, weights=weights))
        )
    parts = [take(array, None, 0, device) for array in arrays]
    if how == "stack":
        return torch.stack(parts)
    if len(parts) == 1:
        return parts[0]
    total = sum(weights)
    terms = (
        parts
        if how == "sum"
        else [part * (weight / total) for part, weight in zip(parts, weights, strict=True)]
    )
    return torch.stack(terms).sum()


def equal(a: Any, b: Any) -> bool:
    """Return whether two arrays have the same shape, type and values, NaN being equal to NaN.

    Args:
        a: Anything that has a shape.
        b: Likewise.

    >>> nan = torch.tensor([float("nan"), 1.0])
    >>> equal(nan, nan.clone()), equal(nan, nan.double())
    (True, False)
    """
    if type(a) is not type(b) or shape(a) != shape(b):
        return False
    if isinstance(a, PackedSequence):
        return equal(a.data, b.data) and equal(a.batch_sizes, b.batch_sizes)
    if a.dtype != b.dtype:
        return False
    if isinstance(a, np.ndarray | np.generic):
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    return _equal_tensors(a, b.to(a.device))


def _equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_nested:
        return all(map(equal, a.unbind(), b.unbind()))
    if a.layout != torch.strided:
        return equal(a.to_dense(), b.to_dense())
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124 - only NaN differs from itself
