"""The verbs as functions, with the signatures of `torch.nn.parallel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from isobatch.backend import Options, Replica, Result, Shard
from isobatch.devices import Device, DeviceRequest, resolve_devices
from isobatch.trees import flatten
from isobatch_torch.accelerators import one_device, visible
from isobatch_torch.arrays import shape
from isobatch_torch.backend import BACKEND
from isobatch_torch.data_parallel import DataParallel
from isobatch_torch.internals import parameters_of

__all__ = ["data_parallel", "gather", "parallel_apply", "replicate", "scatter", "scatter_kwargs"]


def scatter(inputs: Any, target_gpus: DeviceRequest, dim: int = 0) -> list[Any]:
    """Split a value, container or tensor, by rows.

    Args:
        inputs: What is split.
        target_gpus: Devices in any usual spelling; numbers mean accelerators, CPU devices where there are none.
        dim: The batch axis.

    Returns:
        One value for each device that gets rows.

    >>> import torch
    >>> scatter(torch.arange(5), [0, 1])
    [tensor([0, 1, 2]), tensor([3, 4])]
    """
    return [args[0] for args in scatter_kwargs((inputs,), None, target_gpus, dim)[0]]


def scatter_kwargs(
    inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None, target_gpus: DeviceRequest, dim: int = 0
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Split the arguments of a call by rows.

    Args:
        inputs: Positional arguments.
        kwargs: Keyword arguments.
        target_gpus: As in `scatter`.
        dim: The batch axis.

    Returns:
        Positional and keyword arguments for each device that gets rows: always as many of one as of the other.

    >>> import torch
    >>> scatter_kwargs((torch.ones(2),), {"scale": 3.0}, 2)[1]
    [{'scale': 3.0}, {'scale': 3.0}]
    """
    devices = resolve_devices(target_gpus, visible())
    shards = BACKEND.scatter(tuple(inputs), devices, kwargs=kwargs or {}, options=Options(axis=dim))
    return [shard.args for shard in shards], [shard.kwargs for shard in shards]


def replicate(network: nn.Module, devices: DeviceRequest, detach: bool = False) -> list[nn.Module]:  # noqa: FBT001, FBT002
    """Return a module as run on each device.

    Args:
        network: The module.
        devices: As in `scatter`.
        detach: Give the replicas parameters that do not take part in autograd.

    Returns:
        Modules that share the weights of `network`.

    >>> layer = nn.Linear(2, 1)
    >>> [replica.weight is layer.weight for replica in replicate(layer, 2)]
    [True, True]
    """
    modules = [replica.module for replica in BACKEND.replicate(network, resolve_devices(devices, visible()))]
    for part in (part for module in modules if detach for part in module.modules()):
        for name, parameter in parameters_of(part).items():
            if parameter is not None:
                parameters_of(part)[name] = nn.Parameter(parameter.detach(), requires_grad=False)
    return modules


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any]] | None = None,
    devices: DeviceRequest = None,
) -> list[Any]:
    """Call each module with its own arguments, each on its own device.

    Args:
        modules: Any modules; they need not be replicas of one.
        inputs: For each a tuple of positional arguments, or the only one.
        kwargs_tup: For each its keyword arguments.
        devices: As in `scatter`; by default one CPU device each, or the first accelerators.

    Returns:
        What the modules returned.

    Raises:
        ValueError: The numbers of modules, inputs, keyword arguments and devices differ.

    >>> import torch
    >>> parallel_apply([nn.Identity(), nn.Flatten()], [torch.ones(1), (torch.ones(1, 2, 2),)])
    [tensor([1.]), tensor([[1., 1., 1., 1.]])]
    """
    places = resolve_devices(len(modules) if devices is None else devices, visible())
    kwargs = [{} for _ in modules] if kwargs_tup is None else kwargs_tup
    if not len(modules) == len(inputs) == len(kwargs) == len(places):
        counts = f"{len(modules)} modules, {len(inputs)} inputs, {len(kwargs)} keyword arguments and {len(places)} devices"
        msg = f"Expected as many inputs, keyword arguments and devices as modules, got {counts}."
        raise ValueError(msg)
    replicas = [
        Replica(rank, device, module)
        for rank, (device, module) in enumerate(zip(places, modules, strict=True))
    ]
    shards = [
        Shard(
            rank,
            places[rank],
            None,
            0,
            tuple(args) if isinstance(args, tuple | list) else (args,),
            dict(kwargs[rank]),
        )
        for rank, args in enumerate(inputs)
    ]
    return [result.output for result in BACKEND.parallel_apply(replicas, shards)]


def gather(outputs: Sequence[Any], target_device: DeviceRequest, dim: int = 0) -> Any:
    """Join values by rows.

    Args:
        outputs: One for each replica.
        target_device: Where the result lies.
        dim: The batch axis.

    Returns:
        One value of the same structure; 0-d tensors become a vector, as rows are not known here.

    >>> import torch
    >>> gather([torch.ones(2), torch.zeros(1)], "cpu")
    tensor([1., 1., 0.])
    """
    device = one_device(target_device)
    results = [Result(_shard_of(output, rank, device, dim), output) for rank, output in enumerate(outputs)]
    return BACKEND.gather(results, device, options=Options(output_axis=dim, scalars="stack"))


def _shard_of(output: Any, rank: int, device: Device, dim: int) -> Shard:
    """Return a shard with as many rows as the first array of an output has."""
    shapes = map(shape, flatten(output, lambda value: shape(value) is not None)[0])
    rows = next((size[dim] for size in shapes if size and -len(size) <= dim < len(size)), 1)
    return Shard(rank, device, range(rows), 0, (), {})


def data_parallel(  # noqa: PLR0917 - torch's signature
    module: nn.Module,
    inputs: Any,
    device_ids: DeviceRequest = None,
    output_device: DeviceRequest = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Call a module once in parallel; for more than one call make a `DataParallel`, which keeps what it has learned.

    Args:
        module: The module.
        inputs: A tuple of positional arguments, the only one, or `None` for none.
        device_ids: As for `DataParallel`.
        output_device: As for `DataParallel`.
        dim: The batch axis.
        module_kwargs: Keyword arguments.

    Returns:
        What the module would return.

    >>> import torch
    >>> data_parallel(nn.Flatten(), torch.ones(3, 2, 2), [0, 1]).shape
    torch.Size([3, 4])
    """
    args = () if inputs is None else inputs if isinstance(inputs, tuple) else (inputs,)
    return DataParallel(module, device_ids, output_device, dim)(*args, **(module_kwargs or {}))
