"""What `isobatch bench` times on the Keras side: a forward pass, or a step of training, numpy in and numpy out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from isobatch.errors import ModelError

__all__ = ["forward", "step"]


def forward(model: keras.Model, batch: Any) -> Callable[[], Any]:
    """Return a call that predicts.

    Args:
        model: Any model.
        batch: Numpy arrays as the model is given them.

    Returns:
        A function that returns the outputs as numpy arrays.

    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.ReLU()])
    >>> forward(model, np.array([[1.0, -1.0, 2.0]], "float32"))()
    array([[1., 0., 2.]], dtype=float32)
    """
    return lambda: model.predict_on_batch(batch)


def step(model: keras.Model, batch: Any) -> Callable[[], Any]:
    """Return a call that takes one step of SGD on the mean square of the outputs, with a learning rate of 0: weights stay.

    Args:
        model: Any model; it is compiled anew.
        batch: Numpy arrays as the model is given them.

    Returns:
        A function that returns the loss, the sum over outputs, as a 0-d array.

    Raises:
        ModelError: There is nothing to train.

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    >>> step(model, np.array([[3.0, -1.0]], "float32"))()
    array(4.)
    """
    if not model.trainable_weights:
        msg = f"Expected a model with trainable weights, {model.name!r} has none."
        raise ModelError(msg)
    targets = keras.tree.map_structure(lambda array: 0 * array, model.predict_on_batch(batch))
    model.compile(keras.optimizers.SGD(0.0), "mse")

    def call() -> np.ndarray[Any, Any]:
        found = model.train_on_batch(batch, targets)
        return np.asarray(found[0] if isinstance(found, list) else found)

    return call
