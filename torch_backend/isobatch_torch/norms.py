"""Running statistics of normalisation layers, pooled over the rows of all replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from isobatch_torch.internals import BatchNorm, RunningNorm, buffers_of, move_towards

__all__ = ["Across", "Statistics", "across", "merge_statistics", "recorded", "watch"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What one call of a normalisation layer saw.

    Args:
        count: Values a channel's statistics were taken from: rows times positions, for instance normalisation rows alone.
        mean: Mean of each channel.
        var: Variance of each channel, unbiased unless the layer's `correction` is 0.
    """

    count: int
    mean: torch.Tensor
    var: torch.Tensor


recorded: ContextVar[dict[nn.Module, list[Statistics]] | None] = ContextVar(
    "isobatch_torch_recorded", default=None
)
"""Where the layers of the replica now running write their statistics; `None`: they keep them themselves."""


@dataclass(frozen=True, slots=True)
class Across:
    """How statistics become those of all processes, and of which layers they did.

    Args:
        add_up: Returns the sum of all processes' tensors.
        layers: Those whose statistics were pooled.
    """

    add_up: Callable[[torch.Tensor], torch.Tensor]
    layers: list[nn.Module] = field(default_factory=list)


across: ContextVar[Across | None] = ContextVar("isobatch_torch_across", default=None)
"""Set around a call that other processes make too, on rows of their own."""

_STATE = ("running_mean", "running_var", "num_batches_tracked")


def watch(copy: Any) -> None:
    """Make a replica's layer record its statistics, if it is one that has any.

    The layer computes them itself: for the length of a call it is given empty state and a momentum of one. A class with a forward
    of its own may not go by its momentum, so its buffers are averaged like any others, unless it says by a `correction` that it does.

    Args:
        copy: A module of a replica.
    """
    if not isinstance(copy, RunningNorm) or not copy.track_running_stats:
        return
    if type(copy).forward.__module__.startswith("torch.nn.") or hasattr(copy, "correction"):
        copy.register_forward_pre_hook(_before)
        # Before those that the user added.
        copy.register_forward_hook(_after, prepend=True, always_call=True)


def _before(layer: Any, _: Any) -> None:
    buffers = buffers_of(layer)
    if recorded.get() is None or not layer.training or buffers["running_mean"] is None:
        return
    layer.__dict__["_isobatch_kept"] = ({name: buffers[name] for name in _STATE}, layer.momentum)
    buffers.update(
        {name: buffer if (buffer := buffers[name]) is None else torch.zeros_like(buffer) for name in _STATE}
    )
    layer.momentum = 1.0


def _after(layer: Any, _: Any, output: Any) -> None:
    kept = layer.__dict__.pop("_isobatch_kept", None)
    if kept is None:
        return
    mean, var = (buffers_of(layer)[name] for name in _STATE[:2])
    buffers_of(layer).update(kept[0])
    layer.momentum = kept[1]
    calls = recorded.get()
    if calls is None or not isinstance(output, torch.Tensor) or mean is None or var is None:
        return  # the call failed
    if isinstance(layer, BatchNorm):
        count = output.numel() // len(mean)
    elif output.dim() == layer._get_no_batch_dim():  # noqa: SLF001
        count = 1
    else:  # the layer's statistics are the mean over its instances of each one's
        count = len(output)
    calls.setdefault(layer, []).append(Statistics(count, mean, var))


def merge_statistics(calls: Sequence[tuple[nn.Module, Sequence[Statistics]]]) -> None:
    """Update layers as one call each with the rows of all replicas would.

    Args:
        calls: Layers, and what each replica's call of it saw.
    """
    groups: dict[Any, list[tuple[Any, Sequence[Statistics]]]] = {}
    for layer, parts in calls:
        mean = parts[0].mean
        kind = (_correction(layer), _factor(layer), mean.dtype, mean.device, len(parts))
        groups.setdefault(kind, []).append((layer, parts))
    for (correction, factor, *_), group in groups.items():
        others = across.get()
        add_up = _unchanged if others is None else others.add_up
        mean, var = _pool([parts for _, parts in group], correction, add_up)
        if others is not None:
            others.layers.extend(layer for layer, _ in group)
        _update([layer.running_mean for layer, _ in group], mean, factor)
        _update([layer.running_var for layer, _ in group], var, factor)
        for layer, _ in group:
            if correction is not None and layer.num_batches_tracked is not None:
                layer.num_batches_tracked.add_(1)


def _correction(layer: Any) -> int | None:
    """Return what the layer takes off a count before it divides by it: 0 for a biased variance; `None` for one per instance."""
    return int(getattr(layer, "correction", 1)) if isinstance(layer, BatchNorm) else None


def _factor(layer: Any) -> float:
    """Return how much of the new statistics the next update takes."""
    if layer.momentum is not None:
        return float(layer.momentum)
    if not isinstance(layer, BatchNorm):
        return 0.0  # instance normalisation keeps no cumulative average
    return 1.0 / (int(buffers_of(layer)["num_batches_tracked"] or 0) + 1)


def _update(running: list[torch.Tensor], values: torch.Tensor, factor: float) -> None:
    """Move running statistics towards new ones, which stand in a row."""
    parts = torch.split(values, [len(state) for state in running])
    move_towards(running, [part.to(running[0]) for part in parts], factor)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _pool(
    layers: Sequence[Sequence[Statistics]],
    correction: int | None,
    add_up: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance over all replicas, for all channels of all layers in a row; computed in float64."""
    device = layers[0][0].mean.device
    channels = torch.tensor([len(parts[0].mean) for parts in layers], device=device)
    counts = torch.tensor(
        [[part.count for part in parts] for parts in layers], dtype=torch.float64, device=device
    )
    count = counts.repeat_interleave(channels, 0)
    by_rank = list(zip(*layers, strict=True))
    means = torch.stack(
        [torch.cat([part.mean.to(device) for part in parts]) for parts in by_rank], 1
    ).double()
    variances = torch.stack(
        [torch.cat([part.var.to(device) for part in parts]) for parts in by_rank], 1
    ).double()
    total, mean = add_up(torch.stack([count.sum(1), (count * means).sum(1)]))
    mean = mean / total
    if correction is None:
        return mean, add_up((count * variances).sum(1)) / total
    between = (count * (means - mean[:, None]).square()).sum(1)
    squares = add_up(((count - correction) * variances).sum(1) + between)
    return mean, squares / (total - correction).clamp(min=1)
