"""The Keras side of a comparison of training: steps whose loss, gradients and weights can be read."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np

from isobatch.counted import Counted
from isobatch.trajectory import Step
from isobatch_keras.reference import digits_network
from isobatch_keras.spec.rules import find_rule
from isobatch_keras.spec.walk import walk
from isobatch_keras.training.recipe import template_of, variables_of

__all__ = ["KerasSide", "compiled_digits", "predict"]


class KerasSide:
    """Trains a compiled model step by step, eagerly, on TensorFlow.

    Args:
        model: A compiled model, also a parallel one.
        name: What to call it.
    """

    def __init__(self, model: Any, name: str = "keras") -> None:
        self.model = model
        self.name = name
        self.variables = variables_of(model)

    def step(self, batch: tuple[Any, ...]) -> Step:
        """Train on one batch.

        Args:
            batch: Inputs, targets, and perhaps sample weights.
        """
        from isobatch_keras._tensorflow import taped

        x, y = batch[:2]
        weight = batch[2] if len(batch) > 2 else None
        trained = self.model.trainable_variables

        def forward() -> tuple[Any, Any]:
            outputs = self.model(x, training=True)
            loss = self.model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weight, training=True)
            return loss, self.model.optimizer.scale_loss(loss)

        (loss, _), gradients = taped(forward, trained)
        found = dict(zip(map(id, trained), gradients, strict=True))
        self.model.optimizer.apply(gradients, trained)
        return Step(
            float(loss),
            {
                key: _dense(found[id(variable)], variable)
                for key, variable in self.variables.items()
                if id(variable) in found
            },
            self.weights(),
        )

    def weights(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Return weights and running statistics by key."""
        return {key: np.asarray(variable.numpy()) for key, variable in self.variables.items()}

    @contextmanager
    def counting(self, counted: Counted) -> Generator[None]:
        """Let dropout layers keep the units that are counted.

        Args:
            counted: Which those are.

        Raises:
            SpecError: Other layers draw random numbers.
        """
        found, spec = walk(template_of(self.model), find_rule)
        counted.check(spec)
        layers = {id(call.operation): call.operation for call in found.calls}.values()
        dropouts = [layer for layer in layers if isinstance(layer, keras.layers.Dropout)]
        for layer in dropouts:
            layer.__dict__["call"] = partial(_drop, layer, found.module_of(layer), counted)
        try:
            yield
        finally:
            for layer in dropouts:
                del layer.__dict__["call"]


def compiled_digits(shape: tuple[int, int, int], classes: int, seed: int, dtype: str) -> keras.Model:
    """Return the digits network, compiled with Adam; its first weights are the same numbers in every type.

    Args:
        shape: Height, width and channels of an image.
        classes: Number of classes.
        seed: Of its weights.
        dtype: Its type.
    """
    keras.utils.set_random_seed(seed)
    first = digits_network(shape, classes, "float32")
    model = digits_network(shape, classes, dtype)
    model.set_weights([keras.ops.convert_to_numpy(weight) for weight in first.weights])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype=dtype)
    model.compile(keras.optimizers.Adam(2e-3), loss)
    return model


def predict(model: keras.Model, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a model's output in inference."""
    return np.asarray(model.predict_on_batch(x))


def _drop(layer: Any, name: str, counted: Counted, inputs: Any, training: bool = False) -> Any:  # noqa: FBT001, FBT002 - Keras's signature
    if not training or not layer.rate:
        return inputs
    wanted = layer._get_noise_shape(inputs) if hasattr(layer, "_get_noise_shape") else layer.noise_shape  # noqa: SLF001 - of spatial ones
    kept = keras.ops.convert_to_tensor(counted.kept(name, inputs.shape, layer.rate, wanted))
    return keras.ops.where(kept, inputs / (1 - layer.rate), keras.ops.zeros_like(inputs))


def _dense(gradient: Any, variable: keras.Variable) -> np.ndarray[Any, Any]:
    if gradient is None:
        return np.zeros(variable.shape, variable.dtype)
    return np.asarray(keras.ops.convert_to_numpy(gradient))
