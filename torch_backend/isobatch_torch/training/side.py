"""The torch side of a comparison of training: steps whose loss, gradients and weights can be read."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from isobatch.counted import Counted
from isobatch.trajectory import Step
from isobatch_torch.spec.build import module_path, parts_of, to_tensors
from isobatch_torch.training.twin import TrainingTwin

__all__ = ["TorchSide", "predict"]


class TorchSide:
    """Trains a twin step by step.

    Args:
        training: What trains it; its module may be parallel.
        name: What to call it.
    """

    def __init__(self, training: TrainingTwin, name: str = "torch") -> None:
        self.training = training
        self.name = name

    def step(self, batch: tuple[Any, ...]) -> Step:
        """Train on one batch.

        Args:
            batch: Inputs, targets, and perhaps sample weights.
        """
        loss = self.training.train_on_batch(*batch)
        network = self.training.network
        found = to_tensors(network, _gradient)
        trained = {
            key for key, parts in parts_of(network).items() if any(part.requires_grad for part in parts)
        }
        return Step(loss, {key: array for key, array in found.items() if key in trained}, self.weights())

    def weights(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Return weights and running statistics by key."""
        return {key: array.copy() for key, array in to_tensors(self.training.network).items()}

    @contextmanager
    def counting(self, counted: Counted) -> Generator[None]:
        """Let dropout layers keep the units that are counted.

        Args:
            counted: Which those are.

        Raises:
            SpecError: Other layers draw random numbers.
        """
        network = self.training.network
        spec = network.description.spec
        counted.check(spec)
        layers = {
            module_path(node): node.module or node.name for node in spec.nodes if node.operation == "dropout"
        }
        handles = [
            network.get_submodule(path).register_forward_hook(partial(_drop, name, counted))
            for path, name in layers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@torch.no_grad()
def predict(module: nn.Module, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a module's output in evaluation mode."""
    found: torch.Tensor = module.eval()(torch.from_numpy(x))
    return found.numpy()


def _drop(
    name: str, counted: Counted, layer: Any, args: tuple[Any, ...], output: torch.Tensor
) -> torch.Tensor:
    rate = layer.p if isinstance(layer, nn.Dropout) else layer.rate
    if not layer.training or not rate:
        return output
    x: torch.Tensor = args[0]
    wanted = None if isinstance(layer, nn.Dropout) else layer.noise_shape
    kept = torch.from_numpy(counted.kept(name, x.shape, rate, wanted)).to(x.device)
    return torch.where(kept, x / (1 - rate), torch.zeros_like(x))


def _gradient(part: torch.Tensor) -> torch.Tensor:
    if part.grad is None:
        return torch.zeros_like(part)
    return part.grad.to_dense() if part.grad.layout != torch.strided else part.grad.clone()
