"""Arrays of whatever framework Keras runs on: their shapes, their rows, their masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from isobatch.backend import Scalars
from isobatch.errors import LeafTypeError

__all__ = [
    "counted",
    "get_mask",
    "is_array",
    "is_traced",
    "join",
    "length",
    "reduce",
    "set_mask",
    "shape",
    "take",
    "without_rows",
]


def is_array(value: Any) -> bool:
    """Say whether a value is a tensor or a numpy array.

    >>> is_array(np.zeros(2)), is_array([0.0])
    (True, False)
    """
    return (
        isinstance(value, np.ndarray)
        or bool(keras.ops.is_tensor(value))
        or isinstance(value, keras.KerasTensor)
    )


def is_traced(number: Any) -> bool:
    """Say whether a number of rows is known only when a graph runs.

    >>> is_traced(3)
    False
    """
    return not isinstance(number, int)


def shape(value: Any) -> tuple[Any, ...] | None:
    """Return an array's shape, `None` for an axis unknown while tracing; `None` alone for what is no array.

    >>> shape(np.zeros((2, 3))), shape("text")
    ((2, 3), None)
    """
    return tuple(_dense(value).shape) if is_array(value) else None


def length(array: Any, axis: int) -> Any:
    """Return the length of an axis: an integer, or a 0-d tensor where only the running graph knows it.

    >>> length(keras.ops.zeros((2, 3)), 1)
    3
    """
    known = _dense(array).shape[axis]
    # int64, because weights of unequal devices multiply the number of rows by up to 2**21.
    return keras.ops.cast(keras.ops.shape(array)[axis], "int64") if known is None else int(known)


def take(array: Any, start: Any, stop: Any, axis: int) -> Any:
    """Return the rows `start` to `stop` of an array, and of the mask it carries.

    >>> keras.ops.convert_to_numpy(take(keras.ops.arange(5), 1, 3, 0)).tolist()
    [1, 2]
    """
    part = array[(slice(None),) * axis + (slice(start, stop),)]
    mask = get_mask(array)
    return part if mask is None else set_mask(part, mask[(slice(None),) * axis + (slice(start, stop),)])


def without_rows(array: Any, size: Any, axis: int) -> Any:
    """Return an array as it is, or no rows of it when `size` is 0."""
    if not is_traced(size):
        return array
    rows = length(array, axis)
    return take(array, 0, keras.ops.where(size > 0, rows, keras.ops.zeros_like(rows)), axis)


def join(arrays: Sequence[Any], axis: int) -> Any:
    """Return arrays put together along an axis; a single one as it is."""
    return arrays[0] if len(arrays) == 1 else keras.ops.concatenate(list(arrays), axis=axis)


def reduce(arrays: Sequence[Any], sizes: Sequence[Any], how: Scalars) -> Any:
    """Return 0-d arrays reduced to one.

    Args:
        arrays: One for each replica.
        sizes: Rows of each replica; where one is 0 while tracing, its array counts nothing, NaN included.
        how: `"mean"` weights by rows, `"sum"` adds, `"stack"` gives a vector.

    >>> float(reduce([keras.ops.array(1.0), keras.ops.array(4.0)], [2, 1], "mean"))
    2.0
    """
    if how == "stack":
        return join(
            [
                without_rows(keras.ops.reshape(a, (1,)), size, 0)
                for a, size in zip(arrays, sizes, strict=True)
            ],
            0,
        )
    total = sum(sizes)
    terms = [
        counted(a if how == "sum" else a * _share(size, total, a.dtype), size)
        for a, size in zip(arrays, sizes, strict=True)
    ]
    return terms[0] if len(terms) == 1 else sum(terms[1:], terms[0])


def get_mask(array: Any) -> Any:
    """Return the mask an array carries, as Keras attaches it; `None` for none."""
    return getattr(array, "_keras_mask", None)


def set_mask(array: Any, mask: Any) -> Any:
    """Attach a mask to an array, as Keras does, and return the array."""
    if mask is not None:
        array._keras_mask = mask  # noqa: SLF001 - Keras has no public way to do this
    return array


def _dense(array: Any) -> Any:
    if hasattr(array, "row_splits") or hasattr(array, "dense_shape"):
        msg = (
            f"Expected dense arrays, got a {type(array).__name__} of shape {array.shape}, which cannot be sliced by rows. "
            "Make it dense: a ragged tensor by to_tensor(), with a mask; a sparse one by tf.sparse.to_dense()."
        )
        raise LeafTypeError(msg)
    return array


def _share(size: Any, total: Any, dtype: Any) -> Any:
    """Part of all rows."""
    if is_traced(size):  # in float64, because float16 ends at 65504 rows
        part = keras.ops.cast(size, "float64") / keras.ops.cast(keras.ops.maximum(total, 1), "float64")
        return keras.ops.cast(part, dtype)
    return size / total if total else 1.0


def counted(value: Any, size: Any) -> Any:
    """Return an array, or zeros where `size` turns out to be 0."""
    return keras.ops.where(size > 0, value, keras.ops.zeros_like(value)) if is_traced(size) else value
