"""What `isobatch bench` times on the torch side: a forward pass, or a step of training, numpy in and numpy out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from isobatch.trees import flatten, unflatten

__all__ = ["forward", "step"]


def forward(module: nn.Module, arrays: Sequence[np.ndarray[Any, Any]]) -> Callable[[], Any]:
    """Return a call that predicts.

    Args:
        module: Any module; it is put into eval mode.
        arrays: Its arguments.

    Returns:
        A function that returns the outputs as numpy arrays.

    >>> forward(nn.ReLU(), [np.array([[1.0, -1.0, 2.0]])])()
    array([[1., 0., 2.]])
    """
    module.eval()
    device = _device(module)

    def call() -> Any:
        with torch.inference_mode():
            leaves, structure = flatten(module(*(torch.from_numpy(array).to(device) for array in arrays)))
        return unflatten(structure, [leaf.cpu().numpy() for leaf in leaves])

    return call


def step(module: nn.Module, arrays: Sequence[np.ndarray[Any, Any]]) -> Callable[[], Any]:
    """Return a call that takes one step of SGD on the mean square of the outputs, with a learning rate of 0: weights stay.

    Args:
        module: Any module; it is put into training mode.
        arrays: Its arguments.

    Returns:
        A function that returns the loss, the sum over outputs, as a 0-d array.

    >>> step(nn.PReLU(init=1.0), [np.array([[3.0, -1.0]], "float32")])()
    array(5., dtype=float32)
    """
    module.train()
    device = _device(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)

    def call() -> np.ndarray[Any, Any]:
        optimizer.zero_grad()
        leaves, _ = flatten(module(*(torch.from_numpy(array).to(device) for array in arrays)))
        loss = torch.stack([leaf.square().mean() for leaf in leaves]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach().cpu().numpy()

    return call


def _device(module: nn.Module) -> torch.device:
    """Where the weights of a module are, and so its inputs."""
    return next((one.device for one in module.parameters()), torch.device("cpu"))
