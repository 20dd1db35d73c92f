"""The front door: one call for models of either framework."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any, TypeVar

from isobatch.backend import Axis, Options, Scalars, StatePolicy
from isobatch.devices import DeviceRequest
from isobatch.errors import ModelError
from isobatch.registry import backend_of, get_backend
from isobatch.rows import Policy

__all__ = ["data_parallel", "load", "virtual_devices"]

M = TypeVar("M")


def data_parallel(
    model: M,
    devices: DeviceRequest = None,
    *,
    policy: Policy = "balanced",
    min_rows: int = 1,
    axis: Axis = 0,
    output_axis: Axis = 0,
    broadcast: tuple[str, ...] = (),
    scalars: Scalars = "mean",
    state: StatePolicy = "merge",
    output_device: DeviceRequest = None,
) -> M:
    """Return a model of the same kind that splits each batch, runs one replica per device and joins the results.

    The weights stay the model's own. On the same rows the result equals the model's.

    Args:
        model: A built `keras.Model`, or a `torch.nn.Module`.
        devices: `None`: every visible accelerator, or one CPU replica where there is none. A number, or a sequence of devices
            in any usual spelling; on a machine without accelerators `4` means four CPU replicas.
        policy: Who gets which rows; see `split_sizes`.
        min_rows: Use fewer replicas rather than give one fewer rows than this.
        axis: The batch axis of inputs, for all or by argument: `{"hidden": 1}`.
        output_axis: The batch axis of outputs, for all or by position or key.
        broadcast: Names of arguments, or keys of a mapping of inputs, that every replica gets whole.
        scalars: How 0-d float outputs become one: `"mean"` (weighted by rows), `"sum"` or `"stack"`.
        state: What becomes of running state: `"merge"`, `"first"` or `"sequential"`; see `Options`.
        output_device: Where outputs lie; by default the CPU for Keras and the first device for torch.

    Returns:
        A `keras.Model`, or a `torch.nn.DataParallel`; its `devices` say where the replicas are.

    Raises:
        ModelError: The model belongs to neither framework, or cannot be made parallel.
        DeviceError: A device is absent or cannot be understood.
        ValueError: An option is not one of the words above.

    >>> import keras
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    >>> parallel = data_parallel(model, devices=["cpu:0", "cpu:0"])
    >>> parallel(keras.ops.ones((5, 3))).shape
    TensorShape([5, 2])
    """
    options = Options(policy, min_rows, axis, output_axis, broadcast, scalars, state)
    result: M = backend_of(model).data_parallel(model, devices, options, output_device)
    return result


def load(path: str | PathLike[str], devices: DeviceRequest = None, **options: Any) -> Any:
    """Return the model in a file, parallel on the devices there are now.

    Args:
        path: A `.keras` or `.h5` file (opened by Keras), or a `.pt` or `.pth` file (a pickled module, opened by torch).
        devices: As in `data_parallel`.
        options: As in `data_parallel`.

    Returns:
        As `data_parallel` would for the model in the file.

    Raises:
        FileNotFoundError: There is no such file.
        ModelError: The name does not end as one of those, or the file holds no model.
    """
    suffix = fspath(path).rpartition(".")[2].lower()
    name = {"keras": "keras", "h5": "keras", "hdf5": "keras", "pt": "torch", "pth": "torch"}.get(suffix)
    if name is None:
        msg = f"Expected a file that ends in .keras, .h5, .pt or .pth, got {fspath(path)!r}."
        raise ModelError(msg)
    output_device = options.pop("output_device", None)
    return get_backend(name).load(path, devices, Options(**options), output_device)


def virtual_devices(count: int) -> None:
    """Make this many logical CPU devices, so that Keras replicas on the CPU run on devices of their own.

    TensorFlow allows it only before it has started; torch needs none of it. Call it before any Keras weight is built, or set
    `ISOBATCH_VIRTUAL_GPUS` before `isobatch_keras` is imported to have them stand in for GPUs.

    Args:
        count: How many, 1 or more.

    Raises:
        BackendError: Keras is not installed.
        DeviceError: TensorFlow has started with another number of devices.
    """
    import importlib

    get_backend("keras")
    importlib.import_module("isobatch_keras").virtual_devices(count)
