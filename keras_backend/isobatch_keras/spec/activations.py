"""Rules for activations and noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from isobatch.errors import SpecError
from isobatch_keras.spec.refs import Ref
from isobatch_keras.spec.walk import Emitter, Rule

__all__ = ["FUNCTIONS", "RULES", "activate", "activation"]

A = keras.activations
L = keras.layers

Attributes = dict[str, Any]

_FUNCTIONS: dict[str, tuple[str, Attributes]] = {
    "linear": ("identity", {}),
    "relu": ("relu", {}),
    "relu6": ("relu6", {}),
    "leaky_relu": ("leaky_relu", {"slope": 0.2}),
    "elu": ("elu", {"alpha": 1.0}),
    "selu": ("selu", {}),
    "celu": ("celu", {"alpha": 1.0}),
    "gelu": ("gelu", {"approximate": False}),
    "silu": ("silu", {}),
    "mish": ("mish", {}),
    "sigmoid": ("sigmoid", {}),
    "log_sigmoid": ("log_sigmoid", {}),
    "sparse_sigmoid": ("sparse_sigmoid", {}),
    "hard_sigmoid": ("hard_sigmoid", {}),
    "hard_silu": ("hard_silu", {}),
    "hard_tanh": ("hard_tanh", {}),
    "tanh": ("tanh", {}),
    "tanh_shrink": ("tanh_shrink", {}),
    "soft_shrink": ("soft_shrink", {"threshold": 0.5}),
    "hard_shrink": ("hard_shrink", {"threshold": 0.5}),
    "softplus": ("softplus", {}),
    "squareplus": ("squareplus", {"b": 4}),
    "softsign": ("softsign", {}),
    "sparse_plus": ("sparse_plus", {}),
    "softmax": ("softmax", {"axes": [-1]}),
    "log_softmax": ("log_softmax", {"axis": -1}),
    "sparsemax": ("sparsemax", {"axis": -1}),
    "glu": ("glu", {"axis": -1}),
    "exponential": ("exp", {}),
}

FUNCTIONS: dict[Callable[..., Any], tuple[str, Attributes]] = {
    getattr(A, name): word for name, word in _FUNCTIONS.items() if hasattr(A, name)
}
"""Of the activation functions that this version of Keras has."""


def activation(function: Any) -> tuple[str, Attributes]:
    """Return the operation and attributes of an activation function.

    Args:
        function: As Keras layers keep it; `None` is the identity.

    Raises:
        SpecError: It is none of Keras's own functions.

    >>> activation(keras.activations.get("leaky_relu"))
    ('leaky_relu', {'slope': 0.2})
    """
    if function is None:
        return "identity", {}
    try:
        return FUNCTIONS[function]
    except (KeyError, TypeError):
        msg = f"activation {getattr(function, '__qualname__', function)!r}"
        raise SpecError(msg) from None


def activate(at: Emitter, function: Any, x: Ref) -> Ref:
    """Write the activation of a layer as a node beside it, if it has one.

    Args:
        at: The layer's emitter.
        function: The activation function, or a layer in its place.
        x: What is activated.

    Returns:
        The reference to the result.
    """
    if isinstance(function, L.Layer):
        return at.call(function, x, "_activation")[0]
    try:
        operation, attributes = activation(function)
    except SpecError as error:
        msg = f"{at.layer}: {error}"
        raise SpecError(msg) from None
    return x if operation == "identity" else at.add(operation, x, part="_activation", **attributes)


def _activation(at: Emitter, layer: Any, x: Ref) -> Ref:
    if isinstance(layer.activation, L.Layer):
        return at.call(layer.activation, x, ".activation")[0]
    try:
        operation, attributes = activation(layer.activation)
    except SpecError as error:
        msg = f"{at.layer}: {error}"
        raise SpecError(msg) from None
    return at.add(operation, x, **attributes)


def _relu(at: Emitter, layer: Any, x: Ref) -> Ref:
    slope, threshold, most = (float(layer.negative_slope), float(layer.threshold), layer.max_value)
    if not slope and not threshold:
        if most is None:
            return at.add("relu", x)
        if most == 6:
            return at.add("relu6", x)
    return at.add("clipped_relu", x, slope=slope, threshold=threshold, max_value=most)


def _softmax(at: Emitter, layer: Any, x: Ref, mask: Ref | None = None) -> Ref:
    axes = layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis]
    return at.add("softmax", x, keywords={"mask": mask}, axes=axes)


def _spatial_dropout(axes: tuple[int, ...]) -> Rule:
    def rule(at: Emitter, layer: Any, x: Ref) -> Ref:
        first = getattr(layer, "data_format", "channels_last") == "channels_first"
        shape = [None, None, *axes] if first else [None, *axes, None]
        return at.add("dropout", x, rate=layer.rate, noise_shape=shape)

    return rule


RULES: dict[str, Rule] = {
    "Activation": _activation,
    "ReLU": _relu,
    "LeakyReLU": lambda at, layer, x: at.add("leaky_relu", x, slope=float(layer.negative_slope)),
    "PReLU": lambda at, layer, x: at.add("prelu", x, weights={"alpha": layer.alpha}),
    "ELU": lambda at, layer, x: at.add("elu", x, alpha=float(layer.alpha)),
    "Softmax": _softmax,
    "Dropout": lambda at, layer, x: at.add("dropout", x, rate=layer.rate, noise_shape=layer.noise_shape),
    "SpatialDropout1D": _spatial_dropout((1,)),
    "SpatialDropout2D": _spatial_dropout((1, 1)),
    "SpatialDropout3D": _spatial_dropout((1, 1, 1)),
    "AlphaDropout": lambda at, layer, x: at.add(
        "alpha_dropout", x, rate=layer.rate, noise_shape=layer.noise_shape
    ),
    "GaussianNoise": lambda at, layer, x: at.add("gaussian_noise", x, stddev=layer.stddev),
    "GaussianDropout": lambda at, layer, x: at.add("gaussian_dropout", x, rate=layer.rate),
    "ActivityRegularization": lambda at, _layer, x: at.add("identity", x),
    "Identity": lambda at, _layer, x, **_: at.add("identity", x),
}
