"""From a node to the torch module that computes it, and how users add theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from isobatch.errors import SpecError
from isobatch_torch.spec.activations import ACTIVATIONS, PReLU, Scale
from isobatch_torch.spec.attention import AdditiveAttention, DotAttention, MultiHeadAttention
from isobatch_torch.spec.functions import FUNCTIONS, Function
from isobatch_torch.spec.norms import BatchNorm, GroupNorm, LayerNorm, RMSNorm, Standardize
from isobatch_torch.spec.positions import (
    AvgPool,
    ConvTranspose,
    GlobalAvgPool,
    MaxPool,
    Resize,
    Upsample,
    conv,
)
from isobatch_torch.spec.recurrent import GRU, LSTM, RNN, ConvLSTM, ResetBeforeGRU

__all__ = ["Builder", "Constant", "Discretize", "EinsumDense", "Embedding", "build_module", "register_layer"]

Shapes: TypeAlias = Mapping[str, Sequence[int]]
Builder: TypeAlias = Callable[[dict[str, Any], Shapes], nn.Module]
"""Called with an operation's attributes and the shapes of its weights by role; returns a module of that many weights."""


class EinsumDense(nn.Module):
    """An einsum with a weight, plus a bias.

    Args:
        equation: Of the einsum; it may have an ellipsis.
        shape: Of the weight.
        bias: Shape of the bias; `None` for none.
    """

    def __init__(self, equation: str, shape: Sequence[int], bias: Sequence[int] | None) -> None:
        super().__init__()
        self.equation = equation
        self.weight = nn.Parameter(torch.empty(tuple(shape)))
        self.bias = None if bias is None else nn.Parameter(torch.empty(tuple(bias)))

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"{self.equation!r}, {tuple(self.weight.shape)}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        y = torch.einsum(self.equation, x, self.weight)
        return y if self.bias is None else y + self.bias


class Embedding(nn.Embedding):
    """Rows of a table; indices may be of any type."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as the base class has it
        """Return `(*input.shape, out)`."""
        return super().forward(input.long())


class Constant(nn.Module):
    """A stored array.

    Args:
        shape: Of the array.
    """

    value: torch.Tensor

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("value", torch.empty(tuple(shape)))

    def forward(self) -> torch.Tensor:
        """Return the array."""
        return self.value


class Discretize(nn.Module):
    """The index of the bin that holds a value.

    Args:
        shape: Of the boundaries.
    """

    boundaries: torch.Tensor

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("boundaries", torch.empty(tuple(shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return integers of the same shape."""
        return torch.bucketize(x.to(self.boundaries.dtype), self.boundaries, right=True, out_int32=True)


def build_module(operation: str, attributes: Mapping[str, Any], shapes: Shapes) -> nn.Module:
    """Return the module of an operation, its weights not yet set.

    Args:
        operation: A word of `isobatch.operations`.
        attributes: Its attributes.
        shapes: Of its weights by role, as in the spec.

    Raises:
        SpecError: No module computes it.

    >>> build_module("dense", {}, {"kernel": (3, 2), "bias": (2,)})
    Linear(in_features=3, out_features=2, bias=True)
    """
    if operation in _BUILDERS:
        return _BUILDERS[operation](dict(attributes), shapes)
    if operation in ACTIVATIONS:
        return ACTIVATIONS[operation](**attributes)
    if operation in FUNCTIONS:
        return Function(operation, **attributes)
    msg = f"Expected an operation that torch has a module for, got {operation!r}. Cure: isobatch_torch.register_layer."
    raise SpecError(msg)


def register_layer(operation: str, builder: Builder) -> None:
    """Say which module computes an operation of one's own.

    Args:
        operation: A word registered with `isobatch.operations.register_operation`.
        builder: Called with the attributes and the shapes of the weights by role. The module's parameters and buffers have the
            roles as names.

    Raises:
        SpecError: There is a module for the operation already.

    >>> register_layer("my_rectifier", lambda attributes, shapes: nn.ReLU())
    >>> build_module("my_rectifier", {}, {})
    ReLU()
    """
    if operation in _BUILDERS or operation in ACTIVATIONS or operation in FUNCTIONS:
        msg = f"Expected an operation without a module, {operation!r} has one."
        raise SpecError(msg)
    _BUILDERS[operation] = builder


def _dense(_: dict[str, Any], shapes: Shapes) -> nn.Module:
    inner, outer = shapes["kernel"]
    return nn.Linear(inner, outer, bias="bias" in shapes)


def _conv(at: dict[str, Any], shapes: Shapes) -> nn.Module:
    return conv(
        shapes["kernel"],
        at["groups"],
        bias="bias" in shapes,
        stride=at["strides"],
        dilation=at["dilation"],
        same=at["padding"],
    )


def _depthwise(at: dict[str, Any], shapes: Shapes) -> nn.Module:
    *window, channels, multiplier = shapes["kernel"]
    settings = {"stride": at["strides"], "dilation": at["dilation"], "same": at["padding"]}
    return conv((*window, 1, channels * multiplier), channels, bias="bias" in shapes, **settings)


def _conv_transpose(at: dict[str, Any], shapes: Shapes) -> nn.Module:
    return ConvTranspose(
        shapes["kernel"],
        stride=at["strides"],
        padding=at["padding"],
        output_padding=at["output_padding"],
        dilation=at["dilation"],
        bias="bias" in shapes,
    )


def _batch_norm(at: dict[str, Any], shapes: Shapes) -> nn.Module:
    features = shapes["moving_mean"][0]
    momentum = round(1 - at["momentum"], 12)  # without the noise of the subtraction
    return BatchNorm(features, at["axis"], at["epsilon"], momentum, **_affine(shapes))


def _layer_norm(at: dict[str, Any], shapes: Shapes) -> nn.Module:
    shape = shapes.get("gamma", shapes.get("beta", ()))
    if at["axes"] == [-1] and "gamma" in shapes:
        return nn.LayerNorm(list(shape), at["epsilon"], bias="beta" in shapes)
    return LayerNorm(shape, at["axes"], at["epsilon"], **_affine(shapes))


def _group_norm(at: dict[str, Any], shapes: Shapes) -> nn.Module:
    channels = shapes.get("gamma", shapes.get("beta", (at["groups"],)))[0]
    return GroupNorm(at["groups"], channels, at["axis"], at["epsilon"], **_affine(shapes))


def _affine(shapes: Shapes) -> dict[str, bool]:
    return {"scale": "gamma" in shapes, "center": "beta" in shapes}


def _recurrent(at: dict[str, Any], shapes: Shapes, cls: Any) -> nn.Module:
    inner, units = shapes["kernel"][0], shapes["recurrent_kernel"][0]
    return cls(inner, units, bias="bias" in shapes, settings=at)


def _additive(at: dict[str, Any], shapes: Shapes) -> nn.Module:
    return AdditiveAttention(at, scale=shapes.get("scale"), weight="weight" in shapes)


_BUILDERS: dict[str, Builder] = {
    "dense": _dense,
    "einsum_dense": lambda at, shapes: EinsumDense(at["equation"], shapes["kernel"], shapes.get("bias")),
    "conv": _conv,
    "depthwise_conv": _depthwise,
    "conv_transpose": _conv_transpose,
    "embedding": lambda _, shapes: Embedding(shapes["embeddings"][0], shapes["embeddings"][1]),
    "scale": lambda _, shapes: Scale(shapes["gamma"]),
    "prelu": lambda _, shapes: PReLU(shapes["alpha"]),
    "max_pool": lambda at, _: MaxPool(**at),
    "avg_pool": lambda at, _: AvgPool(**at),
    "global_avg_pool": lambda at, _: GlobalAvgPool(**at),
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "rms_norm": lambda at, shapes: RMSNorm(shapes["scale"], at["axes"], at["epsilon"]),
    "standardize": lambda at, shapes: Standardize(shapes["mean"], shapes["variance"], invert=at["invert"]),
    "lstm": lambda at, shapes: _recurrent(at, shapes, LSTM),
    "gru": lambda at, shapes: _recurrent(at, shapes, GRU if at["reset_after"] else ResetBeforeGRU),
    "simple_rnn": lambda at, shapes: _recurrent(at, shapes, RNN),
    "conv_lstm": lambda at, shapes: ConvLSTM(
        shapes["kernel"], shapes["recurrent_kernel"], bias="bias" in shapes, settings=at
    ),
    "multi_head_attention": lambda at, shapes: MultiHeadAttention(shapes, at),
    "dot_attention": lambda at, shapes: DotAttention(at, scale="scale" in shapes),
    "additive_attention": _additive,
    "resize": lambda at, _: Resize(at["size"], at["interpolation"], antialias=at["antialias"]),
    "upsample": lambda at, _: Upsample(at["factors"], at["interpolation"]),
    "constant": lambda _, shapes: Constant(shapes["value"]),
    "discretize": lambda _, shapes: Discretize(shapes["boundaries"]),
    "flatten": lambda _at, _: nn.Flatten(),
}
