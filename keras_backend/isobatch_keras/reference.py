"""The Keras side of the built-in parity run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from isobatch.digits import Images
from isobatch.parallel import over_cpus

__all__ = ["ReferenceNetwork", "digits_network", "train"]


def digits_network(shape: tuple[int, int, int], classes: int, precision: str = "float32") -> keras.Model:
    """Return a small convolutional network with BatchNorm, the same as `isobatch_torch.reference.DigitsNetwork`.

    Args:
        shape: Height, width and channels of an image.
        classes: Number of classes.
        precision: Type of its weights and outputs.

    Returns:
        A functional model from images `(B, height, width, channels)` to logits `(B, classes)`.

    >>> digits_network((8, 8, 1), 10).output_shape
    (None, 10)
    """
    layers = keras.layers
    image = x = keras.Input(shape, dtype=precision, name="image")
    for number, filters in ((1, 16), (2, 32)):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False, dtype=precision, name=f"conv{number}")(
            x
        )
        x = layers.BatchNormalization(momentum=0.9, dtype=precision, name=f"norm{number}")(x)
        x = layers.ReLU(dtype=precision, name=f"relu{number}")(x)
        x = layers.MaxPooling2D(2, dtype=precision, name=f"pool{number}")(x)
    x = layers.Flatten(dtype=precision, name="flat")(x)
    logits = layers.Dense(classes, dtype=precision, name="logits")(x)
    return keras.Model(image, logits, name="digits")


def train(
    images: Images, *, replicas: int, epochs: int, seed: int, on_epoch: Callable[[int], None]
) -> dict[str, np.ndarray[Any, Any]]:
    """Train the network through `data_parallel` and return its weights.

    Args:
        images: What to train on.
        replicas: Number of replicas, on the CPU.
        epochs: How often the images are seen.
        seed: For the first weights and the order of rows.
        on_epoch: Called with the number of each epoch that has ended, from 1.

    Returns:
        Float32 arrays by layer and Keras name, such as `"conv1.kernel"`.
    """
    keras.utils.set_random_seed(seed)
    model = digits_network(images.shape, images.classes)
    parallel = over_cpus(model, replicas)
    parallel.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    report = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, _logs: on_epoch(epoch + 1))
    parallel.fit(
        images.train, images.train_labels, batch_size=64, epochs=epochs, verbose=0, callbacks=[report]
    )
    return {
        f"{layer.name}.{variable.name}": keras.ops.convert_to_numpy(variable)
        for layer in model.layers
        for variable in layer.variables
        if "seed" not in variable.name
    }


class ReferenceNetwork:
    """The digits network in one precision, by itself and over replicas on the CPU.

    Args:
        shape: Height, width and channels of an image.
        classes: Number of classes.
        precision: `"float32"` or `"float64"`.
        weights: From `train`.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        precision: str,
        weights: Mapping[str, np.ndarray[Any, Any]],
    ) -> None:
        self._model = digits_network(shape, classes, precision)
        for layer in self._model.layers:
            for variable in layer.variables:
                variable.assign(weights[f"{layer.name}.{variable.name}"])
        self._over = functools.cache(functools.partial(over_cpus, self._model))

    def predict(self, images: np.ndarray[Any, Any], replicas: int | None = None) -> np.ndarray[Any, Any]:
        """Return the logits `(B, classes)` of images `(B, height, width, channels)`, by one model or by so many replicas."""
        return np.asarray(self._over(replicas).predict_on_batch(images))
