"""Activations by their word, each the torch module that computes exactly that where there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from isobatch_torch.spec.functions import Function

__all__ = [
    "ACTIVATIONS",
    "AlphaDropout",
    "Dropout",
    "Function",
    "GaussianNoise",
    "PReLU",
    "Scale",
    "Softmax",
    "activation",
]


class Softmax(nn.Module):
    """Softmax over one or more axes, and only where a mask is true.

    Args:
        axes: Which.
    """

    def __init__(self, axes: Sequence[int]) -> None:
        super().__init__()
        self.axes = list(axes)

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"axes={self.axes}"

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return an array of the same shape."""
        if mask is not None:
            low = -3e4 if x.dtype == torch.float16 else -1e9
            x = torch.where(mask > 0.5 if mask.is_floating_point() else mask.bool(), x, x.new_full((), low))
        if len(self.axes) == 1:
            return x.softmax(self.axes[0])
        return (x - x.logsumexp(self.axes, keepdim=True)).exp()


class Scale(nn.Module):
    """`x * weight`.

    Args:
        shape: Of the weight.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(tuple(shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return x * self.weight


class PReLU(Scale):
    """`x`, or `weight * x` below 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an array of the same shape."""
        return torch.where(x > 0, x, self.weight * x)


class Dropout(nn.Module):
    """Dropout whose mask is the same along some axes.

    Args:
        rate: Share of zeros.
        noise_shape: Shape of the mask; `None` where it is the input's.
    """

    def __init__(self, rate: float, noise_shape: Sequence[int | None]) -> None:
        super().__init__()
        self.rate, self.noise_shape = rate, list(noise_shape)

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"p={self.rate}, noise_shape={self.noise_shape}"

    def _shape(self, x: torch.Tensor) -> list[int]:
        sizes = zip(x.shape, self.noise_shape, strict=True)
        return [size if wanted is None else wanted for size, wanted in sizes]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an array of the same shape."""
        return x * F.dropout(x.new_ones(self._shape(x)), self.rate) if self.training else x


class AlphaDropout(Dropout):
    """Alpha dropout whose mask is the same along some axes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an array of the same shape."""
        if not self.training or not self.rate:
            return x
        low = -1.7580993408473766  # what selu tends to
        kept = torch.rand(self._shape(x), device=x.device) >= self.rate
        scale = ((1 - self.rate) * (1 + self.rate * low**2)) ** -0.5
        return torch.where(kept, x, x.new_full((), low)) * scale - scale * low * self.rate


class GaussianNoise(nn.Module):
    """Normal noise in training.

    Args:
        stddev: Its standard deviation.
        multiply: Whether `1 + noise` is multiplied, instead of the noise added.
    """

    def __init__(self, stddev: float, *, multiply: bool = False) -> None:
        super().__init__()
        self.stddev, self.multiply = stddev, multiply

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"stddev={self.stddev}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an array of the same shape."""
        if not self.training:
            return x
        noise = torch.randn_like(x) * self.stddev
        return x * (1 + noise) if self.multiply else x + noise


ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "leaky_relu": lambda slope: nn.LeakyReLU(negative_slope=slope),
    "clipped_relu": partial(Function, "clipped_relu"),
    "elu": nn.ELU,
    "selu": nn.SELU,
    "celu": nn.CELU,
    "gelu": lambda approximate: nn.GELU("tanh" if approximate else "none"),
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "sigmoid": nn.Sigmoid,
    "log_sigmoid": nn.LogSigmoid,
    "sparse_sigmoid": partial(Function, "sparse_sigmoid"),
    "hard_sigmoid": nn.Hardsigmoid,
    "hard_silu": nn.Hardswish,
    "hard_tanh": nn.Hardtanh,
    "tanh": nn.Tanh,
    "tanh_shrink": nn.Tanhshrink,
    "soft_shrink": lambda threshold: nn.Softshrink(lambd=threshold),
    "hard_shrink": lambda threshold: nn.Hardshrink(lambd=threshold),
    "threshold": nn.Threshold,
    # Above its threshold torch returns x itself, which is 2e-9 off at the default of 20.
    "softplus": lambda: nn.Softplus(threshold=1000),
    "squareplus": partial(Function, "squareplus"),
    "softsign": nn.Softsign,
    "sparse_plus": partial(Function, "sparse_plus"),
    "softmax": Softmax,
    "log_softmax": lambda axis: nn.LogSoftmax(dim=axis),
    "sparsemax": partial(Function, "sparsemax"),
    "glu": lambda axis: nn.GLU(dim=axis),
    "exp": partial(Function, "exp"),
    "dropout": lambda rate, noise_shape: (
        nn.Dropout(rate) if noise_shape is None else Dropout(rate, noise_shape)
    ),
    "alpha_dropout": lambda rate, noise_shape: (
        nn.AlphaDropout(rate) if noise_shape is None else AlphaDropout(rate, noise_shape)
    ),
    "gaussian_noise": GaussianNoise,
    "gaussian_dropout": lambda rate: GaussianNoise((rate / (1 - rate)) ** 0.5, multiply=True),
}


def activation(named: Sequence[Any]) -> nn.Module:
    """Return an activation from its word and attributes, as recurrent layers keep it.

    >>> activation(["leaky_relu", {"slope": 0.2}])
    LeakyReLU(negative_slope=0.2)
    """
    word, attributes = named
    return ACTIVATIONS[word](**attributes)
