"""Rules for convolution, pooling and what else has positions."""

from __future__ import annotations

import functools
from typing import Any

import keras

from isobatch_keras.spec.activations import activate
from isobatch_keras.spec.refs import Ref
from isobatch_keras.spec.walk import Emitter, Rule

__all__ = ["RULES", "channels_last"]

L = keras.layers


def channels_last(rule: Rule) -> Rule:
    """Let a rule see channels last: a layer that has them first is written between two transpositions.

    Args:
        rule: For a layer with a `data_format`.
    """

    @functools.wraps(rule)
    def wrapped(at: Emitter, layer: Any, x: Ref, **kwargs: Any) -> Any:
        rank = len(x.shape)
        if layer.data_format != "channels_first":
            return rule(at, layer, x, **kwargs)
        axes = [0, *range(2, rank), 1]
        shape = [x.shape[axis] for axis in axes]
        last = Ref(at.add("transpose", x, part="_channels_last", axes=axes), shape)
        y = rule(at, layer, last, **kwargs)
        if isinstance(layer, L.Flatten) or not getattr(layer, "keepdims", True):
            return y
        return at.add("transpose", y, part="_channels_first", axes=[0, rank - 1, *range(1, rank - 1)])

    return wrapped


@channels_last
def _conv(at: Emitter, layer: Any, x: Ref) -> Ref:
    y = at.add(
        "conv",
        x,
        weights={"kernel": layer.kernel, "bias": layer.bias},
        strides=layer.strides,
        padding=layer.padding,
        dilation=layer.dilation_rate,
        groups=layer.groups,
    )
    return activate(at, layer.activation, y)


@channels_last
def _depthwise(at: Emitter, layer: Any, x: Ref) -> Ref:
    y = at.add(
        "depthwise_conv",
        x,
        weights={"kernel": layer.kernel, "bias": layer.bias},
        strides=layer.strides,
        padding=layer.padding,
        dilation=layer.dilation_rate,
    )
    return activate(at, layer.activation, y)


@channels_last
def _separable(at: Emitter, layer: Any, x: Ref) -> Ref:
    depthwise = at.add(
        "depthwise_conv",
        x,
        part=".depthwise",
        weights={"kernel": layer.depthwise_kernel},
        strides=layer.strides,
        padding=layer.padding,
        dilation=layer.dilation_rate,
    )
    ones = [1] * len(layer.strides)
    y = at.add(
        "conv",
        depthwise,
        part=".pointwise",
        weights={"kernel": layer.pointwise_kernel, "bias": layer.bias},
        strides=ones,
        padding="valid",
        dilation=ones,
        groups=1,
    )
    return activate(at, layer.activation, y)


@channels_last
def _transpose(at: Emitter, layer: Any, x: Ref) -> Ref:
    y = at.add(
        "conv_transpose",
        x,
        weights={"kernel": layer.kernel, "bias": layer.bias},
        strides=layer.strides,
        padding=layer.padding,
        output_padding=layer.output_padding,
        dilation=layer.dilation_rate,
    )
    return activate(at, layer.activation, y)


def _pool(operation: str) -> Rule:
    @channels_last
    def rule(at: Emitter, layer: Any, x: Ref) -> Ref:
        dims = len(x.shape) - 2
        window, strides = _each(layer.pool_size, dims), _each(layer.strides, dims)
        return at.add(operation, x, window=window, strides=strides, padding=layer.padding)

    return rule


def _global(operation: str) -> Rule:
    @channels_last
    def rule(at: Emitter, layer: Any, x: Ref, mask: Ref | None = None) -> Ref:
        return at.add(operation, x, keywords={"mask": mask}, keepdims=layer.keepdims)

    return rule


def _adaptive(operation: str) -> Rule:
    @channels_last
    def rule(at: Emitter, layer: Any, x: Ref) -> Ref:
        return at.add(operation, x, size=_each(layer.output_size, len(x.shape) - 2))

    return rule


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value)


@channels_last
def _upsample(at: Emitter, layer: Any, x: Ref) -> Ref:
    factors = _each(layer.size, len(x.shape) - 2)
    return at.add("upsample", x, factors=factors, interpolation=getattr(layer, "interpolation", "nearest"))


@channels_last
def _pad(at: Emitter, layer: Any, x: Ref) -> Ref:
    return at.add("pad", x, widths=[[0, 0], *_sides(layer.padding), [0, 0]], mode="constant", value=0)


@channels_last
def _crop(at: Emitter, layer: Any, x: Ref) -> Ref:
    return at.add("crop", x, widths=_sides(layer.cropping))


def _sides(widths: Any) -> list[Any]:
    """Before and after each position axis; with one such axis Keras leaves out the outer list."""
    return [widths] if isinstance(widths[0], int) else list(widths)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D"), _conv),
    **dict.fromkeys(("DepthwiseConv1D", "DepthwiseConv2D"), _depthwise),
    **dict.fromkeys(("SeparableConv1D", "SeparableConv2D"), _separable),
    **dict.fromkeys(("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"), _transpose),
    **dict.fromkeys(("MaxPooling1D", "MaxPooling2D", "MaxPooling3D"), _pool("max_pool")),
    **dict.fromkeys(("AveragePooling1D", "AveragePooling2D", "AveragePooling3D"), _pool("avg_pool")),
    **dict.fromkeys(
        ("GlobalMaxPooling1D", "GlobalMaxPooling2D", "GlobalMaxPooling3D"),
        _global("global_max_pool"),
    ),
    **dict.fromkeys(
        ("GlobalAveragePooling1D", "GlobalAveragePooling2D", "GlobalAveragePooling3D"),
        _global("global_avg_pool"),
    ),
    **{f"AdaptiveMaxPooling{dims}D": _adaptive("adaptive_max_pool") for dims in (1, 2, 3)},
    **{f"AdaptiveAveragePooling{dims}D": _adaptive("adaptive_avg_pool") for dims in (1, 2, 3)},
    **dict.fromkeys(("UpSampling2D", "UpSampling3D"), _upsample),
    "UpSampling1D": lambda at, layer, x: at.add("repeat", x, repeats=int(layer.size), axis=1),
    **dict.fromkeys(("ZeroPadding1D", "ZeroPadding2D", "ZeroPadding3D"), _pad),
    **dict.fromkeys(("Cropping2D", "Cropping3D"), _crop),
    "Cropping1D": lambda at, layer, x: at.add("crop", x, widths=_sides(layer.cropping)),
}
