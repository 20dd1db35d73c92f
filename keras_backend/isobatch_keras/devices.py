"""The devices Keras's own backend offers, and running something on one of them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

from isobatch.devices import Device, DeviceRequest, resolve_devices
from isobatch.errors import DeviceError, DeviceWarning

__all__ = [
    "ON_TENSORFLOW",
    "VARIABLE",
    "placed",
    "resolve",
    "scope",
    "stand_in",
    "virtual_devices",
    "visible_devices",
]

ON_TENSORFLOW: bool = keras.config.backend() == "tensorflow"
VARIABLE = "ISOBATCH_VIRTUAL_GPUS"

_stand_ins = 0


def visible_devices() -> tuple[Device, ...]:
    """Return the devices this process sees, accelerators first; starts nothing and takes no memory on them.

    >>> visible_devices()[-1].kind
    'cpu'
    """
    counts = _counts()
    accelerators = [Device(kind, i) for kind, count in counts.items() if kind != "cpu" for i in range(count)]
    stand_ins = [Device("gpu", i) for i in range(_stand_ins)]
    return (*(accelerators or stand_ins), *(Device("cpu", i) for i in range(counts["cpu"])))


def virtual_devices(count: int) -> None:
    """Make this many logical CPU devices, so that replicas on the CPU run on devices of their own.

    Call it before any Keras weight is built: that starts TensorFlow. On Keras's other backends there is nothing to do.

    Args:
        count: How many, 1 or more.

    Raises:
        DeviceError: TensorFlow has started with another number of them, or the number is below 1.
    """
    if isinstance(count, bool) or count < 1:
        msg = f"Expected 1 or more virtual devices, got {count!r}."
        raise DeviceError(msg)
    if not ON_TENSORFLOW or _counts()["cpu"] == count:
        return
    from isobatch_keras._tensorflow import make_logical_cpus

    try:
        make_logical_cpus(count)
    except RuntimeError as error:
        msg = (
            f"Expected TensorFlow not to have started when {count} virtual devices are made, it runs with {_counts()['cpu']}. "
            "The first weight that is built starts it: call isobatch.virtual_devices before, at the top of the program."
        )
        raise DeviceError(msg) from error


def stand_in() -> None:
    """Let CPU devices stand in for the GPUs this machine lacks, as many as the variable `ISOBATCH_VIRTUAL_GPUS` says.

    Raises:
        DeviceError: The variable holds no number, or it is too late to make them.
    """
    global _stand_ins  # noqa: PLW0603 - set once, when the package is imported
    text = os.environ.get(VARIABLE, "").strip()
    if not text or text == "0":
        return
    if not text.isdecimal():
        msg = f"Expected {VARIABLE} to be a number, got {text!r}."
        raise DeviceError(msg)
    virtual_devices(int(text))
    _stand_ins = int(text)


def resolve(request: DeviceRequest) -> tuple[Device, ...]:
    """Return the devices that a request means, as they are: shared where there are too few logical CPUs.

    Args:
        request: As in `isobatch.data_parallel`.

    Raises:
        DeviceError: As `isobatch.devices.resolve_devices` does.
    """
    visible = visible_devices()
    devices = resolve_devices(request, visible)
    if _stand_ins:
        devices = tuple(Device("cpu", d.index) if d.kind == "gpu" else d for d in devices)
    if not ON_TENSORFLOW:
        return devices
    cpus = sum(device.kind == "cpu" for device in visible)
    real = tuple(Device("cpu", d.index % cpus) if d.kind == "cpu" else d for d in devices)
    if real != devices:
        msg = (
            f"{', '.join(map(str, dict.fromkeys(devices)))} share {', '.join(map(str, dict.fromkeys(real)))}, because this process has no more logical CPU "
            "devices; the results are the same. Call isobatch.virtual_devices(n) before the first weight is built to have n."
        )
        warnings.warn(msg, DeviceWarning, stacklevel=4)
    return real


def scope(device: Device) -> AbstractContextManager[Any]:
    """Return a scope in which operations run on a device."""
    # Keras's torch backend runs where the template's weights are; its logical CPU devices are one.
    return keras.device(str(device)) if ON_TENSORFLOW else nullcontext()


def placed(
    function: Callable[..., Sequence[Any]], arrays: Sequence[Any], device: Device, name: str, live: Any
) -> Sequence[Any]:
    """Run a function of arrays on a device, with its gradient; see `isobatch_keras._tensorflow.placed`."""
    if not ON_TENSORFLOW:
        return function(*arrays)
    from isobatch_keras import _tensorflow

    return _tensorflow.placed(function, arrays, str(device), name, live)


def _counts() -> dict[str, int]:
    if not ON_TENSORFLOW:
        return {"cpu": 1}
    from isobatch_keras._tensorflow import logical_counts

    return logical_counts()
