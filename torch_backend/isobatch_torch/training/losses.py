"""Keras's losses for torch: the same values, clipping, smoothing, reductions and weights.

Every function takes targets and outputs, channels last, and returns a value for each row (and position).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from isobatch.recipe import Loss
from isobatch_torch.training.shapes import aligned, masked_weights

__all__ = ["FUNCTIONS", "KerasLoss", "TotalLoss", "keep_logits", "loss_values"]

_EPSILON = 1e-7  # keras.config.epsilon()

Tensor = torch.Tensor


class KerasLoss(nn.Module):
    """The loss of one output.

    Args:
        loss: Its description.
        dtype: What it is computed in.

    >>> from isobatch.recipe import Part
    >>> loss = KerasLoss(Loss(0, Part("mean_squared_error"), "sum_over_batch_size"), torch.float64)
    >>> loss(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.5])).item()
    1.0
    """

    def __init__(self, loss: Loss, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.loss, self.dtype = loss, dtype

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"{self.loss.function}, reduction={self.loss.reduction!r}"

    def forward(
        self, output: Tensor, target: Tensor, sample_weight: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return the loss, a 0-d tensor.

        Args:
            output: What the network gave, `(B, ...)`.
            target: What it should have given.
            sample_weight: A weight for each row, `(B,)`, or for each row and position.
            mask: Which positions count.
        """
        reduction = self.loss.reduction
        values, valid = loss_values(
            self.loss.function.name, self.loss.function.settings, target.to(self.dtype), output.to(self.dtype)
        )
        if valid is not None:
            mask = valid if mask is None else mask & valid
        weights = masked_weights(sample_weight, mask, values.dtype, scaled=reduction in _SCALED)
        if weights is not None:
            values, weights = aligned(values, weights)
            values = values * weights
        if not values.dim():
            return values
        if reduction == "sum":
            return values.sum()
        if reduction == "mean_with_sample_weight" and weights is not None:
            return _ratio(values.sum(), weights.sum())
        return values.sum() / max(values.numel(), 1)


_SCALED = {"mean", "sum_over_batch_size"}


class TotalLoss(nn.Module):
    """The whole loss of a network: that of each output by its weight, and the penalties of weights.

    Args:
        losses: Those of the outputs that have one.
        penalties: For each penalised parameter its factors `"l1"` and `"l2"`.
        dtype: What it is computed in.
    """

    def __init__(
        self,
        losses: Sequence[Loss],
        penalties: Sequence[tuple[nn.Parameter, Mapping[str, float]]] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.terms = nn.ModuleList(KerasLoss(one, dtype) for one in losses)
        self.penalties = [(p, dict(factors)) for p, factors in penalties]  # no parameters of the loss's own

    def forward(
        self,
        outputs: Sequence[Tensor],
        targets: Sequence[Any],
        sample_weights: Sequence[Any] | None = None,
        masks: Sequence[Any] | None = None,
    ) -> Tensor:
        """Return the loss, a 0-d tensor.

        Args:
            outputs: All outputs of the network, flat.
            targets: A target for each output; `None` where there is no loss.
            sample_weights: For each output weights `(B,)`, or `None`.
            masks: For each output which positions count, or `None`.
        """
        total: Any = 0
        for module in self.terms:
            assert isinstance(module, KerasLoss)  # noqa: S101 - for type checkers
            at = module.loss.output
            weights = None if sample_weights is None else sample_weights[at]
            mask = None if masks is None else masks[at]
            value = module(outputs[at], targets[at], weights, mask)
            total = total + (value if module.loss.weight is None else value * module.loss.weight)
        for p, factors in self.penalties:
            penalty: Any = 0
            if factors.get("l1"):
                penalty = penalty + factors["l1"] * p.abs().sum()
            if factors.get("l2"):
                penalty = penalty + factors["l2"] * p.square().sum()
            total = total + penalty
        return total


def loss_values(
    name: str, settings: Mapping[str, Any], target: Tensor, output: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return a loss's values, and which of them count where it leaves some out.

    Args:
        name: A word of `isobatch.recipe.LOSSES`.
        settings: The function's settings.
        target: What should have come, in the output's type.
        output: What came.
    """
    target, same = aligned(target, output)
    if same is not output:
        output = same
    settings = dict(settings)
    ignored = settings.pop("ignore_class", None)
    if ignored is None:
        return FUNCTIONS[name](target, output, **settings), None
    if target.dim() == output.dim() and target.shape[-1] == 1:
        target = target.squeeze(-1)
    valid = target != ignored
    output = torch.where(valid.unsqueeze(-1), output, output.new_zeros(()))
    values = FUNCTIONS[name](torch.where(valid, target, target.new_zeros(())), output, **settings)
    return torch.where(valid, values, values.new_zeros(())), valid


def keep_logits(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    """Let a sigmoid's or softmax's output remember what it was computed from; a forward hook.

    Keras does so, and its cross-entropies then read the logits: they stay exact where the probabilities are 0 or 1. As in
    Keras, whatever is computed from the output has forgotten them, as have the joined outputs of several replicas.
    """
    output.isobatch_logits = args[0]  # type: ignore[attr-defined]


def _logits(output: Tensor) -> Tensor | None:
    return getattr(output, "isobatch_logits", None)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b == 0, torch.zeros_like(a), a / torch.where(b == 0, torch.ones_like(b), b))


def _clipped(p: Tensor, low: float = _EPSILON, high: float = 1 - _EPSILON) -> Tensor:
    return p.clamp(low, high)


def _mse(y: Tensor, p: Tensor) -> Tensor:
    return (y - p).square().mean(-1)


def _mae(y: Tensor, p: Tensor) -> Tensor:
    return (y - p).abs().mean(-1)


def _mape(y: Tensor, p: Tensor) -> Tensor:
    return 100 * ((y - p) / y.abs().clamp_min(_EPSILON)).abs().mean(-1)


def _msle(y: Tensor, p: Tensor) -> Tensor:
    low = float(np.float32(_EPSILON))  # Keras makes a float32 tensor of it
    return ((p.clamp_min(low) + 1).log() - (y.clamp_min(low) + 1).log()).square().mean(-1)


def _cosine(y: Tensor, p: Tensor, axis: int = -1) -> Tensor:
    return -(_unit(y, axis) * _unit(p, axis)).sum(axis)


def _unit(x: Tensor, axis: int) -> Tensor:
    return x * x.square().sum(axis, keepdim=True).clamp_min(1e-12).rsqrt()


def _huber(y: Tensor, p: Tensor, delta: float = 1.0) -> Tensor:
    gap = (p - y).abs()
    return torch.where(gap <= delta, 0.5 * gap.square(), delta * gap - 0.5 * delta**2).mean(-1)


def _log_cosh(y: Tensor, p: Tensor) -> Tensor:
    x = p - y
    return (x + torch.logaddexp(-2 * x, x.new_zeros(())) - float(np.log(np.float32(2)))).mean(-1)


def _kl(y: Tensor, p: Tensor) -> Tensor:
    y, p = _clipped(y, high=1), _clipped(p, high=1)
    return (y * (y / p).log()).sum(-1)


def _poisson(y: Tensor, p: Tensor) -> Tensor:
    return (p - y * (p + _EPSILON).log()).mean(-1)


def _signs(y: Tensor) -> Tensor:
    return 2 * y - 1 if bool(((y == 0) | (y == 1)).all()) else y


def _hinge(y: Tensor, p: Tensor) -> Tensor:
    return (1 - _signs(y) * p).clamp_min(0).mean(-1)


def _squared_hinge(y: Tensor, p: Tensor) -> Tensor:
    return (1 - _signs(y) * p).clamp_min(0).square().mean(-1)


def _categorical_hinge(y: Tensor, p: Tensor) -> Tensor:
    return (((1 - y) * p).amax(-1) - (y * p).sum(-1) + 1).clamp_min(0)


def _binary(y: Tensor, p: Tensor, *, from_logits: bool) -> Tensor:
    logits = _logits(p)
    if logits is not None or from_logits:
        return F.binary_cross_entropy_with_logits(p if logits is None else logits, y, reduction="none")
    p = _clipped(p)
    return -(y * p.log() + (1 - y) * (1 - p).log())


def _bce(
    y: Tensor,
    p: Tensor,
    *,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    return _binary(_smooth(y, label_smoothing, 2), p, from_logits=from_logits).mean(axis)


def _focal_bce(
    y: Tensor,
    p: Tensor,
    *,
    apply_class_balancing: bool = False,
    alpha: float = 0.25,
    gamma: float = 2.0,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    y = _smooth(y, label_smoothing, 2)
    if from_logits:
        logits, p = p, p.sigmoid()
        keep_logits(nn.Identity(), (logits,), p)
    value = _binary(y, p, from_logits=False) * (1 - (y * p + (1 - y) * (1 - p))) ** gamma
    if apply_class_balancing:
        value = value * (y * alpha + (1 - y) * (1 - alpha))
    return value.mean(axis)


def _smooth(y: Tensor, amount: float, classes: int) -> Tensor:
    return y * (1 - amount) + amount / classes if amount else y


def _cce(
    y: Tensor,
    p: Tensor,
    *,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    y = _smooth(y, label_smoothing, y.shape[-1])
    logits = _logits(p)
    if logits is not None or from_logits:
        return -(y * (p if logits is None else logits).log_softmax(axis)).sum(axis)
    return -(y * _clipped(p / p.sum(axis, keepdim=True)).log()).sum(axis)


def _focal_cce(
    y: Tensor,
    p: Tensor,
    *,
    alpha: Any = 0.25,
    gamma: float = 2.0,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    y = _smooth(y, label_smoothing, y.shape[-1])
    p = p.softmax(axis) if from_logits else p
    p = _clipped(p / p.sum(axis, keepdim=True))
    return ((1 - p) ** gamma * torch.as_tensor(alpha, dtype=p.dtype) * -y * p.log()).sum(axis)


def _sparse_cce(y: Tensor, p: Tensor, *, from_logits: bool = False, axis: int = -1) -> Tensor:
    if axis not in {-1, p.dim() - 1}:
        msg = f"Expected axis -1, as Keras on TensorFlow does, got {axis!r}."
        raise ValueError(msg)
    logits = _logits(p)
    if logits is None:
        logits = p if from_logits else _clipped(p).log()
    if y.dim() == logits.dim() and y.shape[-1] == 1:
        y = y.squeeze(-1)
    return -logits.log_softmax(-1).gather(-1, y.long().unsqueeze(-1)).squeeze(-1)


def _gce(y: Tensor, p: Tensor, q: float = 0.5) -> Tensor:
    y = y.squeeze(-1) if y.dim() == p.dim() and y.shape[-1] == 1 else y
    return (1 - p.gather(-1, y.long().unsqueeze(-1)).squeeze(-1) ** q) / q


def _axes(axis: Any) -> Any:
    return None if axis is None else tuple(axis) if isinstance(axis, list | tuple) else axis


def _dice(y: Tensor, p: Tensor, axis: Any = None) -> Tensor:
    axes = _axes(axis)
    return 1 - 2 * (y * p).sum(axes) / (y.sum(axes) + p.sum(axes) + _EPSILON)


def _tversky(y: Tensor, p: Tensor, alpha: float = 0.5, beta: float = 0.5, axis: Any = None) -> Tensor:
    axes = _axes(axis)
    both, missed, wrong = (y * p).sum(axes), ((1 - p) * y).sum(axes), (p * (1 - y)).sum(axes)
    return 1 - both / (both + missed * alpha + wrong * beta + _EPSILON)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "mean_squared_error": _mse,
    "mean_absolute_error": _mae,
    "mean_absolute_percentage_error": _mape,
    "mean_squared_logarithmic_error": _msle,
    "cosine_similarity": _cosine,
    "huber": _huber,
    "log_cosh": _log_cosh,
    "kl_divergence": _kl,
    "poisson": _poisson,
    "hinge": _hinge,
    "squared_hinge": _squared_hinge,
    "categorical_hinge": _categorical_hinge,
    "binary_crossentropy": _bce,
    "binary_focal_crossentropy": _focal_bce,
    "categorical_crossentropy": _cce,
    "categorical_focal_crossentropy": _focal_cce,
    "sparse_categorical_crossentropy": _sparse_cce,
    "categorical_generalized_cross_entropy": _gce,
    "dice": _dice,
    "tversky": _tversky,
}
"""By the words of `isobatch.recipe.LOSSES`; the arguments are named as Keras names them."""
