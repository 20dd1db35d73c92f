"""`keras.utils.multi_gpu_model` under its own name and signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import keras

from isobatch.backend import Options
from isobatch.devices import Device
from isobatch.errors import DeviceError
from isobatch_keras.devices import resolve, visible_devices
from isobatch_keras.parallel import parallelize

__all__ = ["multi_gpu_model"]


def multi_gpu_model(
    model: keras.Model,
    gpus: int | Sequence[int] | None = None,
    cpu_merge: bool = True,  # noqa: FBT001, FBT002 - the old signature
    cpu_relocation: bool = False,  # noqa: FBT001, FBT002
) -> keras.Model:
    """Replicate a model on several GPUs of one machine, as `keras.utils.multi_gpu_model` did until 2020.

    Each batch is sliced, every GPU runs the model on its slice, and the outputs are concatenated on the CPU. The weights stay
    the model's own: training the result trains the model, and saving either writes the same file.

    Args:
        model: A built model.
        gpus: How many GPUs, 2 or more; or a list of their numbers; or `None` for all there are.
        cpu_merge: Whether to concatenate the outputs on the CPU rather than on the first GPU.
        cpu_relocation: Whether to move the model's weights to the CPU first; with their values, unlike the original.

    Returns:
        A `keras.Model`, not compiled.

    Raises:
        DeviceError: A `ValueError`: fewer than two GPUs, the same one twice, or one that is not there.
        TypeError: `gpus` is neither a number nor a list of numbers.
        ModelError: A `ValueError`: the model cannot be made parallel.

    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    >>> multi_gpu_model(model, gpus=1)
    Traceback (most recent call last):
    isobatch.errors.DeviceError: Expected gpus to be 2 or more, or a list of 2 or more, got 1. Use the model as it is.
    """
    wanted = _wanted(gpus)
    devices = resolve(wanted)
    if cpu_relocation:
        relocate(model)
    return parallelize(model, devices, Options(), Device("cpu", 0) if cpu_merge else devices[0])


def relocate(model: keras.Model) -> None:
    """Move a model's variables to the CPU; their values stay, and they stay the model's own.

    Args:
        model: A built model.
    """
    with keras.device("cpu:0"):
        for variable in model.variables:
            value = variable.numpy()
            variable._initialize(value)  # noqa: SLF001 - Keras has no public way to move a variable


def _wanted(gpus: Any) -> list[Device]:
    found = [device for device in visible_devices() if device.kind != "cpu"]
    if gpus is None:
        numbers = list(range(len(found)))
    elif isinstance(gpus, SupportsIndex) and not isinstance(gpus, bool):
        numbers = list(range(gpus.__index__()))
    elif isinstance(gpus, list | tuple) and all(
        isinstance(n, SupportsIndex) and not isinstance(n, bool) for n in gpus
    ):
        numbers = [n.__index__() for n in gpus]
    else:
        msg = f"Expected gpus to be a number, a list of numbers or None, got {gpus!r}."
        raise TypeError(msg)
    shown = f"None, which here means {len(found)}" if gpus is None else repr(gpus)
    if len(numbers) < 2:
        msg = f"Expected gpus to be 2 or more, or a list of 2 or more, got {shown}. Use the model as it is."
        raise DeviceError(msg)
    if len(set(numbers)) < len(numbers):
        msg = f"Expected each GPU once, got gpus={gpus!r}."
        raise DeviceError(msg)
    kind = found[0].kind if found else "gpu"
    return [Device(kind, number) for number in numbers]
