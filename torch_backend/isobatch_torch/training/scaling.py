"""Dynamic loss scaling with Keras's rule."""

from __future__ import annotations

import torch

from isobatch_torch.training.optimizer import KerasOptimizer

__all__ = ["LossScaler"]


class LossScaler:
    """Multiplies the loss so that small gradients survive low precision, as `keras.optimizers.LossScaleOptimizer` does.

    A step whose gradients are not finite is left out and halves the factor; after so many finite ones in a row it doubles.

    Args:
        initial_scale: The factor at first.
        dynamic_growth_steps: How many finite steps double it.

    >>> from isobatch_torch.training import SGD
    >>> scaler = LossScaler(1024.0, dynamic_growth_steps=1)
    >>> w = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = SGD([w], lr=1.0)
    >>> (w.sum() * scaler.factor).backward()
    >>> scaler.step(optimizer), w.item(), scaler.factor
    (True, 0.0, 2048.0)
    """

    def __init__(self, initial_scale: float = 2.0**15, dynamic_growth_steps: float = 2000) -> None:
        self.factor, self.growth_steps = float(initial_scale), int(dynamic_growth_steps)
        self.finite_steps = 0

    @torch.no_grad()
    def step(self, optimizer: KerasOptimizer) -> bool:
        """Let the optimizer take its step with the gradients divided by the factor, if all of them are finite.

        Args:
            optimizer: Which.

        Returns:
            Whether there was a step.
        """
        gradients = [
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        values = [one if one.layout == torch.strided else one.coalesce().values() for one in gradients]
        if not all(bool(torch.isfinite(one).all()) for one in values):
            self.factor, self.finite_steps = self.factor / 2, 0
            return False
        for group in optimizer.param_groups:
            group["loss_scale_factor"] = self.factor
        optimizer.step()
        self.finite_steps += 1
        if self.finite_steps == self.growth_steps:
            self.factor, self.finite_steps = self.factor * 2, 0
        return True

    def state(self) -> dict[str, float]:
        """Return factor and count, by Keras's names."""
        return {"dynamic_scale": self.factor, "step_counter": float(self.finite_steps)}

    def put(self, state: dict[str, float]) -> None:
        """Take factor and count from `state`."""
        self.factor, self.finite_steps = float(state["dynamic_scale"]), int(state["step_counter"])
