"""Modules that move a window over positions; they take and return channels last, and compute as torch does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]

from isobatch.errors import SpecError

__all__ = [
    "AvgPool",
    "Conv",
    "ConvTranspose",
    "GlobalAvgPool",
    "MaxPool",
    "Resize",
    "Upsample",
    "conv",
    "pad_positions",
    "same_padding",
]


def same_padding(size: int, window: int, stride: int, dilation: int = 1) -> tuple[int, int]:
    """Return how much is padded before and after an axis so that it gives `ceil(size / stride)` windows.

    Args:
        size: Length of the axis.
        window: Length of the window.
        stride: From window to window.
        dilation: From element to element of the window.

    >>> same_padding(16, 3, 2), same_padding(15, 3, 2)
    ((0, 1), (1, 1))
    """
    total = max((-(-size // stride) - 1) * stride + (window - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2


def pad_positions(x: torch.Tensor, padding: str, windows: Any, value: float = 0.0) -> torch.Tensor:
    """Return an array with its position axes padded.

    Args:
        x: `(B, C, *positions)`.
        padding: `"valid"`, `"same"` or `"causal"`.
        windows: Window, stride and dilation of each position axis.
        value: What it is padded with.
    """
    if padding == "valid":
        return x
    widths = []
    for size, (window, stride, dilation) in zip(x.shape[2:], windows, strict=True):
        before, after = same_padding(size, window, stride, dilation)
        widths.append(((window - 1) * dilation, 0) if padding == "causal" else (before, after))
    return F.pad(x, [width for pair in reversed(widths) for width in pair], value=value)


class Conv(_ConvNd):
    """A convolution with Keras's padding, over `(B, *positions, in)`.

    Args:
        in_channels: Of the input.
        out_channels: Of the output.
        kernel_size: Of the window.
        stride: From window to window.
        dilation: From element to element of the window.
        groups: Into how many groups channels are divided.
        bias: Whether there is one.
        same: `"valid"`, `"same"` or `"causal"`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sequence[int],
        *,
        stride: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        bias: bool,
        same: str,
    ) -> None:
        dims = len(kernel_size)
        super().__init__(
            in_channels,
            out_channels,
            tuple(kernel_size),
            tuple(stride),
            (0,) * dims,
            tuple(dilation),
            transposed=False,
            output_padding=(0,) * dims,
            groups=groups,
            bias=bias,
            padding_mode="zeros",
        )
        self.same = same
        self._convolve = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]

    def _get_name(self) -> str:
        return f"Conv{len(self.kernel_size)}d"

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"{super().extra_repr()}, padding={self.same!r}"  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `(B, *positions, out)`."""
        windows = zip(self.kernel_size, self.stride, self.dilation, strict=True)
        x = pad_positions(x.movedim(-1, 1), self.same, windows)
        if x.dtype == torch.float64:
            x = x.contiguous()  # torch has fast kernels for other strides in float32 only
        y = self._convolve(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)
        return y.movedim(1, -1)


def conv(shape: Sequence[int], groups: int, *, bias: bool, **settings: Any) -> Conv:
    """Return a convolution for a kernel `(*window, in / groups, out)`."""
    *window, inner, outer = shape
    return Conv(inner * groups, outer, window, groups=groups, bias=bias, **settings)


class ConvTranspose(nn.Module):
    """A transposed convolution with Keras's sizes, over `(B, *positions, in)`.

    Args:
        shape: Of the kernel, `(*window, out, in)`.
        stride: From window to window of the output.
        padding: `"valid"` or `"same"`.
        output_padding: What is added to the output's length; `None` for Keras's default length.
        dilation: From element to element of the window.
        bias: Whether there is one.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        stride: Sequence[int],
        padding: str,
        output_padding: Sequence[int] | int | None,
        dilation: Sequence[int],
        bias: bool,
    ) -> None:
        super().__init__()
        *window, outer, inner = shape
        self.weight = nn.Parameter(torch.empty(inner, outer, *window))
        self.bias = nn.Parameter(torch.empty(outer)) if bias else None
        self.stride, self.padding, self.dilation = tuple(stride), padding, tuple(dilation)
        extra = [output_padding] * len(window) if isinstance(output_padding, int) else output_padding
        self.output_padding = None if extra is None else tuple(extra)
        self.span = tuple((k - 1) * d + 1 for k, d in zip(window, dilation, strict=True))
        self._convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(window) - 1]

    def _get_name(self) -> str:
        return f"ConvTranspose{len(self.stride)}d"

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        inner, outer, *window = self.weight.shape
        return (
            f"{inner}, {outer}, kernel_size={tuple(window)}, stride={self.stride}, padding={self.padding!r}"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `(B, *positions, out)`: the full product, cut or filled up to the length Keras gives it."""
        y = self._convolve(x.movedim(-1, 1), self.weight, stride=self.stride, dilation=self.dilation)
        for axis, (size, stride, span) in enumerate(
            zip(x.shape[1:-1], self.stride, self.span, strict=True), 2
        ):
            length = self._length(size, stride, span, axis - 2)
            total = max((size - 1) * stride + span - length, 0)
            begin = total // 2 if self.padding == "same" else 0
            y = y.narrow(axis, begin, min(length, y.shape[axis] - begin))
            if y.shape[axis] < length:
                y = F.pad(y, [0, 0] * (y.dim() - 1 - axis) + [0, length - y.shape[axis]])
        y = y.movedim(1, -1)
        return y if self.bias is None else y + self.bias

    def _length(self, size: int, stride: int, span: int, position: int) -> int:
        if self.output_padding is None:
            return size * stride + (max(span - stride, 0) if self.padding == "valid" else 0)
        cut = span // 2 if self.padding == "same" else 0
        return (size - 1) * stride + span - 2 * cut + self.output_padding[position]


class MaxPool(nn.Module):
    """The greatest value of each window, over `(B, *positions, C)`.

    Args:
        window: Its lengths.
        strides: From window to window.
        padding: `"valid"` or `"same"`.
    """

    def __init__(self, window: Sequence[int], strides: Sequence[int], padding: str) -> None:
        super().__init__()
        self.window, self.strides, self.padding = tuple(window), tuple(strides), padding
        self._windows = [(k, s, 1) for k, s in zip(window, strides, strict=True)]

    def _get_name(self) -> str:
        return f"{type(self).__name__}{len(self.window)}d"

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"kernel_size={self.window}, stride={self.strides}, padding={self.padding!r}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `(B, *positions, C)`."""
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(self.window) - 1]
        x = pad_positions(x.movedim(-1, 1), self.padding, self._windows, -torch.inf)
        return pool(x, self.window, self.strides).movedim(1, -1)


class AvgPool(MaxPool):
    """The mean of each window, padding not counted, over `(B, *positions, C)`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `(B, *positions, C)`."""
        pool: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(self.window) - 1]
        x = x.movedim(-1, 1)
        y = pool(pad_positions(x, self.padding, self._windows), self.window, self.strides)
        if self.padding == "same":
            inside = pad_positions(torch.ones_like(x[:1, :1]), self.padding, self._windows)
            y = y / pool(inside, self.window, self.strides)
        return y.movedim(1, -1)


class GlobalAvgPool(nn.Module):
    """The mean over all positions of `(B, *positions, C)`, or over those that a mask keeps.

    Args:
        keepdims: Whether the positions stay as axes of length one.
    """

    def __init__(self, *, keepdims: bool) -> None:
        super().__init__()
        self.keepdims = keepdims

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return `(B, C)`."""
        axes = list(range(1, x.dim() - 1))
        if mask is None:
            return x.mean(axes, keepdim=self.keepdims)
        kept = mask.unsqueeze(-1)
        total = torch.where(kept, x, torch.zeros((), dtype=x.dtype, device=x.device)).sum(
            axes, keepdim=self.keepdims
        )
        return total / kept.to(x.dtype).sum(axes, keepdim=self.keepdims)


class Resize(nn.Module):
    """Images `(B, height, width, C)` resampled to a size.

    Args:
        size: Height and width.
        interpolation: `"nearest"`, `"bilinear"`, `"bicubic"`, `"lanczos3"` or `"lanczos5"`.
        antialias: Whether shrinking averages over the pixels that become one.
    """

    def __init__(self, size: Sequence[int], interpolation: str, *, antialias: bool = False) -> None:
        super().__init__()
        if interpolation not in {"nearest", "bilinear", *_KERNELS}:
            msg = f"Expected nearest, bilinear, bicubic, lanczos3 or lanczos5 interpolation, got {interpolation!r}."
            raise SpecError(msg)
        self.size, self.interpolation, self.antialias = tuple(size), interpolation, antialias

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"{self.size}, interpolation={self.interpolation!r}, antialias={self.antialias}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `(B, *size, C)`."""
        if self.interpolation in _KERNELS:
            rows, columns = (
                self._weights(*sizes).to(x) for sizes in zip(x.shape[1:3], self.size, strict=True)
            )
            return torch.einsum("ih,jw,bhwc->bijc", rows, columns, x)
        mode = "nearest-exact" if self.interpolation == "nearest" else "bilinear"
        return F.interpolate(
            x.movedim(-1, 1), self.size, mode=mode, antialias=self.antialias and mode == "bilinear"
        ).movedim(1, -1)

    def _weights(self, old: int, new: int) -> torch.Tensor:
        if self.interpolation == "bicubic" and not self.antialias:
            return _cubic(old, new)
        radius, kernel = _KERNELS[self.interpolation]
        return _sampled(old, new, radius, kernel, max(old / new, 1.0) if self.antialias else 1.0)


def _sampled(
    old: int, new: int, radius: float, kernel: Callable[[torch.Tensor], torch.Tensor], width: float
) -> torch.Tensor:
    """The weights `(new, old)` of TensorFlow's resampling by a kernel that is so many times as wide."""
    center = (torch.arange(new, dtype=torch.float32) + 0.5) * (old / new)
    distance = (torch.arange(old, dtype=torch.float32) + 0.5 - center[:, None]).abs() / width
    weights = torch.where(distance < radius, kernel(distance), 0.0)
    return weights / weights.sum(1, keepdim=True)


def _lanczos(radius: float) -> tuple[float, Callable[[torch.Tensor], torch.Tensor]]:
    return radius, lambda distance: torch.sinc(distance) * torch.sinc(distance / radius)


def _keys(distance: torch.Tensor) -> torch.Tensor:
    """The cubic of R. Keys, 1981, "Cubic convolution interpolation for digital image processing", with a = -0.5."""
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance <= 1, near, far)


_KERNELS = {"bicubic": (2.0, _keys), "lanczos3": _lanczos(3.0), "lanczos5": _lanczos(5.0)}


def _cubic(old: int, new: int) -> torch.Tensor:
    """The weights `(new, old)` of TensorFlow's bicubic resizing: a = -0.5, in steps of 1/1024, and none beyond the edge."""
    place = (torch.arange(new, dtype=torch.float32) + 0.5) * torch.tensor(
        old / new, dtype=torch.float32
    ) - 0.5
    floor = place.floor()
    step = ((place - floor) * 1024).round() / 1024
    weights = torch.zeros(new, old, dtype=torch.float32)
    for offset in (-1, 0, 1, 2):
        index = (floor + offset).long()
        inside = (index >= 0) & (index < old)
        weight = _keys((step - offset).abs())
        weights[torch.arange(new)[inside], index[inside]] += weight[inside]
    return weights / weights.sum(1, keepdim=True)


class Upsample(nn.Module):
    """Each position axis of `(B, *positions, C)` a whole number of times as long.

    Args:
        factors: How many times, by axis.
        interpolation: `"nearest"`, and for images what `Resize` knows.
    """

    def __init__(self, factors: Sequence[int], interpolation: str) -> None:
        super().__init__()
        self.factors, self.interpolation = tuple(factors), interpolation

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"{self.factors}, interpolation={self.interpolation!r}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the longer array."""
        if self.interpolation == "nearest":
            for axis, factor in enumerate(self.factors, 1):
                x = x.repeat_interleave(factor, axis)
            return x
        size = [factor * length for factor, length in zip(self.factors, x.shape[1:-1], strict=True)]
        return Resize(size, self.interpolation)(x)
