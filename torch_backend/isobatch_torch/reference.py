"""The torch side of the built-in parity run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from isobatch.parallel import over_cpus

__all__ = ["DigitsNetwork", "ReferenceNetwork"]


class DigitsNetwork(nn.Module):
    """A small convolutional network with BatchNorm, the same as `isobatch_keras.reference.digits_network`.

    Args:
        shape: Height, width and channels of an image.
        classes: Number of classes.

    >>> DigitsNetwork((8, 8, 1), 10)(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        height, width, channels = shape
        self.conv1 = nn.Conv2d(channels, 16, 3, padding="same", bias=False)
        self.norm1 = nn.BatchNorm2d(16, eps=1e-3)
        self.conv2 = nn.Conv2d(16, 32, 3, padding="same", bias=False)
        self.norm2 = nn.BatchNorm2d(32, eps=1e-3)
        self.logits = nn.Linear(32 * (height // 4) * (width // 4), classes)
        self._flat = (32, height // 4, width // 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return logits `(B, classes)` of images `(B, channels, height, width)`."""
        x = torch.max_pool2d(torch.relu(self.norm1(self.conv1(image))), 2)
        x = torch.max_pool2d(torch.relu(self.norm2(self.conv2(x))), 2)
        return self.logits(x.flatten(1))

    def load_keras(self, weights: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Take the weights of the Keras side.

        Args:
            weights: By layer and Keras name, as `isobatch_keras.reference.train` returns them.
        """
        channels, height, width = self._flat
        dense = weights["logits.kernel"].reshape(height, width, channels, -1)  # Keras flattens channels last
        state = {
            "conv1.weight": weights["conv1.kernel"].transpose(3, 2, 0, 1),
            "conv2.weight": weights["conv2.kernel"].transpose(3, 2, 0, 1),
            "logits.weight": dense.transpose(3, 2, 0, 1).reshape(dense.shape[-1], -1),
            "logits.bias": weights["logits.bias"],
        }
        for norm in ("norm1", "norm2"):
            state[f"{norm}.weight"] = weights[f"{norm}.gamma"]
            state[f"{norm}.bias"] = weights[f"{norm}.beta"]
            state[f"{norm}.running_mean"] = weights[f"{norm}.moving_mean"]
            state[f"{norm}.running_var"] = weights[f"{norm}.moving_variance"]
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in state.items()}
        counters = {
            name: value for name, value in self.state_dict().items() if name.endswith("num_batches_tracked")
        }
        self.load_state_dict({**tensors, **counters})


class ReferenceNetwork:
    """The digits network in one precision, by itself and over replicas on the CPU.

    Args:
        shape: Height, width and channels of an image.
        classes: Number of classes.
        precision: `"float32"` or `"float64"`.
        weights: From the Keras side.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        precision: str,
        weights: Mapping[str, np.ndarray[Any, Any]],
    ) -> None:
        self._module = DigitsNetwork(shape, classes)
        self._module.load_keras(weights)
        self._module.eval().to(getattr(torch, precision))
        self._over = functools.cache(functools.partial(over_cpus, self._module))

    def predict(self, images: np.ndarray[Any, Any], replicas: int | None = None) -> np.ndarray[Any, Any]:
        """Return the logits `(B, classes)` of images `(B, height, width, channels)`, by one model or by so many replicas."""
        with torch.inference_mode():
            logits: torch.Tensor = self._over(replicas)(torch.from_numpy(images).permute(0, 3, 1, 2))
        return logits.numpy()
