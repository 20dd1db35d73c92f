"""Running statistics of normalisation layers, pooled over the rows of all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # pyright: ignore[reportPrivateUsage]

__all__ = ["Statistics", "merge_statistics", "recorded", "watch"]


class Statistics(NamedTuple):
    """What one call of a normalisation layer saw.

    Args:
        count: Values a channel's statistics were taken from: rows times positions, for instance normalisation rows alone.
        mean: Mean of each channel.
        var: Variance of each channel, unbiased.
    """

    count: int
    mean: torch.Tensor
    var: torch.Tensor


recorded: ContextVar[dict[nn.Module, list[Statistics]] | None] = ContextVar(
    "isobatch_torch_recorded", default=None
)
"""Where the layers of the replica now running write their statistics; `None`: they keep them themselves."""

_STATE = ("running_mean", "running_var", "num_batches_tracked")


def watch(copy: nn.Module) -> None:
    """Make a replica's layer record its statistics, if it is one that has any.

    The layer computes them itself: for the length of a call it is given empty state and a momentum of one.

    Args:
        copy: A module of a replica.
    """
    if isinstance(copy, _NormBase) and copy.track_running_stats:
        copy.register_forward_pre_hook(_before)
        handle = copy.register_forward_hook(_after, always_call=True)
        copy._forward_hooks.move_to_end(handle.id, last=False)  # noqa: SLF001 - before those that the user added


def _before(layer: nn.Module, _: Any) -> None:
    buffers = layer._buffers  # noqa: SLF001
    if recorded.get() is None or not layer.training or buffers["running_mean"] is None:
        return
    layer.__dict__["_isobatch_kept"] = ({name: buffers[name] for name in _STATE}, layer.momentum)
    buffers.update(
        {name: buffer if (buffer := buffers[name]) is None else torch.zeros_like(buffer) for name in _STATE}
    )
    layer.momentum = 1.0


def _after(layer: nn.Module, _: Any, output: Any) -> None:
    kept = layer.__dict__.pop("_isobatch_kept", None)
    if kept is None:
        return
    mean, var = layer._buffers["running_mean"], layer._buffers["running_var"]  # noqa: SLF001
    layer._buffers.update(kept[0])  # noqa: SLF001
    layer.momentum = kept[1]
    calls = recorded.get()
    if calls is None or not isinstance(output, torch.Tensor) or mean is None or var is None:
        return  # the call failed
    if isinstance(layer, _BatchNorm):
        count = output.numel() // len(mean)
    elif output.dim() == layer._get_no_batch_dim():  # type: ignore[operator] # noqa: SLF001
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
        groups.setdefault(
            (isinstance(layer, _BatchNorm), _factor(layer), mean.dtype, mean.device, len(parts)), []
        ).append((layer, parts))
    for (pooled, factor, *_), group in groups.items():
        layers = [layer for layer, _ in group]
        mean, var = _pool([parts for _, parts in group], pooled=pooled)
        channels = [len(layer.running_mean) for layer in layers]
        for state, new in (
            ([layer.running_mean for layer in layers], mean),
            ([layer.running_var for layer in layers], var),
        ):
            torch._foreach_mul_(state, 1 - factor)
            torch._foreach_add_(
                state,
                [part.to(old.dtype) for part, old in zip(new.split(channels), state, strict=True)],
                alpha=factor,
            )
        for layer in layers:
            if pooled and layer.num_batches_tracked is not None:
                layer.num_batches_tracked.add_(1)


def _factor(layer: Any) -> float:
    """Return how much of the new statistics the next update takes."""
    if layer.momentum is not None:
        return float(layer.momentum)
    return 1.0 / (int(layer.num_batches_tracked) + 1) if isinstance(layer, _BatchNorm) else 0.0


def _pool(layers: Sequence[Sequence[Statistics]], *, pooled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance over all replicas, for all channels of all layers in a row; computed in float64."""
    device = layers[0][0].mean.device
    channels = torch.tensor([len(parts[0].mean) for parts in layers], device=device)
    counts = torch.tensor(
        [[part.count for part in parts] for parts in layers], dtype=torch.float64, device=device
    )
    count = counts.repeat_interleave(channels, 0)
    means, variances = (
        torch.stack(
            [
                torch.cat([parts[rank][field].to(device) for parts in layers])
                for rank in range(len(layers[0]))
            ],
            1,
        ).double()
        for field in (1, 2)
    )
    total = count.sum(1)
    mean = (count * means).sum(1) / total
    if not pooled:
        return mean, (count * variances).sum(1) / total
    between = (count * (means - mean[:, None]).square()).sum(1)
    return mean, (((count - 1) * variances).sum(1) + between) / (total - 1).clamp(min=1)
