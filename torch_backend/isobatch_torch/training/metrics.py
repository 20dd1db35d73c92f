"""Keras's metrics for torch: running values, weighted as Keras weights them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from isobatch.recipe import LOSSES, Metric
from isobatch_torch.training.losses import loss_values
from isobatch_torch.training.shapes import aligned, masked_weights

__all__ = ["KerasMetric", "Mean", "build_metric"]

Tensor = torch.Tensor


class KerasMetric(nn.Module):
    """What all metrics share: `update`, `compute`, `reset`, and state in buffers.

    Args:
        dtype: What it is computed in.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype

    def keep(self, **shapes: tuple[int, ...]) -> None:
        """Make buffers of zeros of these shapes."""
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=self.dtype))

    def update(
        self, target: Tensor, output: Tensor, weights: Tensor | None = None, mask: Tensor | None = None
    ) -> None:
        """Take a batch into account.

        Args:
            target: What should have come.
            output: What came.
            weights: A weight for each row.
            mask: Which positions count.
        """
        raise NotImplementedError

    def compute(self) -> float:
        """Return the value over all batches since the last `reset`."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget all batches."""
        for buffer in self.buffers():
            buffer.zero_()


class Mean(KerasMetric):
    """A mean over rows, each by its weight.

    >>> mean = Mean()
    >>> mean.add(torch.tensor([1.0, 1.0, 1.0, 1.0]))
    >>> mean.add(torch.tensor([3.0]))
    >>> round(mean.compute(), 6)
    1.4
    """

    total: Tensor
    count: Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.keep(total=(), count=())

    @torch.no_grad()
    def add(self, values: Tensor, weights: Tensor | None = None) -> None:
        """Take values into account.

        Args:
            values: One for each row, perhaps with further axes, which are averaged.
            weights: For each row, perhaps with further axes.
        """
        values = values.to(self.dtype)
        if weights is not None:
            values, weights = aligned(values, weights.to(self.dtype))
            if values.dim() > weights.dim():
                values = values.flatten(weights.dim()).mean(-1) if weights.dim() else values.mean()
            weights = weights.expand(values.shape)
            values = values * weights
            weights = weights.flatten(1).mean(1) if weights.dim() > 1 else weights
        values = values.flatten(1).mean(1) if values.dim() > 1 else values
        self.total += values.sum()
        self.count += weights.sum() if weights is not None else len(values) if values.dim() else 1

    def compute(self) -> float:
        """Return the mean; 0 without any rows."""
        return float(self.total / self.count) if self.count else 0.0


class _MeanOf(Mean):
    """The mean of a function of targets and outputs."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.function = function

    @torch.no_grad()
    def update(
        self, target: Tensor, output: Tensor, weights: Tensor | None = None, mask: Tensor | None = None
    ) -> None:
        """Take a batch into account."""
        values = self.function(target, output)
        self.add(values, masked_weights(weights, mask, self.dtype, scaled=False))


class _RootMeanSquare(_MeanOf):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(_squared_gap, dtype)

    @torch.no_grad()
    def update(
        self, target: Tensor, output: Tensor, weights: Tensor | None = None, mask: Tensor | None = None
    ) -> None:
        """Take a batch into account; Keras has no mask in mind here."""
        del mask
        super().update(target.to(self.dtype), output.to(self.dtype), weights)

    def compute(self) -> float:
        """Return the root of the mean."""
        return float(super().compute() ** 0.5)


def _squared_gap(target: Tensor, output: Tensor) -> Tensor:
    target, output = aligned(target, output)
    return (output - target).square()


class _Counts(KerasMetric):
    """True and false positives and negatives above thresholds."""

    tp: Tensor
    fp: Tensor
    fn: Tensor
    tn: Tensor

    def __init__(self, thresholds: list[float], dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.thresholds = torch.tensor(thresholds, dtype=torch.float32)  # so in Keras
        n = (len(thresholds),)
        self.keep(tp=n, fp=n, fn=n, tn=n)

    @torch.no_grad()
    def update(
        self, target: Tensor, output: Tensor, weights: Tensor | None = None, mask: Tensor | None = None
    ) -> None:
        """Take a batch into account."""
        target, output = aligned(target.to(self.dtype), output.to(self.dtype))
        weights = masked_weights(weights, mask, self.dtype, scaled=False)
        each = (
            torch.ones_like(target) if weights is None else aligned(weights, target)[0].expand(target.shape)
        )
        positive = target.flatten() != 0
        above = output.flatten()[None] > self.thresholds.to(self.dtype)[:, None]
        each = each.flatten()
        for buffer, chosen in (
            (self.tp, above & positive),
            (self.fp, above & ~positive),
            (self.fn, ~above & positive),
            (self.tn, ~above & ~positive),
        ):
            buffer.add_(torch.where(chosen, each, each.new_zeros(())).sum(1))


class _Share(_Counts):
    """Precision or recall."""

    def __init__(self, other: str, thresholds: Any, dtype: torch.dtype) -> None:
        chosen = [0.5] if thresholds is None else thresholds if isinstance(thresholds, list) else [thresholds]
        super().__init__(chosen, dtype)
        self.other = other

    def compute(self) -> Any:
        """Return the share at each threshold; a number for one."""
        share = _share(self.tp, self.tp + getattr(self, self.other))
        return float(share[0]) if len(share) == 1 else share.tolist()


class _Area(_Counts):
    """Area under the ROC or precision-recall curve, over Keras's evenly spaced thresholds."""

    def __init__(
        self,
        *,
        num_thresholds: int,
        curve: str,
        summation_method: str,
        from_logits: bool,
        dtype: torch.dtype,
    ) -> None:
        inner = [(i + 1) / (num_thresholds - 1) for i in range(num_thresholds - 2)]
        super().__init__([-1e-7, *inner, 1 + 1e-7], dtype)
        self.curve, self.method, self.from_logits = curve, summation_method, from_logits

    @torch.no_grad()
    def update(
        self, target: Tensor, output: Tensor, weights: Tensor | None = None, mask: Tensor | None = None
    ) -> None:
        """Take a batch into account."""
        super().update(target, output.sigmoid() if self.from_logits else output, weights, mask)

    def compute(self) -> float:
        """Return the area."""
        recall = _share(self.tp, self.tp + self.fn)
        if self.curve == "PR" and self.method == "interpolation":
            return self._interpolated()
        x, y = (
            (_share(self.fp, self.fp + self.tn), recall)
            if self.curve == "ROC"
            else (recall, _share(self.tp, self.tp + self.fp))
        )
        pairs = torch.stack([y[:-1], y[1:]])
        heights = {"interpolation": pairs.mean(0), "minoring": pairs.amin(0), "majoring": pairs.amax(0)}
        return float(((x[:-1] - x[1:]) * heights[self.method]).sum())

    def _interpolated(self) -> float:
        """Area between points of the precision-recall curve (Davis and Goadrich, 2006)."""
        steps = self.tp[:-1] - self.tp[1:]
        above = self.tp + self.fp
        slope = _share(steps, (above[:-1] - above[1:]).clamp_min(0))
        intercept = self.tp[1:] - slope * above[1:]
        ratio = torch.where(
            (above[:-1] > 0) & (above[1:] > 0),
            _share(above[:-1], above[1:].clamp_min(0)),
            torch.ones_like(steps),
        )
        parts = _share(slope * (steps + intercept * ratio.log()), (self.tp[1:] + self.fn[1:]).clamp_min(0))
        return float(parts.sum())


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(
        whole == 0, torch.zeros_like(part), part / torch.where(whole == 0, torch.ones_like(whole), whole)
    )


def _equal(target: Tensor, output: Tensor) -> Tensor:
    target, output = aligned(target.to(output.dtype), output)
    return target == output


def _binary(target: Tensor, output: Tensor, threshold: float = 0.5) -> Tensor:
    target, output = aligned(target, output)
    return target == (output > threshold).to(target.dtype)


def _sparse(target: Tensor, output: Tensor) -> Tensor:
    if target.dim() == output.dim() and target.shape[-1] == 1:
        target = target.squeeze(-1)
    return target.long() == output.argmax(-1)


def _categorical(target: Tensor, output: Tensor) -> Tensor:
    return target.argmax(-1) == output.argmax(-1)


def _sparse_top(target: Tensor, output: Tensor, k: int = 5, from_sorted_ids: bool = False) -> Tensor:  # noqa: FBT001, FBT002
    classes, shape = target.reshape(-1).long(), target.shape
    scores = output.reshape(-1, output.shape[-1])
    if from_sorted_ids:
        return (scores[:, :k].long() == classes[:, None]).any(1).reshape(shape)
    own = scores.gather(1, classes[:, None])
    return ((scores > own).sum(1) < k).reshape(shape)


def _top(target: Tensor, output: Tensor, k: int = 5) -> Tensor:
    return _sparse_top(target.argmax(-1), output, k)


_ACCURACIES: dict[str, Callable[..., Tensor]] = {
    "accuracy": _equal,
    "binary_accuracy": _binary,
    "categorical_accuracy": _categorical,
    "sparse_categorical_accuracy": _sparse,
    "top_k_categorical_accuracy": _top,
    "sparse_top_k_categorical_accuracy": _sparse_top,
}


def build_metric(metric: Metric, dtype: torch.dtype = torch.float32) -> KerasMetric:
    """Return the metric of a description.

    Args:
        metric: From a recipe.
        dtype: What it is computed in.

    >>> from isobatch.recipe import Part
    >>> found = build_metric(Metric(0, Part("sparse_categorical_accuracy"), "accuracy"))
    >>> found.update(torch.tensor([0, 1]), torch.eye(2))
    >>> found.compute()
    1.0
    """
    name, settings = metric.function.name, metric.function.settings
    if name in LOSSES:
        return _MeanOf(_loss(name, settings), dtype)
    if name in _ACCURACIES:
        function = _ACCURACIES[name]
        return _MeanOf(lambda target, output: function(target, output, **settings), dtype)
    if name == "root_mean_squared_error":
        return _RootMeanSquare(dtype)
    if name == "auc":
        return _Area(**settings, dtype=dtype)
    return _Share("fp" if name == "precision" else "fn", settings["thresholds"], dtype)


def _loss(name: str, settings: Mapping[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda target, output: loss_values(name, settings, target.to(output.dtype), output)[0]
