"""How each weight of a spec is kept in torch: under which parameter, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

__all__ = ["WEIGHTS", "Array", "Weight", "weight_of"]

Array: TypeAlias = "np.ndarray[Any, Any]"
Shape: TypeAlias = Sequence[int]


def _same(array: Array, _shape: Shape) -> Array:
    return array


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight.

    Args:
        parameter: Its name in the torch module.
        to_torch: From the spec's array and shape to torch's array.
        to_spec: From torch's array and the spec's shape to the spec's array.
    """

    parameter: str
    to_torch: Callable[[Array, Shape], Array] = _same
    to_spec: Callable[[Array, Shape], Array] = _same


def weight_of(operation: str, role: str) -> Weight:
    """Return how a weight is kept; under its role and unchanged if nothing else is said.

    >>> weight_of("dense", "kernel").parameter
    'weight'
    """
    return WEIGHTS.get(operation, {}).get(role, Weight(role))


def _transposed(array: Array, _shape: Shape) -> Array:
    return array.T


def _conv_to_torch(array: Array, _shape: Shape) -> Array:
    """`(*window, a, b)` to `(b, a, *window)`."""
    return np.moveaxis(np.moveaxis(array, -1, 0), -1, 1)


def _conv_to_spec(array: Array, _shape: Shape) -> Array:
    return np.moveaxis(np.moveaxis(array, 1, -1), 0, -1)


def _depthwise_to_torch(array: Array, shape: Shape) -> Array:
    """`(*window, in, multiplier)` to `(in * multiplier, 1, *window)`."""
    *window, channels, multiplier = shape
    moved = np.moveaxis(array, (-2, -1), (0, 1))
    return moved.reshape(channels * multiplier, 1, *window)


def _depthwise_to_spec(array: Array, shape: Shape) -> Array:
    *window, channels, multiplier = shape
    return np.moveaxis(array.reshape(channels, multiplier, *window), (0, 1), (-2, -1))


def _heads_to_torch(array: Array, shape: Shape) -> Array:
    """`(in, heads, dim)` to `(heads * dim, in)`, as `nn.Linear` keeps it."""
    return array.reshape(shape[0], -1).T


def _heads_to_spec(array: Array, shape: Shape) -> Array:
    return array.T.reshape(shape)


def _output_to_torch(array: Array, shape: Shape) -> Array:
    """`(heads, dim, out)` to `(out, heads * dim)`."""
    return array.reshape(-1, shape[-1]).T


def _flat(array: Array, _shape: Shape) -> Array:
    return array.reshape(-1)


def _shaped(array: Array, shape: Shape) -> Array:
    return array.reshape(shape)


def _reset_first(array: Array) -> Array:
    """Blocks z, r, h as r, z, h along the last axis; its own inverse."""
    update, reset, new = np.split(array, 3, axis=-1)
    return np.concatenate([reset, update, new], axis=-1)


def _gru_to_torch(array: Array, _shape: Shape) -> Array:
    return _reset_first(array).T


def _gru_to_spec(array: Array, _shape: Shape) -> Array:
    return _reset_first(array.T)


def _gru_bias(array: Array, _shape: Shape) -> Array:
    return _reset_first(array)


_NORM = {"gamma": Weight("weight"), "beta": Weight("bias")}
_CONV = {"kernel": Weight("weight", _conv_to_torch, _conv_to_spec), "bias": Weight("bias")}
_RNN = {
    "kernel": Weight("weight_ih_l0", _transposed, _transposed),
    "recurrent_kernel": Weight("weight_hh_l0", _transposed, _transposed),
    "bias": Weight("bias_ih_l0"),
}

WEIGHTS: dict[str, dict[str, Weight]] = {
    "dense": {"kernel": Weight("weight", _transposed, _transposed), "bias": Weight("bias")},
    "einsum_dense": {"kernel": Weight("weight"), "bias": Weight("bias")},
    "conv": _CONV,
    "conv_transpose": _CONV,
    "depthwise_conv": {
        "kernel": Weight("weight", _depthwise_to_torch, _depthwise_to_spec),
        "bias": Weight("bias"),
    },
    "embedding": {"embeddings": Weight("weight")},
    "scale": {"gamma": Weight("weight")},
    "prelu": {"alpha": Weight("weight")},
    "layer_norm": _NORM,
    "group_norm": _NORM,
    "rms_norm": {"scale": Weight("weight")},
    "batch_norm": {**_NORM, "moving_mean": Weight("running_mean"), "moving_variance": Weight("running_var")},
    "lstm": _RNN,
    "simple_rnn": _RNN,
    "gru": {
        "kernel": Weight("weight_ih_l0", _gru_to_torch, _gru_to_spec),
        "recurrent_kernel": Weight("weight_hh_l0", _gru_to_torch, _gru_to_spec),
        "bias": Weight("biases", _gru_bias, _gru_bias),
    },
    "conv_lstm": {
        "kernel": Weight("input_conv.weight", _conv_to_torch, _conv_to_spec),
        "recurrent_kernel": Weight("state_conv.weight", _conv_to_torch, _conv_to_spec),
        "bias": Weight("input_conv.bias"),
    },
    "multi_head_attention": {
        **{
            f"{name}_kernel": Weight(f"{name}_proj.weight", _heads_to_torch, _heads_to_spec)
            for name in ("query", "key", "value", "gate")
        },
        **{
            f"{name}_bias": Weight(f"{name}_proj.bias", _flat, _shaped)
            for name in ("query", "key", "value", "gate")
        },
        "output_kernel": Weight("out_proj.weight", _output_to_torch, _heads_to_spec),
        "output_bias": Weight("out_proj.bias"),
    },
}
