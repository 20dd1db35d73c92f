"""Where tensors lie: the library's device names, and torch's."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any, SupportsIndex

import torch

from isobatch.devices import Device, DeviceRequest, resolve_devices

__all__ = ["KIND", "current", "memory", "one_device", "same_memory", "send", "torch_text", "visible"]


def visible() -> tuple[Device, ...]:
    """Return the devices that torch sees, accelerators first.

    Returns:
        Accelerators in torch's order, then `cpu:0`.

    >>> visible()[-1]
    Device(kind='cpu', index=0)
    """
    if KIND is None:
        return (Device("cpu"),)
    count = torch.get_device_module(KIND).device_count()
    return (*(Device(_name(KIND) or KIND, index) for index in range(count)), Device("cpu"))


def one_device(request: DeviceRequest) -> Device:
    """Return the one device that a request means; a number is a device's, not how many.

    Args:
        request: A device in any usual spelling, or an accelerator's number (a CPU device's where there is none).

    Raises:
        DeviceError: It is absent or cannot be understood.

    >>> one_device("cpu")
    Device(kind='cpu', index=0)
    """
    return resolve_devices([request] if isinstance(request, SupportsIndex) else request, visible())[0]


def _kind() -> str | None:
    # Asks how torch was built, not the driver: a driver that has been asked does not survive a fork.
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


KIND = _kind()
"""Torch's name for the kind of accelerator that this build of it can use, `None` for a build without."""


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


def torch_text(device: Device) -> str:
    """Return torch's spelling of a device.

    >>> torch_text(Device("gpu", 1)), torch_text(Device("cpu", 1))
    ('cuda:1', 'cpu')
    """
    return str(memory(device))


def current(device: Device) -> AbstractContextManager[None]:
    """Return a context that makes a device the current one, on the stream that is current there now.

    The default device moves along, if it is one of the same kind.

    Args:
        device: Where a replica is going to run, perhaps in another thread.

    >>> with current(Device("cpu", 1)):
    ...     pass
    """
    if device.kind == "cpu" or device.kind != _name(KIND):
        return contextlib.nullcontext()
    return _entered(memory(device), torch.accelerator.current_stream(memory(device)))


@contextlib.contextmanager
def _entered(place: torch.device, stream: Any) -> Generator[None]:
    module: Any = torch.get_device_module(place)
    with contextlib.ExitStack() as stack:
        stack.enter_context(module.device(place))
        stack.enter_context(module.stream(stream))
        if torch.get_default_device().type == place.type:
            stack.enter_context(place)
        yield


def send(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """Return a tensor on another device; from the CPU to an accelerator on a stream beside the current one.

    Args:
        tensor: Where it is now.
        place: Where it is wanted.
    """
    if tensor.device.type != "cpu" or place.type != KIND:
        return tensor.to(place)
    current_stream = torch.accelerator.current_stream(place)
    side = _side_streams.setdefault(place, torch.Stream(place))
    module: Any = torch.get_device_module(place)
    with module.device(place), module.stream(side):
        moved = tensor.to(place, non_blocking=True)
    current_stream.wait_stream(side)
    moved.record_stream(current_stream)
    return moved


def _name(kind: str | None) -> str | None:
    return "gpu" if kind == "cuda" else kind


_side_streams: dict[torch.device, Any] = {}
_CPU = torch.device("cpu")
