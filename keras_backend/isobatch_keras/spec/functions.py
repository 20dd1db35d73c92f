"""Rules for `keras.ops` in a functional model, such as `x + 3.0`, by the name of the operation's class."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import keras
import numpy as np

from isobatch.errors import SpecError
from isobatch_keras.spec.convolution import channels_last
from isobatch_keras.spec.refs import Ref
from isobatch_keras.spec.walk import Emitter, Rule

__all__ = ["RULES"]


def _given(at: Emitter, values: Any) -> list[Any]:
    """References and numbers as they are; an array becomes a constant beside the node."""
    found = []
    for number, value in enumerate(values):
        if isinstance(value, Ref | bool | int | float):
            found.append(value)
        elif isinstance(value, np.ndarray | np.generic | keras.Variable) or keras.ops.is_tensor(value):
            found.append(at.add("constant", part=f"_constant_{number}", weights={"value": value}))
        else:
            msg = f"{at.layer}: an argument {value!r}"
            raise SpecError(msg)
    return found


def _plain(operation: str, **names: str) -> Rule:
    """An operation with the same inputs; its attributes are the layer's, under the names given here."""

    def rule(at: Emitter, op: Any, *args: Any, **kwargs: Any) -> Any:
        attributes = {name: _attribute(getattr(op, key)) for name, key in names.items()}
        return at.add(operation, *_given(at, (*args, *kwargs.values())), **attributes)

    return rule


def _attribute(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _listed(operation: str) -> Rule:
    def rule(at: Emitter, op: Any, inputs: list[Any]) -> Ref:
        return at.add(operation, *_given(at, inputs), axis=op.axis)

    return rule


def _transpose(at: Emitter, op: Any, x: Ref) -> Ref:
    axes = list(range(len(x.shape)))[::-1] if op.axes is None else op.axes
    return at.add("transpose", x, axes=axes)


def _swap(at: Emitter, op: Any, x: Ref) -> Ref:
    axes = list(range(len(x.shape)))
    axes[op.axis1], axes[op.axis2] = axes[op.axis2], axes[op.axis1]
    return at.add("transpose", x, axes=axes)


def _move(at: Emitter, op: Any, x: Ref) -> Ref:
    rank = len(x.shape)
    sources = [axis % rank for axis in np.atleast_1d(op.source)]
    targets = [axis % rank for axis in np.atleast_1d(op.destination)]
    order = [axis for axis in range(rank) if axis not in sources]
    for target, source in sorted(zip(targets, sources, strict=True)):
        order.insert(target, source)
    return at.add("transpose", x, axes=order)


def _slice(at: Emitter, _op: Any, x: Ref, key: Any) -> Ref:
    parts = key if isinstance(key, tuple) else (key,)
    return at.add("slice", x, index=[_index(at, part) for part in parts])


def _index(at: Emitter, part: Any) -> Any:
    if isinstance(part, slice):
        return [part.start, part.stop, part.step]
    if part is Ellipsis:
        return "..."
    if part is None:
        return "new"
    if isinstance(part, int | np.integer):
        return int(part)
    msg = f"{at.layer}: an index {part!r}"
    raise SpecError(msg)


def _pad(at: Emitter, op: Any, x: Ref, constant_values: Any = None) -> Ref:
    widths = op.pad_width
    if len(widths) == 1:
        widths = list(widths) * len(x.shape)
    return at.add("pad", x, widths=widths, mode=op.mode, value=constant_values or 0)


def _cast(at: Emitter, op: Any, x: Ref) -> Ref:
    return at.add("cast", x, dtype=op.dtype)


def _filled(operation: str) -> Rule:
    """Zeros or ones of the same shape, and of another type if one is given."""

    def rule(at: Emitter, op: Any, x: Ref, dtype: Any = None) -> Ref:
        dtype = dtype or op.dtype
        if dtype is None:
            return at.add(operation, x)
        return at.add(
            "cast", at.add(operation, x, part="_filled"), dtype=keras.backend.standardize_dtype(dtype)
        )

    return rule


def _round(at: Emitter, op: Any, x: Ref) -> Ref:
    """The whole numbers only: TensorFlow rounds decimals by a product, and so do we."""
    if not op.decimals:
        return at.add("round", x)
    scaled = at.add("multiply", x, 10.0**op.decimals, part="_scaled")
    return at.add("divide", at.add("round", scaled, part="_whole"), 10.0**op.decimals)


def _split(at: Emitter, op: Any, x: Ref) -> Any:
    """Sizes of the parts, and not where to cut."""
    length, cuts = x.shape[op.axis], op.indices_or_sections
    if length is None:
        msg = f"{at.layer}: Split of an axis of unknown length"
        raise SpecError(msg)
    if isinstance(cuts, int):
        parts = [length // cuts] * cuts
    else:
        ends = [0, *cuts, length]
        parts = [b - a for a, b in pairwise(ends)]
    return at.add_several(len(parts), "split", x, parts=parts, axis=op.axis)


def _clip(at: Emitter, op: Any, x: Ref) -> Ref:
    return at.add("clip", x, low=op.x_min, high=op.x_max)


def _gelu(at: Emitter, op: Any, x: Ref) -> Ref:
    return at.add("gelu", x, approximate=op.approximate)


def _softmax(at: Emitter, op: Any, x: Ref) -> Ref:
    axes = list(range(1, len(x.shape))) if op.axis is None else [op.axis]
    return at.add("softmax", x, axes=axes)


def _einsum(at: Emitter, op: Any, *operands: Any) -> Ref:
    return at.add("einsum", *_given(at, operands), equation=op.subscripts)


def _reshape(at: Emitter, op: Any, x: Ref) -> Ref:
    shape = list(op.newshape)
    if any(not isinstance(size, int) for size in shape):
        msg = f"{at.layer}: Reshape to {tuple(shape)}"
        raise SpecError(msg)
    return at.add("reshape_all", x, shape=shape)


@channels_last
def _pool_max(at: Emitter, op: Any, x: Ref) -> Ref:
    return _pool(at, op, x, "max_pool")


@channels_last
def _pool_average(at: Emitter, op: Any, x: Ref) -> Ref:
    return _pool(at, op, x, "avg_pool")


def _pool(at: Emitter, op: Any, x: Ref, operation: str) -> Ref:
    dims = len(x.shape) - 2
    window = [op.pool_size] * dims if isinstance(op.pool_size, int) else op.pool_size
    strides = (
        window if op.strides is None else [op.strides] * dims if isinstance(op.strides, int) else op.strides
    )
    return at.add(operation, x, window=window, strides=strides, padding=op.padding)


def _flip(at: Emitter, op: Any, x: Ref) -> Ref:
    axes = list(range(len(x.shape))) if op.axis is None else op.axis
    return at.add("flip", x, axes=[axes] if isinstance(axes, int) else axes)


def _normalize(at: Emitter, op: Any, x: Ref) -> Ref:
    if op.order != 2:
        msg = f"{at.layer}: Normalize of order {op.order}"
        raise SpecError(msg)
    return at.add("unit_norm", x, axes=op.axis if isinstance(op.axis, list | tuple) else [op.axis])


_BINARY = (
    "Add Subtract Multiply Divide FloorDivide Mod Power Maximum Minimum Equal NotEqual Greater GreaterEqual Less LessEqual "
    "LogicalAnd LogicalOr LogicalXor Matmul"
)
_UNARY = (
    "Negative Absolute Exp Expm1 Log Log1p Log2 Log10 Sqrt Rsqrt Square Reciprocal Sign Sin Cos Tan Sinh Cosh Tanh Arcsin "
    "Arccos Arctan Floor Ceil Erf LogicalNot Isnan Isinf Isfinite StopGradient Relu Relu6 Sigmoid "
    "SparseSigmoid Softplus Softsign SparsePlus Silu LogSigmoid HardSigmoid HardSilu Selu TanhShrink HardTanh"
)
_REDUCE = "Mean Sum Prod Any All Std Var Logsumexp Argmax Argmin Max Min"


def _word(name: str) -> str:
    """`LogicalAnd` as `logical_and`."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).strip("_")


RULES: dict[str, Rule] = {
    **{name: _plain(_word(name)) for name in f"{_BINARY} {_UNARY}".split()},
    **{name: _plain(_word(name), axis="axis", keepdims="keepdims") for name in _REDUCE.split()},
    "TrueDivide": _plain("divide"),
    "Amax": _plain("max", axis="axis", keepdims="keepdims"),
    "Amin": _plain("min", axis="axis", keepdims="keepdims"),
    "Where": _plain("where"),
    "Copy": _plain("identity"),
    "ConvertToTensor": lambda at, _op, x: at.add("identity", x),
    "Cumsum": _plain("cumsum", axis="axis"),
    "Cumprod": _plain("cumprod", axis="axis"),
    "LeakyRelu": _plain("leaky_relu", slope="negative_slope"),
    "Elu": _plain("elu", alpha="alpha"),
    "Celu": _plain("celu", alpha="alpha"),
    "Glu": _plain("glu", axis="axis"),
    "Squareplus": _plain("squareplus", b="b"),
    "SoftShrink": _plain("soft_shrink", threshold="threshold"),
    "HardShrink": _plain("hard_shrink", threshold="threshold"),
    "Threshold": _plain("threshold", threshold="threshold", value="default_value"),
    "LogSoftmax": _plain("log_softmax", axis="axis"),
    "Sparsemax": _plain("sparsemax", axis="axis"),
    "Gelu": _gelu,
    "Softmax": _softmax,
    "Normalize": _normalize,
    "ExpandDims": _plain("expand_dims", axis="axis"),
    "Squeeze": _plain("squeeze", axis="axis"),
    "Repeat": _plain("repeat", repeats="repeats", axis="axis"),
    "Tile": _plain("tile", repeats="repeats"),
    "Roll": _plain("roll", shift="shift", axis="axis"),
    "Take": _plain("take", axis="axis"),
    "BroadcastTo": _plain("broadcast_to", shape="shape"),
    "OneHot": _plain("one_hot", classes="num_classes", axis="axis"),
    "MultiHot": _plain("multi_hot", classes="num_classes"),
    "Concatenate": _listed("concatenate"),
    "Stack": _listed("stack"),
    "Transpose": _transpose,
    "Swapaxes": _swap,
    "Moveaxis": _move,
    "GetItem": _slice,
    "Pad": _pad,
    "Cast": _cast,
    "Split": _split,
    "Clip": _clip,
    "Einsum": _einsum,
    "Reshape": _reshape,
    "MaxPool": _pool_max,
    "AveragePool": _pool_average,
    "Flip": _flip,
    "Round": _round,
    "Sort": _plain("sort", axis="axis"),
    "Argsort": _plain("argsort", axis="axis"),
    "TopK": lambda at, op, x: at.add_several(2, "top_k", x, k=op.k),
    "ZerosLike": _filled("zeros_like"),
    "OnesLike": _filled("ones_like"),
}
