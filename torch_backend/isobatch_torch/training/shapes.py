"""How Keras brings targets, outputs and weights to one shape."""

from __future__ import annotations

import torch

__all__ = ["aligned", "masked_weights"]


def aligned(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors with the same number of axes, if all that one has more is a last axis of length 1.

    >>> a, b = aligned(torch.ones(3), torch.ones(3, 1))
    >>> a.shape, b.shape
    (torch.Size([3, 1]), torch.Size([3, 1]))
    """
    if a.dim() == b.dim() + 1 and a.shape[-1] == 1:
        return (a, b.unsqueeze(-1)) if b.dim() == 1 else (a.squeeze(-1), b)
    if b.dim() == a.dim() + 1 and b.shape[-1] == 1:
        return (a.unsqueeze(-1), b) if a.dim() == 1 else (a, b.squeeze(-1))
    return a, b


def masked_weights(
    weights: torch.Tensor | None, mask: torch.Tensor | None, dtype: torch.dtype, *, scaled: bool
) -> torch.Tensor | None:
    """Return sample weights in which masked positions count nothing; `None` where everything counts the same.

    Args:
        weights: A weight for each row, or for each row and position.
        mask: Which positions count.
        dtype: Type of the result.
        scaled: Whether positions that count make up for those that do not, so that a mean over all is one over them.
    """
    weights = None if weights is None else weights.to(dtype)
    if mask is None:
        return weights
    found = mask.to(dtype)
    if scaled:
        valid = found.sum()
        found = torch.where(mask, mask.numel() / valid.clamp_min(1), valid.new_zeros(()))
    if weights is None:
        return found
    found, weights = aligned(found, weights)
    return weights * found
