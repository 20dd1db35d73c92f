"""From a Keras model to its spec, and from tensors back into the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from isobatch.errors import SpecError
from isobatch.spec import Spec
from isobatch_keras.spec.rules import find_rule
from isobatch_keras.spec.walk import walk

__all__ = ["load_tensors", "to_spec"]


def to_spec(model: Any, *, masks: bool = False) -> Spec:
    """Return a Keras model as a framework-free description with its weights.

    Args:
        model: A functional or sequential `keras.Model`, built; models inside it may be shared and nested.
        masks: Whether a network whose outputs carry masks returns `[outputs, masks]`, the masks by number of the output.

    Returns:
        The spec; `str` shows it.

    Raises:
        ModelError: The model has no graph.
        SpecError: Layers have no word in a spec; the message lists all of them.

    >>> print(to_spec(keras.Sequential([keras.Input((3,), name="x"), keras.layers.Dense(2, name="out")], name="tiny")))
    tiny: 1 operation, 8 weights
      x: float32 (B, 3)
      out = dense(x)  # kernel (3, 2), bias (2,)
      return out
    """
    return walk(model, find_rule, masks=masks)[1]


def load_tensors(model: Any, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Give a Keras model the weights in a spec's tensors.

    Args:
        model: The model that the spec was written from, or another one of the same layers.
        tensors: Arrays by key; those that are no variables in Keras are left out.

    Raises:
        SpecError: A tensor is missing, too many, or of another shape; nothing is changed.

    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="out")])
    >>> load_tensors(model, {"out.kernel": np.ones((3, 2)), "out.bias": np.zeros(2)})
    >>> float(model.layers[0].kernel[0, 0])
    1.0
    """
    variables = walk(model, find_rule)[0].variables
    if set(variables) != set(tensors):
        msg = f"Expected the same tensors as in {model.name!r}; these are only in one: {sorted(set(variables) ^ set(tensors))}."
        raise SpecError(msg)
    wrong = [
        f"{key}: {tuple(tensors[key].shape)}, expected {tuple(variable.shape)}"
        for key, variable in variables.items()
        if tuple(tensors[key].shape) != tuple(variable.shape)
    ]
    if wrong:
        msg = f"Expected tensors of the same shapes; these differ: {'; '.join(wrong)}."
        raise SpecError(msg)
    for key, variable in variables.items():
        if isinstance(variable, keras.Variable):
            variable.assign(tensors[key])
