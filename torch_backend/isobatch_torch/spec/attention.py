"""Attention as Keras defines it: a mask is true where attention goes, and heads may be of any width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

__all__ = ["AdditiveAttention", "DotAttention", "MultiHeadAttention"]


class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention between projections, with as many or fewer heads for key and value.

    Args:
        shapes: Of the weights in the spec, by role.
        settings: The operation's attributes.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], settings: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.key_heads = settings["heads"], settings["key_heads"]
        self.dropout, self.causal = settings["dropout"], settings["causal"]
        self.window, self.return_scores = settings["window"], settings["return_scores"]
        self.query_proj, self.key_proj, self.value_proj = (
            _projection(shapes, name) for name in ("query", "key", "value")
        )
        self.gate_proj = _projection(shapes, "gate") if "gate_kernel" in shapes else None
        heads, width, outer = shapes["output_kernel"]
        self.out_proj = nn.Linear(heads * width, outer, bias="output_bias" in shapes)

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"heads={self.heads}, key_heads={self.key_heads}, causal={self.causal}"

    def forward(
        self,
        query: torch.Tensor,
        value: torch.Tensor,
        key: torch.Tensor | None = None,
        *,
        query_mask: torch.Tensor | None = None,
        value_mask: torch.Tensor | None = None,
        key_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> Any:
        """Return `(B, T, out)`, and the scores `(B, heads, T, S)` if they are asked for."""
        key = value if key is None else key
        q = _split(self.query_proj(query), self.heads)
        k, v = (
            _split(project(x), self.key_heads).repeat_interleave(self.heads // self.key_heads, 1)
            for project, x in ((self.key_proj, key), (self.value_proj, value))
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if query_mask is not None:
            scores = _masked(scores, query_mask[:, None, :, None])
        for mask in (value_mask, key_mask):
            if mask is not None:
                scores = _masked(scores, mask[:, None, None, :])
        if attention_mask is not None:
            mask = attention_mask[:, None] if attention_mask.dim() == 3 else attention_mask
            scores = _masked(scores, mask.bool())
        if self.causal:
            scores = _masked(scores, _triangle(scores))
        if self.window:
            scores = _masked(scores, _band(scores, self.window))
        scores = F.dropout(scores.softmax(-1), self.dropout, self.training)
        joined = (scores @ v).transpose(1, 2).flatten(2)
        if self.gate_proj is not None:
            joined = joined * self.gate_proj(query).sigmoid()
        output = self.out_proj(joined)
        return (output, scores) if self.return_scores else output


class DotAttention(nn.Module):
    """Attention without projections.

    Args:
        scale: Whether scores are multiplied by a weight.
        settings: The operation's attributes.
    """

    def __init__(self, settings: dict[str, Any], *, scale: bool) -> None:
        super().__init__()
        self.dropout, self.causal = settings["dropout"], settings["causal"]
        self.return_scores = settings["return_scores"]
        self.scale = nn.Parameter(torch.ones(())) if scale else None

    def scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return `(B, T, S)`."""
        scores = query @ key.transpose(-1, -2)
        return scores if self.scale is None else scores * self.scale

    def forward(
        self,
        query: torch.Tensor,
        value: torch.Tensor,
        key: torch.Tensor | None = None,
        *,
        query_mask: torch.Tensor | None = None,
        value_mask: torch.Tensor | None = None,
    ) -> Any:
        """Return `(B, T, dim)`, and the scores `(B, T, S)` if they are asked for."""
        scores = self.scores(query, value if key is None else key)
        mask = None if value_mask is None else value_mask[:, None, :]
        if self.causal:
            mask = _triangle(scores) if mask is None else mask & _triangle(scores)
        if mask is not None:
            scores = torch.where(mask, scores, scores - (65504.0 if scores.dtype == torch.float16 else 1.0e9))
        scores = F.dropout(scores.softmax(-1), self.dropout, self.training)
        output = scores @ value
        if query_mask is not None:
            output = torch.where(query_mask[..., None], output, torch.zeros_like(output))
        return (output, scores) if self.return_scores else output


class AdditiveAttention(DotAttention):
    """Attention whose scores are sums of tanh.

    Args:
        settings: The operation's attributes.
        scale: Shape of the weight within tanh; `None` for none.
        weight: Whether the sum is multiplied by a weight.
    """

    def __init__(self, settings: dict[str, Any], *, scale: Sequence[int] | None, weight: bool) -> None:
        super().__init__(settings, scale=False)
        self.scale = None if scale is None else nn.Parameter(torch.ones(tuple(scale)))
        self.weight = nn.Parameter(torch.ones(())) if weight else None

    def scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return `(B, T, S)`."""
        total = query[:, :, None] + key[:, None]
        weight = self.weight
        if self.scale is not None and weight is None:  # Keras scales outside of tanh here
            return (self.scale * total.tanh()).sum(-1)
        scores = (total if self.scale is None else self.scale * total).tanh().sum(-1)
        return scores if weight is None else weight * scores


def _projection(shapes: Mapping[str, Sequence[int]], name: str) -> nn.Linear:
    inner, heads, width = shapes[f"{name}_kernel"]
    return nn.Linear(inner, heads * width, bias=f"{name}_bias" in shapes)


def _split(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)


def _masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scores with a large negative number where the mask is false, so that a row without any attends equally to all."""
    return torch.where(mask, scores, scores.new_full((), -0.7 * torch.finfo(scores.dtype).max))


def _band(scores: torch.Tensor, window: int) -> torch.Tensor:
    rows, columns = (torch.arange(length, device=scores.device) for length in scores.shape[-2:])
    return (rows[:, None] - columns).abs() < window


def _triangle(scores: torch.Tensor) -> torch.Tensor:
    rows, columns = scores.shape[-2:]
    return torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril()
