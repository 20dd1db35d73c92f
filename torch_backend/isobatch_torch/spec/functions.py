"""Operations without weights, as functions of torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from isobatch.operations import ELEMENTWISE

__all__ = ["FUNCTIONS", "Function"]

Axes = int | Sequence[int] | None


class Function(nn.Module):
    """An operation without weights as a module; it is kept by its word, so that it can be pickled.

    Args:
        name: A key of `FUNCTIONS`.
        attributes: Its settings.

    >>> Function("concatenate", axis=-1)(torch.zeros(2, 1), torch.ones(2, 2)).shape
    torch.Size([2, 3])
    """

    like: torch.Tensor

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__()
        self.name, self.attributes = name, attributes
        self.typed = name in _TYPED
        if self.typed:
            self.register_buffer("like", torch.empty(0), persistent=False)  # follows .half() and .double()

    def _get_name(self) -> str:
        return self.name.title().replace("_", "")

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return ", ".join(f"{key}={value}" for key, value in self.attributes.items())

    def forward(self, *inputs: Any) -> Any:
        """Return what the function returns, called with the inputs and then the attributes."""
        float_type = {"float_type": self.like.dtype} if self.typed else {}
        return FUNCTIONS[self.name](*inputs, **self.attributes, **float_type)


def _axes(x: torch.Tensor, axis: Axes) -> list[int]:
    if axis is None:
        return list(range(x.dim()))
    return [axis] if isinstance(axis, int) else list(axis)


def _average(*inputs: torch.Tensor) -> torch.Tensor:
    total = inputs[0]
    for one in inputs[1:]:
        total = total + one
    return total / len(inputs)


def _dot(a: torch.Tensor, b: torch.Tensor, axes: Sequence[int], *, normalize: bool) -> torch.Tensor:
    if normalize:
        a, b = (_unit_norm(one, [axis]) for one, axis in zip((a, b), axes, strict=True))
    letters = [chr(ord("a") + number) for number in range(a.dim() + b.dim())]
    left = ["z", *letters[: a.dim() - 1]]
    right = ["z", *letters[a.dim() - 1 : a.dim() + b.dim() - 2]]
    left[axes[0]] = right[axes[1]] = "y"
    outputs = [letter for letter in (*left, *right[1:]) if letter != "y"]
    y = torch.einsum(f"{''.join(left)},{''.join(right)}->{''.join(outputs)}", a, b)
    return y if y.dim() > 1 else y[:, None]


def _unit_norm(x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(list(axes), keepdim=True).clamp_min(1e-12))


def _rescale(x: torch.Tensor, scale: Any, offset: Any, float_type: torch.dtype) -> torch.Tensor:
    x = x.to(float_type)
    factor, shift = (x.new_tensor(one) if isinstance(one, list) else one for one in (scale, offset))
    return x * factor + shift


def _pad(x: torch.Tensor, widths: Sequence[Sequence[int]], mode: str, value: float) -> torch.Tensor:
    if mode == "constant":
        flat = [width for pair in reversed(widths) for width in pair]
        return F.pad(x, flat, value=value)
    for axis, (before, after) in enumerate(widths):
        length = x.shape[axis]
        index = torch.arange(-before, length + after, device=x.device)
        if mode == "reflect":
            index = (length - 1) - ((length - 1) - index.abs()).abs()
        elif mode == "symmetric":
            index = torch.where(
                index < 0, -1 - index, torch.where(index >= length, 2 * length - 1 - index, index)
            )
        else:
            msg = f"Expected constant, reflect or symmetric padding, got {mode!r}."
            raise ValueError(msg)
        x = x.index_select(axis, index) if before or after else x
    return x


def _crop(x: torch.Tensor, widths: Sequence[Sequence[int]]) -> torch.Tensor:
    for axis, (before, after) in enumerate(widths, 1):
        x = x.narrow(axis, before, x.shape[axis] - before - after)
    return x


def _slice(x: torch.Tensor, index: Sequence[Any]) -> torch.Tensor:
    parts: list[Any] = []
    flips: list[int] = []
    rank = sum(part not in ("new", "...") for part in index)
    axis = 0
    for part in index:
        if part == "...":
            axis += x.dim() - rank
            parts.append(Ellipsis)
        elif part == "new":
            parts.append(None)
        else:
            if isinstance(part, list) and (part[2] or 1) < 0:
                flips.append(axis)
                part = _backwards(part, x.shape[axis])  # noqa: PLW2901 - torch has no negative steps
            parts.append(slice(*part) if isinstance(part, list) else part)
            axis += 1
    return (x.flip(flips) if flips else x)[tuple(parts)]


def _backwards(part: Sequence[Any], length: int) -> list[Any]:
    """A slice with a negative step as one of the flipped axis."""
    start, stop, step = slice(*part).indices(length)
    return [length - 1 - start, length - 1 - stop, -step]


def _one_hot(x: torch.Tensor, classes: int, axis: int, float_type: torch.dtype) -> torch.Tensor:
    return _hot(x, classes, float_type).movedim(-1, axis)


def _hot(x: torch.Tensor, classes: int, float_type: torch.dtype) -> torch.Tensor:
    """Comparing gives zeros for an index out of range, as Keras does; `F.one_hot` raises."""
    return (x.long()[..., None] == torch.arange(classes, device=x.device)).to(float_type)


def _time_unfold(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.reshape(-1, x.shape[1], *y.shape[1:])


def _masking(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.where((x != value).any(-1, keepdim=True), x, torch.zeros_like(x))


def _cast(x: torch.Tensor, dtype: str, float_type: torch.dtype) -> torch.Tensor:
    return x.to(float_type if "float" in dtype else getattr(torch, dtype))


def _split(x: torch.Tensor, parts: Sequence[int], axis: int) -> tuple[torch.Tensor, ...]:
    return torch.split(x, list(parts), axis)


def _take(x: torch.Tensor, index: Any, axis: int | None) -> torch.Tensor:
    if axis is None:
        x, axis = x.flatten(), 0
    index = torch.as_tensor(index, device=x.device).long()
    index = torch.where(index < 0, index + x.shape[axis], index)
    found = x.index_select(axis, index.flatten())
    axis %= x.dim()
    return found.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def _repeat(x: torch.Tensor, repeats: int, axis: int | None) -> torch.Tensor:
    return x.repeat_interleave(repeats, axis)


def _tile(x: torch.Tensor, repeats: Any) -> torch.Tensor:
    return x.tile((repeats,) if isinstance(repeats, int) else tuple(repeats))


def _floats(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


def _reduction(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def reduce(x: torch.Tensor, axis: Axes, *, keepdims: bool) -> torch.Tensor:
        return function(x, _axes(x, axis), keepdims)

    return reduce


def _summed(x: torch.Tensor) -> torch.dtype:
    """Keras sums small integers in int32 and keeps the others' type; torch makes all of them int64."""
    return torch.int32 if x.dtype in {torch.bool, torch.int8, torch.int16} else x.dtype


def _cumulative(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def accumulate(x: torch.Tensor, axis: int | None) -> torch.Tensor:
        x, axis = (x.flatten(), 0) if axis is None else (x, axis)
        return function(x, axis, dtype=torch.int32 if x.dtype == torch.bool else x.dtype)

    return accumulate


def _top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of equal elements the first one comes first, which `torch.topk` does not promise."""
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], indices[..., :k].int()


def _one_by_one(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A reduction that torch has for one axis only."""

    def reduce(x: torch.Tensor, axis: Axes, *, keepdims: bool) -> torch.Tensor:
        axes = sorted((one % x.dim() for one in _axes(x, axis)), reverse=True)
        for one in axes:
            x = function(x, one, keepdim=keepdims)
        return x

    return reduce


def _index_of(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def find(x: torch.Tensor, axis: int | None, *, keepdims: bool) -> torch.Tensor:
        return function(x, axis, keepdim=keepdims).to(torch.int32)

    return find


def _binary(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def both(a: Any, b: Any) -> torch.Tensor:
        like = a if isinstance(a, torch.Tensor) else b
        a, b = (
            one
            if isinstance(one, torch.Tensor)
            else torch.as_tensor(one, dtype=_weak(one, like), device=like.device)
            for one in (a, b)
        )
        return function(a, b)

    return both


def _weak(number: Any, like: torch.Tensor) -> torch.dtype | None:
    """A number takes the array's type, unless it is a fraction and the array holds integers."""
    if isinstance(number, float) and not like.is_floating_point():
        return torch.get_default_dtype()
    return like.dtype


def _where(condition: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
    return _binary(lambda x, y: torch.where(condition.bool(), x, y))(a, b)


def _clipped_relu(x: torch.Tensor, slope: float, threshold: float, max_value: float | None) -> torch.Tensor:
    y = torch.where(x > threshold, x, slope * (x - threshold))
    return y if max_value is None else y.clamp_max(max_value)


def _squareplus(x: torch.Tensor, b: float) -> torch.Tensor:
    return (x + (x.square() + b).sqrt()) / 2


def _sparse_plus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x <= -1, torch.zeros_like(x), torch.where(x < 1, (x + 1).square() / 4, x))


def _sparse_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return ((x + 1) / 2).clamp(0, 1)


def _sparsemax(x: torch.Tensor, axis: int) -> torch.Tensor:
    moved = x.movedim(axis, -1)
    ordered = moved.sort(-1, descending=True).values
    count = torch.arange(1, ordered.shape[-1] + 1, dtype=x.dtype, device=x.device)
    sums = ordered.cumsum(-1)
    support = ordered - (sums - 1) / count > 0
    # Keras adds up all the sums; the sparsemax of Martins and Astudillo (2016) takes the last one.
    total = torch.where(support, sums, torch.zeros_like(sums)).sum(-1, keepdim=True)
    threshold = (total - 1) / support.sum(-1, keepdim=True)
    return (moved - threshold).clamp_min(0).movedim(-1, axis)


def _adaptive(kind: str) -> Callable[..., torch.Tensor]:
    def pool(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
        function = getattr(F, f"adaptive_{kind}_pool{len(size)}d")
        return function(x.movedim(-1, 1), tuple(size)).movedim(1, -1)

    return pool


_TYPED = {"rescale", "cast", "one_hot", "multi_hot", "count_hot"}
"""Those whose result is of the network's float type whatever they are given."""

_BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "divide": torch.div,
    "floor_divide": torch.floor_divide,
    "mod": torch.remainder,
    "power": torch.pow,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "equal": torch.eq,
    "not_equal": torch.ne,
    "greater": torch.gt,
    "greater_equal": torch.ge,
    "less": torch.lt,
    "less_equal": torch.le,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
}

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "clipped_relu": _clipped_relu,
    "sparse_sigmoid": _sparse_sigmoid,
    "squareplus": _squareplus,
    "sparse_plus": _sparse_plus,
    "sparsemax": _sparsemax,
    "adaptive_max_pool": _adaptive("max"),
    "adaptive_avg_pool": _adaptive("avg"),
    "average": _average,
    "concatenate": lambda *inputs, axis: torch.cat(inputs, axis),
    "stack": lambda *inputs, axis: torch.stack(inputs, axis),
    "dot": _dot,
    "matmul": torch.matmul,
    "einsum": lambda *inputs, equation: torch.einsum(equation, *inputs),
    "unit_norm": _unit_norm,
    "rescale": _rescale,
    "global_max_pool": lambda x, keepdims: x.amax(list(range(1, x.dim() - 1)), keepdim=keepdims),
    "reshape": lambda x, shape: x.reshape(x.shape[0], *shape),
    "reshape_all": lambda x, shape: x.reshape(shape),
    "transpose": lambda x, axes: x.permute(axes),
    "expand_dims": lambda x, axis: x.unsqueeze(axis),
    "squeeze": lambda x, axis: x.squeeze() if axis is None else x.squeeze(axis),
    "repeat_vector": lambda x, n: x[:, None].expand(-1, n, -1),
    "repeat": _repeat,
    "tile": _tile,
    "pad": _pad,
    "crop": _crop,
    "slice": _slice,
    "split": _split,
    "flip": lambda x, axes: x.flip(axes),
    "roll": lambda x, shift, axis: x.roll(shift, axis),
    "take": _take,
    "broadcast_to": lambda x, shape: x.broadcast_to(shape),
    "time_fold": lambda x: x.flatten(0, 1),
    "time_unfold": _time_unfold,
    "masking": _masking,
    "clip": lambda x, low, high: x.clamp(low, high),
    "cast": _cast,
    "one_hot": _one_hot,
    "multi_hot": lambda x, classes, float_type: _hot(x, classes, float_type).amax(-2),
    "count_hot": lambda x, classes, float_type: _hot(x, classes, float_type).sum(-2),
    "where": _where,
    "mean": _reduction(lambda x, axes, keep: _floats(x).mean(axes, keepdim=keep)),
    "sum": _reduction(lambda x, axes, keep: x.sum(axes, keepdim=keep, dtype=_summed(x))),
    "max": _reduction(lambda x, axes, keep: x.amax(axes, keepdim=keep)),
    "min": _reduction(lambda x, axes, keep: x.amin(axes, keepdim=keep)),
    "std": _reduction(lambda x, axes, keep: _floats(x).std(axes, correction=0, keepdim=keep)),
    "var": _reduction(lambda x, axes, keep: _floats(x).var(axes, correction=0, keepdim=keep)),
    "logsumexp": _reduction(lambda x, axes, keep: x.logsumexp(axes, keepdim=keep)),
    "prod": _one_by_one(lambda x, axis, keepdim: x.prod(axis, keepdim=keepdim, dtype=_summed(x))),
    "any": _one_by_one(torch.any),
    "all": _one_by_one(torch.all),
    "argmax": _index_of(torch.argmax),
    "argmin": _index_of(torch.argmin),
    "cumsum": _cumulative(torch.cumsum),
    "cumprod": _cumulative(torch.cumprod),
    "sort": lambda x, axis: x.sort(axis).values,
    "argsort": lambda x, axis: x.argsort(dim=axis, stable=True).int(),
    "top_k": _top_k,
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "stop_gradient": lambda x: x.detach(),
    **{name: _binary(function) for name, function in _BINARY.items()},
    **{name: getattr(torch, name) for name in ELEMENTWISE},
}
