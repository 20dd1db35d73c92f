"""The front door: one call for models of either framework."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any, TypeVar, get_args

from isobatch.backend import Axis, Backend, Options, Scalars, StatePolicy
from isobatch.devices import Device, DeviceRequest
from isobatch.errors import DeviceError, ModelError
from isobatch.placement import Balance, Placement, PlacementRequest, spread
from isobatch.registry import backend_of, get_backend
from isobatch.rows import Policy

__all__ = ["data_parallel", "device_parallel", "load", "over_cpus", "virtual_devices"]

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
    placement: PlacementRequest | None = None,
    micro_batches: int = 1,
) -> M:
    """Return a model of the same kind that splits each batch, runs one replica per device and joins the results.

    The weights stay the model's own. On the same rows the result equals the model's.

    With a `placement` each replica has a group of devices, and its parts run on different ones of them, as in `device_parallel`.

    Args:
        model: A built `keras.Model`, or a `torch.nn.Module`.
        devices: `None`: every visible accelerator, or one CPU replica where there is none. A number, or a sequence of devices
            in any usual spelling; on a machine without accelerators `4` means four CPU replicas. With a placement, a sequence of
            sequences: the group of each replica.
        policy: Who gets which rows; see `split_sizes`.
        min_rows: Use fewer replicas rather than give one fewer rows than this.
        axis: The batch axis of inputs, for all or by argument: `{"hidden": 1}`.
        output_axis: The batch axis of outputs, for all or by position or key.
        broadcast: Names of arguments, or keys of a mapping of inputs, that every replica gets whole.
        scalars: How 0-d float outputs become one: `"mean"` (weighted by rows), `"sum"` or `"stack"`.
        state: What becomes of running state: `"merge"`, `"first"` or `"sequential"`; see `Options`.
        output_device: Where outputs lie; by default the CPU for Keras and the first device for torch.
        placement: Parts and their devices, as in `device_parallel`; devices are those of the first group, or their numbers in it.
        micro_batches: In how many shards each group gets its rows, one after another, so that its devices work at the same time: the
            first on the second shard while the second is at the first. Running state is kept as for so many replicas.

    Returns:
        A `keras.Model`, or a `torch.nn.DataParallel`; its `devices` say where the replicas are.

    Raises:
        ModelError: The model belongs to neither framework, or cannot be made parallel.
        DeviceError: A device is absent or cannot be understood.
        ValueError: An option is not one of the words above, or there are micro-batches without a placement.

    >>> import keras
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    >>> parallel = data_parallel(model, devices=["cpu:0", "cpu:0"])
    >>> parallel(keras.ops.ones((5, 3))).shape
    TensorShape([5, 2])
    """
    options = Options(policy, min_rows, axis, output_axis, broadcast, scalars, state)
    backend = backend_of(model)
    placements = None
    if placement is not None:
        groups = _groups(backend, devices, micro_batches)
        placed = _placement(backend, model, placement, groups[0])
        placements = [placed.on(group) for group in groups for _ in range(micro_batches)]
        devices = [one.devices[0] for one in placements]
    elif micro_batches != 1:
        msg = f"Expected micro_batches only with a placement, got {micro_batches!r} and none; more devices are more shards."
        raise ValueError(msg)
    result: M = backend.data_parallel(model, devices, options, output_device, placements)
    return result


def over_cpus(model: M, replicas: int | None) -> M:
    """Return a model over so many replicas, on CPU devices of their own as far as there are enough.

    Args:
        model: As for `data_parallel`.
        replicas: How many; `None` for the model itself.
    """
    if replicas is None:
        return model
    cpus = [device for device in backend_of(model).devices() if device.kind == "cpu"]
    return data_parallel(model, [cpus[rank % len(cpus)] for rank in range(replicas)])


def device_parallel(
    model: M,
    placement: PlacementRequest,
    devices: DeviceRequest = None,
    *,
    balance: Balance = "time",
    example: Any = None,
    output_device: DeviceRequest = None,
) -> M:
    """Return a model of the same kind whose parts run on different devices, forward and backward.

    The weights stay the model's own and move to the devices of their parts. The result equals the model's.

    Args:
        model: A functional or Sequential `keras.Model`, or a `torch.nn.Module`.
        placement: Names, prefixes or patterns of layers or submodules and their devices, such as `{"left.*": "gpu:0"}`; a function
            from name to device or `None`; a `Placement`; or `"auto"`: independent branches on different devices, otherwise
            consecutive stages. A part takes all that is inside of it along. What nothing names runs where its inputs are.
        devices: For `"auto"`: which ones, as in `data_parallel`.
        balance: For `"auto"`: `"time"` of a forward pass, or `"memory"`, bytes of weights and outputs.
        example: For `"auto"`: inputs for a few rows, a tuple if there are several arguments. Keras models with inputs of known shape need none.
        output_device: Where things run whose inputs come from several devices; by default the CPU.

    Returns:
        A model with the template's weights, names and files; its `placement` can be printed, saved and given back.

    Raises:
        ModelError: The model belongs to neither framework or cannot be placed, a key matches nothing, or a part is named twice.
        DeviceError: A device is absent or cannot be understood, or `"auto"` has only one.
        ValueError: `balance` is another word.

    >>> import keras
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="stem"), keras.layers.Dense(2, name="head")])
    >>> placed = device_parallel(model, {"stem": "cpu:0", "head": "cpu:0"})
    >>> placed(keras.ops.ones((5, 3))).shape
    TensorShape([5, 2])
    """
    backend = backend_of(model)
    resolved = backend.resolve(devices) if placement == "auto" else ()
    found = _placement(backend, model, placement, resolved, balance=balance, example=example)
    result: M = backend.device_parallel(model, found, output_device)
    return result


def _placement(
    backend: Backend,
    model: Any,
    request: PlacementRequest,
    devices: Sequence[Device],
    *,
    balance: Balance = "time",
    example: Any = None,
) -> Placement:
    """Return what a request means; numbers in it are positions among the devices."""
    if balance not in get_args(Balance):
        msg = f"Expected balance to be one of {get_args(Balance)}, got {balance!r}."
        raise ValueError(msg)
    if isinstance(request, str):
        if request != "auto":
            msg = (
                f"Expected a mapping from parts to devices, a function or 'auto', got placement={request!r}."
            )
            raise ModelError(msg)
        return spread(backend.survey(model, example, balance), devices)

    def resolve(spellings: Sequence[Any]) -> Sequence[Device]:
        return backend.resolve([_numbered(one, devices) for one in spellings])

    return Placement.of(request, backend.parts(model), resolve)


def _numbered(spelling: Any, devices: Sequence[Device]) -> Any:
    if not devices or not isinstance(spelling, int) or isinstance(spelling, bool):
        return spelling
    if not 0 <= spelling < len(devices):
        msg = f"Expected positions in a group of {len(devices)} devices, 0 to {len(devices) - 1}, got {spelling!r}."
        raise DeviceError(msg)
    return devices[spelling]


def _groups(backend: Backend, request: Any, micro_batches: Any) -> list[tuple[Device, ...]]:
    """Return the devices of each replica."""
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        msg = f"Expected micro_batches to be 1 or more, got {micro_batches!r}."
        raise ValueError(msg)
    if (
        not isinstance(request, (list, tuple))
        or not request
        or not all(isinstance(group, (list, tuple)) for group in request)
    ):
        msg = f"Expected a group of devices for each replica, such as [('gpu:0', 'gpu:1'), ('gpu:2', 'gpu:3')], got devices={request!r}."
        raise DeviceError(msg)
    flat = iter(backend.resolve([device for group in request for device in group]))
    return [tuple(next(flat) for _ in group) for group in request]


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
