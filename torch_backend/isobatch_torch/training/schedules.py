"""Keras's learning-rate schedules as torch schedulers: stepped once for each batch, computed in float32 as Keras does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from isobatch.recipe import Part

__all__ = ["KerasSchedule", "rate_at"]


class KerasSchedule(torch.optim.lr_scheduler.LRScheduler):
    """A schedule of Keras, for any optimizer of torch.

    Call `step()` once for each batch, after `optimizer.step()`.

    Args:
        optimizer: Whose learning rate it sets.
        schedule: A word of `isobatch.recipe.SCHEDULES` with its settings.
        last_epoch: Steps that have been taken already, less one.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> schedule = KerasSchedule(optimizer, Part("PiecewiseConstantDecay", {"boundaries": [1], "values": [1.0, 0.5]}))
    >>> for _ in range(3):
    ...     print(schedule.get_last_lr())
    ...     optimizer.step()
    ...     schedule.step()
    [1.0]
    [1.0]
    [0.5]
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Part, last_epoch: int = -1) -> None:
        self.schedule = schedule
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of each group at the step that the schedule is at."""
        rate = rate_at(self.schedule, self.last_epoch)
        return [rate] * len(self.optimizer.param_groups)

    def seek(self, step: int) -> None:
        """Go to a step.

        Args:
            step: How many batches have been seen.
        """
        self.last_epoch = step
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


def rate_at(schedule: Part, step: int) -> float:
    """Return the learning rate of a schedule at a step, counted from 0.

    Args:
        schedule: A word of `isobatch.recipe.SCHEDULES` with its settings.
        step: Batches seen before.

    >>> rate_at(Part("InverseTimeDecay", {"initial_learning_rate": 1.0, "decay_steps": 1, "decay_rate": 1.0, "staircase": False}), 3)
    0.25
    """
    with np.errstate(all="ignore"):
        return float(_FORMS[schedule.name](schedule.settings, step))


_F = np.float32
Settings = Mapping[str, Any]


def _exponential(s: Settings, step: int) -> Any:
    return _F(s["initial_learning_rate"]) * _F(s["decay_rate"]) ** _part(s, step)


def _inverse_time(s: Settings, step: int) -> Any:
    return _F(s["initial_learning_rate"]) / (_F(1) + _F(s["decay_rate"]) * _part(s, step))


def _part(s: Settings, step: int) -> Any:
    part = _F(step) / _F(s["decay_steps"])
    return np.floor(part) if s["staircase"] else part


def _piecewise(s: Settings, step: int) -> Any:
    passed = sum(
        step > int(boundary) for boundary in s["boundaries"]
    )  # at a boundary the old value still holds
    return _F(s["values"][passed])


def _polynomial(s: Settings, step: int) -> Any:
    first, last = _F(s["initial_learning_rate"]), _F(s["end_learning_rate"])
    at, steps = _F(step), _F(s["decay_steps"])
    if s["cycle"]:
        steps = steps * (_F(1) if step == 0 else np.ceil(at / steps))
    else:
        at = min(at, steps)
    return (first - last) * (_F(1) - at / steps) ** _F(s["power"]) + last


def _cosine(s: Settings, step: int) -> Any:
    first, steps, warm = _F(s["initial_learning_rate"]), _F(s["decay_steps"]), _F(s["warmup_steps"])
    target, at = s["warmup_target"], _F(step)
    if target is None:
        return _decayed(first, min(at, steps) / steps, s["alpha"])
    at = min(at, steps + warm)
    if at < warm:
        return at / warm * (_F(target) - first) + first
    return _decayed(_F(target), (at - warm) / steps, s["alpha"])


def _decayed(first: Any, part: Any, alpha: float) -> Any:
    cosine = _F(0.5) * (_F(1) + np.cos(_F(math.pi) * part))
    return first * (_F(1 - alpha) * cosine + _F(alpha))


def _restarts(s: Settings, step: int) -> Any:
    t_mul, part = _F(s["t_mul"]), _F(step) / _F(s["first_decay_steps"])
    if t_mul == 1:
        restarts = np.floor(part)
        part = part - restarts
    else:
        restarts = np.floor(np.log(_F(1) - part * (_F(1) - t_mul)) / np.log(t_mul))
        before = (_F(1) - t_mul**restarts) / (_F(1) - t_mul)
        part = (part - before) / t_mul**restarts
    cosine = _F(0.5) * _F(s["m_mul"]) ** restarts * (_F(1) + np.cos(_F(math.pi) * part))
    alpha = _F(s["alpha"])
    return _F(s["initial_learning_rate"]) * ((_F(1) - alpha) * cosine + alpha)


_FORMS: dict[str, Callable[[Settings, int], Any]] = {
    "ExponentialDecay": _exponential,
    "InverseTimeDecay": _inverse_time,
    "PiecewiseConstantDecay": _piecewise,
    "PolynomialDecay": _polynomial,
    "CosineDecay": _cosine,
    "CosineDecayRestarts": _restarts,
}
