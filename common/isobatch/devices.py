"""Names of devices, and which of them a request means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeAlias

from isobatch.errors import DeviceError

__all__ = ["Device", "DeviceRequest", "resolve_devices"]

_ALIASES = {"cuda": "gpu", "hip": "gpu", "rocm": "gpu"}
_SPELLING = re.compile(
    r"(?:/job:\w+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:|physical_device:)?([a-z_]+)(?::(\d+))?"
)


@dataclass(frozen=True, order=True, slots=True)
class Device:
    """A place where a replica runs, written `cpu:0` or `gpu:1`.

    Args:
        kind: `"cpu"`, `"gpu"` (also for CUDA and ROCm), or another accelerator's own word, in lower case.
        index: Counted from 0 among the visible devices of that kind.

    >>> Device.parse("/device:GPU:1"), str(Device.parse("cuda:1"))
    (Device(kind='gpu', index=1), 'gpu:1')
    """

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"

    @classmethod
    def parse(cls, spelling: object) -> Device:
        """Return the device that any usual spelling means.

        Args:
            spelling: A `Device`; a string such as `"gpu:1"`, `"cuda"`, `"/cpu:0"`, `"/device:GPU:1"` or TensorFlow's long form;
                a `torch.device`; or a TensorFlow device object (anything whose `name` is such a string).

        Returns:
            The device; the index is 0 where the spelling has none.

        Raises:
            DeviceError: The spelling is none of those.

        >>> Device.parse("/job:localhost/replica:0/task:0/device:CPU:3")
        Device(kind='cpu', index=3)
        """
        if isinstance(spelling, Device):
            return spelling
        text = spelling
        if not isinstance(
            spelling, str
        ):  # a torch.device has `type` and `index`, TensorFlow's objects have a `name`
            text = (
                str(spelling)
                if hasattr(spelling, "index") and hasattr(spelling, "type")
                else getattr(spelling, "name", "")
            )
        match = _SPELLING.fullmatch(str(text).strip().lower())
        if match is None:
            msg = f"Expected a device such as 'cpu:0', 'gpu:1', 'cuda' or '/device:GPU:0', got {spelling!r}."
            raise DeviceError(msg)
        kind, index = match.groups()
        return cls(_ALIASES.get(kind, kind), int(index or 0))


DeviceRequest: TypeAlias = SupportsIndex | str | Device | Sequence[Any] | None
"""`None`: every accelerator; a number; one device; or a sequence of devices and accelerator numbers."""


def resolve_devices(request: DeviceRequest, visible: Sequence[Device]) -> tuple[Device, ...]:
    """Return the devices, one for each replica, that a request means on this machine.

    CPU devices are logical and always exist; the same device may be named twice.

    Args:
        request: `None`: every visible accelerator, or one CPU where there is none. A number `n`: the first `n` accelerators,
            or `n` CPU devices where there is none. A sequence: each entry a spelling that `Device.parse` knows, or the number
            of an accelerator (of a CPU device where there is none).
        visible: What the framework sees, accelerators and CPUs.

    Returns:
        At least one device, in rank order.

    Raises:
        DeviceError: The request is of a wrong type, asks for no device, or names one that is not visible.

    >>> cpu, gpus = Device("cpu"), [Device("gpu", 0), Device("gpu", 1)]
    >>> [str(device) for device in resolve_devices(None, [cpu, *gpus])]
    ['gpu:0', 'gpu:1']
    >>> [str(device) for device in resolve_devices(3, [cpu])]
    ['cpu:0', 'cpu:1', 'cpu:2']
    """
    accelerators = [device for device in visible if device.kind != "cpu"]
    if request is None:
        return tuple(accelerators) or (Device("cpu", 0),)
    if isinstance(request, SupportsIndex) and not isinstance(request, bool):
        if request.__index__() < 1:
            msg = f"Expected 1 or more devices, got devices={request!r}."
            raise DeviceError(msg)
        entries: Sequence[Any] = range(request.__index__())
    elif isinstance(request, Sequence) and not isinstance(request, str):
        entries = request
    else:
        entries = [request]
    if not entries:
        msg = f"Expected at least one device, got devices={request!r}; devices=None means every accelerator."
        raise DeviceError(msg)
    devices = tuple(_entry(entry, accelerators) for entry in entries)
    absent = [str(device) for device in devices if device.kind != "cpu" and device not in accelerators]
    if absent:
        found = ", ".join(map(str, visible)) or "none"
        asked = request if isinstance(request, SupportsIndex) else list(map(str, entries))
        msg = (
            f"Expected devices that this process sees, got devices={asked!r}: {', '.join(absent)} absent. Found: {found}. "
            "Ask for fewer, for CPU replicas by name (devices=['cpu:0', 'cpu:1']), or check the driver and which devices are hidden."
        )
        raise DeviceError(msg)
    return devices


def _entry(entry: object, accelerators: Sequence[Device]) -> Device:
    if isinstance(entry, bool):
        msg = f"Expected a device or its number, got {entry!r}."
        raise DeviceError(msg)
    if isinstance(entry, SupportsIndex):
        if entry.__index__() < 0:
            msg = f"Expected device numbers of 0 or more, got {entry!r}."
            raise DeviceError(msg)
        return Device(accelerators[0].kind if accelerators else "cpu", entry.__index__())
    return Device.parse(entry)
