"""Normalisation as Keras defines it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

__all__ = ["BatchNorm", "GroupNorm", "LayerNorm", "RMSNorm", "Standardize"]


class BatchNorm(_BatchNorm):
    """Batch normalisation whose running variance is biased, over one axis of an array of any rank.

    Args:
        num_features: Length of the axis.
        axis: Which one it is.
        eps: Added to the variance.
        momentum: Share of the new batch in the running statistics.
        scale: Whether there is a `weight`.
        center: Whether there is a `bias`.
    """

    correction = 0  # of the variance; replicas pool it by this

    def __init__(
        self, num_features: int, axis: int, eps: float, momentum: float, *, scale: bool, center: bool
    ) -> None:
        super().__init__(num_features, eps, momentum)
        self.axis = axis
        if not scale:
            self.register_parameter("weight", None)
        if not center:
            self.register_parameter("bias", None)

    def forward(self, input: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002 - as the base class has it
        """Return an array of the same shape; positions that the mask leaves out do not count."""
        x = input
        rows = x.movedim(self.axis, -1).reshape(-1, self.num_features)
        if self.training:
            if mask is None:
                var, mean = torch.var_mean(rows, 0, correction=0)
            else:
                mean, var = _masked_moments(rows, mask.expand(x.shape[:-1]).reshape(-1, 1))
            self._update(mean, var)
        else:
            mean, var = self._running()
        shape = [1] * x.dim()
        shape[self.axis] = self.num_features
        factor = torch.rsqrt(var + self.eps)
        weight: Any = self.weight  # None, or a tensor: not a parameter in a replica of nn.DataParallel
        bias: Any = self.bias
        if weight is not None:
            factor = factor * weight
        offset = -mean * factor
        if bias is not None:
            offset = offset + bias
        return x * factor.reshape(shape) + offset.reshape(shape)

    @torch.no_grad()
    def _update(self, mean: torch.Tensor, var: torch.Tensor) -> None:
        for running, new in zip(self._running(), (mean, var), strict=True):
            running.lerp_(new.to(running.dtype), self.momentum or 0.0)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)

    def _running(self) -> tuple[torch.Tensor, torch.Tensor]:
        mean: Any = self.running_mean
        return mean, self.running_var  # type: ignore[return-value] # both are there, as this class is made


class LayerNorm(nn.Module):
    """Layer normalisation over any axes.

    Args:
        shape: Lengths of the axes.
        axes: Which they are, counted from the end.
        eps: Added to the variance.
        scale: Whether there is a `weight`.
        center: Whether there is a `bias`.
    """

    def __init__(
        self, shape: Sequence[int], axes: Sequence[int], eps: float, *, scale: bool, center: bool
    ) -> None:
        super().__init__()
        self.axes, self.eps = list(axes), eps
        self.weight = nn.Parameter(torch.ones(tuple(shape))) if scale else None
        self.bias = nn.Parameter(torch.zeros(tuple(shape))) if center else None

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"axes={self.axes}, eps={self.eps}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an array of the same shape."""
        var, mean = torch.var_mean(x, self.axes, correction=0, keepdim=True)
        y = (x - mean) * torch.rsqrt(var + self.eps)
        if self.weight is not None:
            y = y * _along(self.weight, x, self.axes)
        return y if self.bias is None else y + _along(self.bias, x, self.axes)


class RMSNorm(nn.Module):
    """Division by the root mean square over any axes.

    Args:
        shape: Lengths of the axes.
        axes: Which they are, counted from the end.
        eps: Added to the mean square.
    """

    def __init__(self, shape: Sequence[int], axes: Sequence[int], eps: float) -> None:
        super().__init__()
        self.axes, self.eps = list(axes), eps
        self.weight = nn.Parameter(torch.ones(tuple(shape)))

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"axes={self.axes}, eps={self.eps}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an array of the same shape."""
        y = x * torch.rsqrt(x.square().mean(self.axes, keepdim=True) + self.eps)
        return y * _along(self.weight, x, self.axes)


class GroupNorm(nn.Module):
    """Group normalisation over one axis of an array of any rank.

    Args:
        groups: How many.
        num_channels: Length of the axis.
        axis: Which one it is.
        eps: Added to the variance.
        scale: Whether there is a `weight`.
        center: Whether there is a `bias`.
    """

    def __init__(
        self, groups: int, num_channels: int, axis: int, eps: float, *, scale: bool, center: bool
    ) -> None:
        super().__init__()
        self.groups, self.axis, self.eps = groups, axis, eps
        self.weight = nn.Parameter(torch.ones(num_channels)) if scale else None
        self.bias = nn.Parameter(torch.zeros(num_channels)) if center else None

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"{self.groups}, axis={self.axis}, eps={self.eps}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an array of the same shape."""
        y = F.group_norm(x.movedim(self.axis, 1), self.groups, self.weight, self.bias, self.eps)
        return y.movedim(1, self.axis)


class Standardize(nn.Module):
    """Stored mean and variance taken out, or put back in.

    Args:
        mean: Shape of the mean.
        variance: Shape of the variance.
        invert: Whether they are put back in.
    """

    mean: torch.Tensor
    variance: torch.Tensor

    def __init__(self, mean: Sequence[int], variance: Sequence[int], *, invert: bool) -> None:
        super().__init__()
        self.invert = invert
        self.register_buffer("mean", torch.zeros(tuple(mean)))
        self.register_buffer("variance", torch.ones(tuple(variance)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an array of the same shape."""
        scale = self.variance.sqrt().clamp_min(1e-7)
        return self.mean + x * scale if self.invert else (x.to(scale.dtype) - self.mean) / scale


def _masked_moments(rows: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of the rows that count, divided as Keras does, which has a mask without any in mind."""
    count = mask.sum() + 1e-7
    zero = rows.new_zeros(())
    mean = torch.where(mask, rows, zero).sum(0) / count
    return mean, torch.where(mask, rows - mean, zero).square().sum(0) / count


def _along(weight: torch.Tensor, x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """A weight with the lengths of these axes, so that it broadcasts against `x`."""
    shape = [1] * x.dim()
    for axis, length in zip(axes, weight.shape, strict=True):
        shape[axis] = length
    return weight.reshape(shape)
