"""The same network in the other framework, and its weights both ways."""

from __future__ import annotations

import importlib
from typing import Any

from isobatch.errors import ModelError
from isobatch.registry import backend_of, get_backend

__all__ = ["twin"]


def twin(model: Any, *, layout: str = "channels_last") -> Any:
    """Return a Keras model as a torch module with the same weights.

    Args:
        model: A functional or sequential `keras.Model`, built.
        layout: Of images and other arrays with positions. `"channels_last"`: the twin takes and gives the same arrays as the
            model; `"channels_first"`: `(B, C, *positions)`, as torch networks usually have it.

    Returns:
        A `torch.nn.Module` in eval mode whose children have the names of the Keras layers.

    Raises:
        BackendError: Keras or torch is not installed.
        ModelError: The model is no Keras model, or has no graph.
        SpecError: Layers have no word in a spec; the message lists all of them.

    >>> import keras, torch
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="out")])
    >>> twin(model).out
    Linear(in_features=3, out_features=2, bias=True)
    """
    get_backend("torch")  # before TensorFlow starts
    if backend_of(model).name != "keras":
        msg = f"Expected a keras.Model, got {type(model).__qualname__}."
        raise ModelError(msg)
    spec = importlib.import_module("isobatch_keras.spec").to_spec(model)
    return importlib.import_module("isobatch_torch.spec").from_spec(spec, layout=layout)
