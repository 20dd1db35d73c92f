"""Where tensors lie: the library's device names, and torch's."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from isobatch.devices import Device

__all__ = ["current", "memory", "same_memory", "visible"]


def visible() -> tuple[Device, ...]:
    """Return the devices that torch sees, accelerators first.

    Returns:
        Accelerators in torch's order, then `cpu:0`.

    >>> visible()[-1]
    Device(kind='cpu', index=0)
    """
    kind = accelerator()
    count = 0 if kind is None else torch.get_device_module(kind).device_count()
    return (*(Device("gpu" if kind == "cuda" else str(kind), index) for index in range(count)), Device("cpu"))


def accelerator() -> str | None:
    """Return torch's name for the kind of accelerator this process can use, `None` where there is none."""
    for kind in ("cuda", "mps", "xpu", "mtia", torch._C._get_privateuse1_backend_name()):  # noqa: SLF001
        module = getattr(torch, kind, None)
        if module is not None and hasattr(module, "device_count") and module.is_available():
            return kind
    return None


def memory(device: Device) -> torch.device:
    """Return the torch device whose memory a replica uses; all CPU devices share one.

    Args:
        device: Where the replica runs.

    >>> memory(Device("cpu", 3)), memory(Device("gpu", 1))
    (device(type='cpu'), device(type='cuda', index=1))
    """
    if device.kind == "cpu":
        return _CPU
    return torch.device("cuda" if device.kind == "gpu" else device.kind, device.index)


def same_memory(tensor: torch.Tensor, target: torch.device) -> bool:
    """Say whether a tensor lies in a device's memory."""
    here = tensor.device
    return here == target or (here.type == target.type == "cpu")


def current(device: Device) -> AbstractContextManager[Any]:
    """Make a device the current one of this thread, and the default one if another of its kind was.

    Args:
        device: Where the replica runs.

    >>> with current(Device("cpu", 1)):
    ...     pass
    """
    if device.kind == "cpu":
        return contextlib.nullcontext()
    target = memory(device)
    stack = contextlib.ExitStack()
    stack.enter_context(torch.get_device_module(target).device(target))
    if torch.get_default_device().type == target.type:
        stack.enter_context(target)
    return stack


_CPU = torch.device("cpu")
