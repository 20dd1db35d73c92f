"""What the walk over a model's graph is made of: references, calls, and settings and weights as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import keras
import numpy as np
from keras.src.models.functional import Functional

from isobatch.errors import SpecError

__all__ = ["Call", "Ref", "as_array", "functional_of", "input_name", "packed_names", "plain"]


class Ref(str):
    """A reference to an output of a node, with its shape; `shape` is empty where no rule needs it."""

    __slots__ = ("dtype", "shape")
    shape: tuple[int | None, ...]
    dtype: str

    def __new__(cls, name: str, shape: Sequence[int | None] = (), dtype: str = "float32") -> Self:
        """Make a reference."""
        self = super().__new__(cls, name)
        self.shape, self.dtype = tuple(shape), dtype
        return self


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer or operation of the model, as it can be repeated.

    Args:
        path: The layer's path.
        operation: What is called.
        args: Positional arguments, references in place of arrays.
        kwargs: Arguments by name, likewise.
        outputs: References to what comes back, flat.
    """

    path: str
    operation: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Ref, ...]


def functional_of(operation: Any) -> Any:
    """Return the graph of a model; `None` for what is no model, or computes something else than its graph.

    Args:
        operation: Any layer or operation.
    """
    if not isinstance(operation, keras.Model):
        return None
    if isinstance(operation, keras.Sequential):
        return operation._functional if type(operation).call is keras.Sequential.call else None  # noqa: SLF001
    return (
        operation if isinstance(operation, Functional) and type(operation).call is Functional.call else None
    )


def as_array(variable: Any) -> np.ndarray[Any, Any]:
    """Return a variable's or array's values, bfloat16 as float32.

    Args:
        variable: A Keras variable, a tensor or a numpy array.
    """
    array = np.asarray(variable.numpy() if isinstance(variable, keras.Variable) else variable)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def packed_names(structure: Any, names: list[str]) -> Any:
    """Return names in the nest in which a model is given its inputs or returns its outputs.

    Args:
        structure: That nest.
        names: One for each of its leaves.
    """
    packed = keras.tree.pack_sequence_as(structure, names)
    return _lists(packed)


def _lists(nest: Any) -> Any:
    if isinstance(nest, Mapping):
        return {str(key): _lists(value) for key, value in nest.items()}
    return [_lists(value) for value in nest] if isinstance(nest, list | tuple) else nest


def plain(value: Any) -> Any:
    """Return a setting as JSON has it.

    Args:
        value: Numbers, text and `None` in any nest of lists, tuples and mappings.

    Raises:
        SpecError: There is something else in it.

    >>> plain({"strides": (2, np.int64(1))})
    {'strides': [2, 1]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    msg = f"Expected a setting that JSON can hold, got {value!r}."
    raise SpecError(msg)


def input_name(tensor: Any) -> str:
    """Return the name of the layer an input came from: the tensor's own is a number if the user gave none.

    Args:
        tensor: An input of a functional model.
    """
    return str(tensor._keras_history.operation.name).replace(".", "_").replace(":", "_")  # noqa: SLF001
