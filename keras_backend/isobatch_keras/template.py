"""What the library must know of the model it is handed."""

from __future__ import annotations

import keras
from keras.src.models.functional import Functional

__all__ = ["functional_of", "norms_of"]


def functional_of(model: keras.Model) -> Functional | None:
    """Return the functional model that a model is or, for a Sequential one, holds; `None` for others.

    >>> functional_of(keras.Sequential([keras.Input((3,)), keras.layers.ReLU()])).input_shape
    (None, 3)
    """
    if isinstance(model, Functional):
        return model
    # Sequential is no Functional but keeps one, and has neither `input` nor `output_names` of its own.
    return model._functional if isinstance(model, keras.Sequential) else None  # noqa: SLF001


def norms_of(model: keras.Model) -> dict[int, keras.layers.BatchNormalization]:
    """Return the batch normalisations of a model, by the `id` of their moving variance."""
    layers = model._flatten_layers()  # noqa: SLF001 - `layers` leaves out what custom layers hold
    return {id(layer.moving_variance): layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)}
