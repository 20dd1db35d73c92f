"""What the library must know of the model it is handed, and which models it refuses."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.models.functional import Functional

from isobatch.backend import Options
from isobatch.errors import ModelError

__all__ = ["check", "functional_of", "split_axes"]


def functional_of(model: keras.Model) -> Any:
    """Return the functional model that a model is or, for a built Sequential one, holds; `None` for others.

    >>> functional_of(keras.Sequential([keras.Input((3,)), keras.layers.ReLU()])).input_shape
    (None, 3)
    """
    if isinstance(model, Functional):
        return model
    # Sequential is no Functional but keeps one, and has neither `input` nor `output_names` of its own.
    return model._functional if isinstance(model, keras.Sequential) else None  # noqa: SLF001


def split_axes(functional: Any, options: Options) -> list[int | None]:
    """Return the batch axis of each input, `None` for one that all replicas get whole.

    Args:
        functional: A functional model.
        options: Batch axes, and inputs that are not split, by position, name or key.
    """
    axes: list[int | None] = []
    for path, tensor in keras.tree.flatten_with_path(functional.input):
        words = [tensor.name, *(path[:1] or (0,)), *(key for key in path[1:] if isinstance(key, str))]
        axis = options.axis
        if not isinstance(axis, int):
            axis = next((axis[word] for word in words if word in axis), 0)
        axes.append(
            None
            if not set(words).isdisjoint(options.broadcast) or not tensor.shape
            else axis % len(tensor.shape)
        )
    return axes


def check(model: keras.Model, options: Options) -> None:
    """Raise unless a model can be made parallel.

    Args:
        model: The template.
        options: Which inputs are split.

    Raises:
        ModelError: It is not built, stateful, or has an input of fixed batch size or that cannot be sliced.
    """
    functional = functional_of(model)
    if not model.built or (functional is None and isinstance(model, keras.Sequential)):
        msg = (
            f"Expected a built model, got {model.name!r} without weights. Give a Sequential model a keras.Input first, "
            "call build(input_shape), or call the model once on a batch."
        )
        raise ModelError(msg)
    stateful = [layer.name for layer in _all_layers(model) if getattr(layer, "stateful", False)]
    if stateful:
        msg = (
            f"Expected a model without stateful layers, got {model.name!r} with {', '.join(map(repr, stateful))}: their state belongs "
            "to the rows of a whole batch. Build them with stateful=False and pass states as inputs (initial_state=...)."
        )
        raise ModelError(msg)
    if functional is not None:
        for tensor, axis in zip(functional.inputs, split_axes(functional, options), strict=True):
            _check_input(model, tensor, axis)


def _check_input(model: keras.Model, tensor: Any, axis: int | None) -> None:
    if tensor.sparse or getattr(tensor, "ragged", False):
        msg = (
            f"Expected dense inputs, got {model.name!r} with the {'sparse' if tensor.sparse else 'ragged'} input {tensor.name!r}, "
            "which cannot be sliced. Make it dense, ragged rows with padding and a mask."
        )
        raise ModelError(msg)
    if axis is not None and tensor.shape[axis] is not None:
        msg = (
            f"Expected inputs of any batch size, got {model.name!r} with input {tensor.name!r} of shape {tensor.shape}: replicas get "
            f"a part of the {tensor.shape[axis]} rows. Build it with keras.Input(shape) and without batch_size, or name the input in "
            "broadcast=(...) if all replicas need all of it."
        )
        raise ModelError(msg)


def _all_layers(model: keras.Model) -> Any:
    return model._flatten_layers()  # noqa: SLF001 - `layers` leaves out what custom layers hold
