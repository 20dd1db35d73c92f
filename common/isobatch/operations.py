"""The words of a spec: every operation, what it means, its attributes, its weights and its float64 floor.

Arrays are batch first and channels last. A weight's layout is the one it has in a file; a backend that stores it in another
one converts. The floor is the greatest gap, divided by the greatest absolute output, that two correct float64
implementations of one such operation show on the same input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from isobatch.errors import SpecError

__all__ = ["ELEMENTWISE", "FLOOR", "Operation", "find_operation", "operations", "register_operation"]

FLOOR = 1e-12
"""For an operation in clean float64: a few thousand units of rounding, where correct layers were seen to reach 1e-14."""

_FLOAT32_CONSTANT = 1e-7
"""TensorFlow passes a constant of the operation through float32, which carries a relative error of up to 6e-8."""

_FLOAT32_RESIZE = 5e-6
"""TensorFlow computes the weights of resizing in float32."""


ELEMENTWISE = (
    "negative",
    "absolute",
    "exp",
    "expm1",
    "log",
    "log1p",
    "log2",
    "log10",
    "sqrt",
    "rsqrt",
    "square",
    "reciprocal",
    "sign",
    "sin",
    "cos",
    "tan",
    "sinh",
    "cosh",
    "arcsin",
    "arccos",
    "arctan",
    "floor",
    "ceil",
    "round",
    "erf",
    "logical_not",
    "isnan",
    "isinf",
    "isfinite",
)
"""Functions of one number that Keras and torch call alike."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What one operation is.

    Args:
        meaning: One line on what it computes from its inputs.
        attributes: Names of its attributes; a node has all of them.
        weights: Layout of each weight by role; a node has those that the layer has.
        floor: The greatest scaled gap between two correct float64 implementations.
    """

    meaning: str
    attributes: tuple[str, ...] = ()
    weights: Mapping[str, str] = field(default_factory=dict[str, str])
    floor: float = FLOOR


def _operation(meaning: str, attributes: str = "", floor: float = FLOOR, **weights: str) -> Operation:
    return Operation(meaning, tuple(attributes.split()), weights, floor)


_CONV = "strides padding dilation groups"
_POOL = "window strides padding"
_REDUCE = "axis keepdims"
_RNN = "activation go_backwards return_sequences return_state zero_output_for_mask dropout recurrent_dropout"

_OPERATIONS: dict[str, Operation] = {
    # Products with a weight
    "dense": _operation("x @ kernel + bias over the last axis", kernel="(in, out)", bias="(out,)"),
    "einsum_dense": _operation(
        "einsum(equation, x, kernel) + bias", "equation", kernel="as the equation says", bias="broadcastable"
    ),
    "conv": _operation(
        "convolution; padding is 'valid', 'same' or 'causal'",
        _CONV,
        kernel="(*window, in / groups, out)",
        bias="(out,)",
    ),
    "depthwise_conv": _operation(
        "convolution of each channel; output channel = in * multiplier + j",
        "strides padding dilation",
        kernel="(*window, in, multiplier)",
        bias="(in * multiplier,)",
    ),
    "conv_transpose": _operation(
        "transposed convolution",
        "strides padding output_padding dilation",
        kernel="(*window, out, in)",
        bias="(out,)",
    ),
    "embedding": _operation("rows of a table", embeddings="(vocabulary, out)"),
    "scale": _operation("x * gamma", gamma="broadcastable"),
    # Pooling
    "max_pool": _operation("greatest value of each window; padding never wins", _POOL),
    "avg_pool": _operation("mean of each window; padding is not counted", _POOL),
    "global_max_pool": _operation("greatest value over all positions", "keepdims"),
    "global_avg_pool": _operation("mean over all positions, or over those that `mask` keeps", "keepdims"),
    "adaptive_max_pool": _operation("greatest value of windows that give this size", "size"),
    "adaptive_avg_pool": _operation("mean of windows that give this size", "size"),
    # Normalisation
    "batch_norm": _operation(
        "normalise over all axes but one; running variance is biased; `mask` leaves positions out of the statistics",
        "axis epsilon momentum",
        gamma="(channels,)",
        beta="(channels,)",
        moving_mean="(channels,)",
        moving_variance="(channels,)",
    ),
    "layer_norm": _operation("normalise over the axes", "axes epsilon", gamma="(*axes,)", beta="(*axes,)"),
    "group_norm": _operation(
        "normalise over positions and groups of channels",
        "groups axis epsilon",
        gamma="(channels,)",
        beta="(channels,)",
    ),
    "rms_norm": _operation("x / sqrt(mean(x^2) + epsilon) over the axes", "axes epsilon", scale="(*axes,)"),
    "unit_norm": _operation("x divided by its Euclidean length over the axes", "axes"),
    "standardize": _operation(
        "(x - mean) / max(sqrt(variance), 1e-7), or its inverse",
        "invert",
        _FLOAT32_CONSTANT,
        mean="broadcastable",
        variance="broadcastable",
    ),
    "rescale": _operation("x * scale + offset", "scale offset", 10 * _FLOAT32_CONSTANT),
    # Recurrence over axis 1; inputs are the sequence and initial states; where `mask` is false, output and state repeat
    "lstm": _operation(
        "long short-term memory; gates i, f, c, o",
        f"{_RNN} recurrent_activation",
        kernel="(in, 4 units)",
        recurrent_kernel="(units, 4 units)",
        bias="(4 units,)",
    ),
    "gru": _operation(
        "gated recurrent unit; gates z, r, h",
        f"{_RNN} recurrent_activation reset_after",
        kernel="(in, 3 units)",
        recurrent_kernel="(units, 3 units)",
        bias="(2, 3 units) if reset_after, else (3 units,)",
    ),
    "simple_rnn": _operation(
        "activation(x @ kernel + h @ recurrent_kernel + bias)",
        _RNN,
        kernel="(in, units)",
        recurrent_kernel="(units, units)",
        bias="(units,)",
    ),
    "conv_lstm": _operation(
        "LSTM whose products are convolutions; gates i, f, c, o",
        f"{_RNN} recurrent_activation strides padding dilation",
        kernel="(*window, in, 4 out)",
        recurrent_kernel="(*window, out, 4 out)",
        bias="(4 out,)",
    ),
    # Attention; a mask is true where attention goes
    "multi_head_attention": _operation(
        "scaled dot-product attention between projections of query, value and key; key_heads may be fewer than heads; "
        "within `window` - 1 positions to either side (0: everywhere); heads times sigmoid(gate @ query) where there is a gate",
        "heads key_heads dropout causal window return_scores",
        _FLOAT32_CONSTANT,
        query_kernel="(in, heads, key_dim)",
        query_bias="(heads, key_dim)",
        key_kernel="(in, key_heads, key_dim)",
        key_bias="(key_heads, key_dim)",
        value_kernel="(in, key_heads, value_dim)",
        value_bias="(key_heads, value_dim)",
        gate_kernel="(in, heads, value_dim)",
        gate_bias="(heads, value_dim)",
        output_kernel="(heads, value_dim, out)",
        output_bias="(out,)",
    ),
    "dot_attention": _operation(
        "softmax(scale * query @ key^T) @ value", "dropout causal return_scores", scale="()"
    ),
    "additive_attention": _operation(
        "softmax(sum(scale * tanh(query + key))) @ value, or with a weight softmax(weight * sum(tanh(scale * (query + key)))) @ value",
        "dropout causal return_scores",
        scale="() or (dim,)",
        weight="()",
    ),
    # Activations
    "relu": _operation("max(x, 0)"),
    "clipped_relu": _operation(
        "x, or slope * (x - threshold) below the threshold, and at most max_value",
        "slope threshold max_value",
        _FLOAT32_CONSTANT,
    ),
    "relu6": _operation("min(max(x, 0), 6)"),
    "leaky_relu": _operation("x, or slope * x below 0", "slope", _FLOAT32_CONSTANT),
    "prelu": _operation("x, or alpha * x below 0", alpha="broadcastable"),
    "elu": _operation("x, or alpha * (exp(x) - 1) below 0", "alpha", _FLOAT32_CONSTANT),
    "selu": _operation("scaled elu", "", _FLOAT32_CONSTANT),
    "celu": _operation("max(x, 0) + min(0, alpha * (exp(x / alpha) - 1))", "alpha", _FLOAT32_CONSTANT),
    "gelu": _operation("x * Phi(x), by erf or, if approximate, by tanh", "approximate", _FLOAT32_CONSTANT),
    "silu": _operation("x * sigmoid(x)"),
    "mish": _operation("x * tanh(softplus(x))"),
    "sigmoid": _operation("1 / (1 + exp(-x))"),
    "log_sigmoid": _operation("log(sigmoid(x))"),
    "sparse_sigmoid": _operation("clip((x + 1) / 2, 0, 1)"),
    "hard_sigmoid": _operation("relu6(x + 3) / 6", "", _FLOAT32_CONSTANT),
    "hard_silu": _operation("x * hard_sigmoid(x)", "", _FLOAT32_CONSTANT),
    "hard_tanh": _operation("clip(x, -1, 1)"),
    "tanh": _operation("tanh(x)"),
    "tanh_shrink": _operation("x - tanh(x)"),
    "soft_shrink": _operation("x moved to 0 by the threshold", "threshold", _FLOAT32_CONSTANT),
    "hard_shrink": _operation("x, or 0 within the threshold", "threshold"),
    "threshold": _operation("x, or value up to the threshold", "threshold value"),
    "softplus": _operation("log(1 + exp(x))"),
    "squareplus": _operation("(x + sqrt(x^2 + b)) / 2", "b", _FLOAT32_CONSTANT),
    "softsign": _operation("x / (1 + |x|)"),
    "sparse_plus": _operation("0, (x + 1)^2 / 4 or x"),
    "softmax": _operation("softmax over the axes, where `mask` is true", "axes"),
    "log_softmax": _operation("log of softmax over one axis", "axis"),
    "sparsemax": _operation(
        "what Keras calls so: x less a threshold, and no less than 0, over one axis", "axis"
    ),
    "glu": _operation("one half times the sigmoid of the other", "axis"),
    "identity": _operation("x"),
    # Noise, in training only
    "dropout": _operation("zeros with this rate, and the rest scaled up", "rate noise_shape"),
    "alpha_dropout": _operation("dropout that keeps mean and variance of selu", "rate noise_shape"),
    "gaussian_noise": _operation("x + N(0, stddev)", "stddev"),
    "gaussian_dropout": _operation("x * N(1, sqrt(rate / (1 - rate)))", "rate"),
    # Merging
    "average": _operation("mean of the inputs"),
    "concatenate": _operation("inputs along an axis", "axis"),
    "stack": _operation("inputs along a new axis", "axis"),
    "dot": _operation("product of two inputs, summed over one axis each", "axes normalize"),
    "matmul": _operation("a @ b"),
    "einsum": _operation("einsum of the inputs", "equation"),
    # Shape
    "flatten": _operation("all axes but the first in one, channels last"),
    "reshape": _operation("another shape of one row, channels last", "shape"),
    "reshape_all": _operation("another shape of the whole", "shape"),
    "transpose": _operation("axes in another order", "axes"),
    "expand_dims": _operation("a new axis of length one", "axis"),
    "squeeze": _operation("without axes of length one", "axis"),
    "repeat_vector": _operation("(B, F) to (B, n, F)", "n"),
    "repeat": _operation("each element so many times along an axis", "repeats axis"),
    "tile": _operation("the whole so many times along each axis", "repeats"),
    "pad": _operation("more before and after along each axis", "widths mode value"),
    "crop": _operation("less before and after along each position axis", "widths"),
    "upsample": _operation(
        "each position axis so many times as long", "factors interpolation", _FLOAT32_RESIZE
    ),
    "resize": _operation("positions resampled to a size", "size interpolation antialias", _FLOAT32_RESIZE),
    "slice": _operation("x[index]", "index"),
    "split": _operation("parts along an axis, several outputs", "parts axis"),
    "flip": _operation("backwards along the axes", "axes"),
    "roll": _operation("shifted along an axis", "shift axis"),
    "take": _operation("elements by index along an axis", "axis"),
    "sort": _operation("elements along an axis, the smallest first", "axis"),
    "argsort": _operation("index of each element in that order", "axis"),
    "top_k": _operation("the greatest elements of the last axis, and their indices", "k"),
    "broadcast_to": _operation("repeated to a shape", "shape"),
    "time_fold": _operation("(B, T, ...) to (B * T, ...)"),
    "time_unfold": _operation("(B * T, ...) back to (B, T, ...), T taken from the second input"),
    # Other
    "constant": _operation("a stored array", value="any"),
    "masking": _operation("zeros where all features equal the value", "value"),
    "clip": _operation("least and greatest value", "low high", _FLOAT32_CONSTANT),
    "cast": _operation("another type; any float type means the network's own", "dtype"),
    "one_hot": _operation("1 at the index, along a new axis", "classes axis"),
    "multi_hot": _operation("1 at each index of the last axis", "classes"),
    "count_hot": _operation("how often each index is in the last axis", "classes"),
    "discretize": _operation("index of the bin that holds x", "", boundaries="(bins - 1,)"),
    "mod": _operation("remainder of a division, of the divisor's sign", "", 10 * _FLOAT32_CONSTANT),
    "where": _operation("b where a is true, else c"),
    **{
        name: _operation(f"{name} of two inputs, broadcast")
        for name in [
            "add",
            "subtract",
            "multiply",
            "divide",
            "floor_divide",
            "power",
            "maximum",
            "minimum",
            "equal",
            "not_equal",
            "greater",
            "greater_equal",
            "less",
            "less_equal",
            "logical_and",
            "logical_or",
            "logical_xor",
        ]
    },
    **{
        name: _operation(f"{name} of each element")
        for name in [*ELEMENTWISE, "zeros_like", "ones_like", "stop_gradient"]
    },
    **{
        name: _operation(f"{name} over axes", _REDUCE)
        for name in (
            "mean",
            "sum",
            "max",
            "min",
            "prod",
            "any",
            "all",
            "std",
            "var",
            "logsumexp",
        )
    },
    **{name: _operation(f"{name} over one axis", _REDUCE) for name in ("argmax", "argmin")},
    **{name: _operation(f"{name} along one axis", "axis") for name in ("cumsum", "cumprod")},
}


def operations() -> Mapping[str, Operation]:
    """Return every operation by name.

    >>> operations()["batch_norm"].attributes
    ('axis', 'epsilon', 'momentum')
    """
    return dict(_OPERATIONS)


def find_operation(name: str) -> Operation:
    """Return an operation.

    Args:
        name: A name of the table, or one that was registered.

    Raises:
        SpecError: There is no operation of that name.

    >>> find_operation("dense").weights["kernel"]
    '(in, out)'
    """
    try:
        return _OPERATIONS[name]
    except KeyError:
        msg = f"Expected an operation of isobatch.operations, got {name!r}. Cure: isobatch.operations.register_operation."
        raise SpecError(msg) from None


def register_operation(name: str, operation: Operation) -> None:
    """Add an operation, so that specs may contain it.

    Args:
        name: Its word, in lower case with underscores.
        operation: What it is.

    Raises:
        SpecError: The name is taken by another operation.

    >>> register_operation("swap_halves", Operation("the second half of the features, then the first"))
    >>> find_operation("swap_halves").floor
    1e-12
    """
    if _OPERATIONS.setdefault(name, operation) != operation:
        msg = f"Expected the name of a new operation, {name!r} is taken."
        raise SpecError(msg)
