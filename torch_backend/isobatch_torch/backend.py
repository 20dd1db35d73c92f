"""The torch backend: what `isobatch` asks of torch."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from isobatch.backend import Backend, Options, Replica, Result, Scalars, Shard
from isobatch.clusters import cluster_of
from isobatch.devices import Device, DeviceRequest, resolve_devices
from isobatch.placement import Balance, Part, Placement
from isobatch_torch.accelerators import visible
from isobatch_torch.arrays import equal, join, reduce, shape, take
from isobatch_torch.engine import Engine, bound_call, check_outcomes
from isobatch_torch.internals import is_confined
from isobatch_torch.workers import ThreadState, run_all, run_here

if TYPE_CHECKING:
    from isobatch_torch.data_parallel import DataParallel
    from isobatch_torch.device_parallel import DeviceParallel

__all__ = ["BACKEND", "TorchBackend"]


class TorchBackend(Backend):
    """Data parallelism for `torch.nn.Module`s."""

    name: ClassVar[str] = "torch"

    def devices(self) -> tuple[Device, ...]:
        """Return the devices that torch sees, accelerators first."""
        return visible()

    def resolve(self, request: DeviceRequest) -> tuple[Device, ...]:
        """Return the devices that a request means."""
        return resolve_devices(request, visible())

    def shape(self, value: Any) -> tuple[int, ...] | None:
        """Return an array's shape, and `None` for what is no array."""
        return shape(value)

    def take(self, array: Any, rows: slice | None, axis: int, device: Device) -> Any:
        """Return rows of an array on a device."""
        return take(array, rows, axis, device)

    def join(self, arrays: Sequence[Any], axis: int, device: Device) -> Any:
        """Return arrays put together along an axis, on a device."""
        return join(arrays, axis, device)

    def reduce(self, arrays: Sequence[Any], weights: Sequence[int], how: Scalars, device: Device) -> Any:
        """Return 0-d arrays reduced to one."""
        return reduce(arrays, weights, how, device)

    def equal(self, a: Any, b: Any) -> bool:
        """Return whether two arrays have the same shape, type and values."""
        return equal(a, b)

    def replicate(self, model: nn.Module, devices: Sequence[Device]) -> list[Replica[nn.Module]]:
        """Return the module as run on each device: modules of their own that share its weights."""
        return Engine(model, devices).replicate()

    def parallel_apply(self, replicas: Sequence[Replica[nn.Module]], shards: Sequence[Shard]) -> list[Result]:
        """Run on each shard the replica of its rank.

        Replicas that record gradients or update running state run one after another: only a `DataParallel` knows more of them.
        """
        by_rank = {replica.rank: replica.module for replica in replicas}
        calls = [bound_call(by_rank[shard.rank], shard) for shard in shards]
        if is_confined():
            outcomes = run_here(calls, ThreadState.capture(torch.get_num_threads()))
        else:
            at_once = not torch.is_grad_enabled() and not any(
                part.training for module in by_rank.values() for part in module.modules()
            )
            state = ThreadState.capture(max(1, torch.get_num_threads() // len(replicas)))
            outcomes = run_all(calls, [shard.rank for shard in shards], state, gap=0 if at_once else None)
        check_outcomes(outcomes, shards)
        return [Result(shard, outcome.value) for shard, outcome in zip(shards, outcomes, strict=True)]

    def data_parallel(
        self,
        model: nn.Module,
        devices: DeviceRequest,
        options: Options,
        output_device: DeviceRequest,
        placements: Sequence[Placement] | None = None,
    ) -> DataParallel:
        """Return a `DataParallel` of the module, one that works with those of other processes for a cluster of several."""
        from isobatch_torch.data_parallel import DataParallel

        if (cluster := cluster_of(devices)) is not None:
            if cluster.size > 1:
                from isobatch_torch.cluster import ClusterParallel

                return ClusterParallel(model, cluster, output_device, options=options)
            devices = cluster.devices

        return DataParallel(model, devices, output_device, options=options, placements=placements)

    def parts(self, model: nn.Module) -> list[str]:
        """Name a module's submodules, outer ones first."""
        from isobatch_torch.device_parallel import check_placeable

        return check_placeable(model)

    def survey(self, model: nn.Module, example: Any, balance: Balance) -> list[Part]:
        """Return the innermost submodules in the order of their calls, with what each depends on and costs."""
        from isobatch_torch.survey import survey

        return survey(model, example, balance)

    def device_parallel(
        self, model: nn.Module, placement: Placement, output_device: DeviceRequest
    ) -> DeviceParallel:
        """Return a `DeviceParallel` of the module."""
        from isobatch_torch.device_parallel import DeviceParallel

        return DeviceParallel(model, placement, output_device)

    def load(
        self,
        path: str | PathLike[str],
        devices: DeviceRequest,
        options: Options,
        output_device: DeviceRequest,
    ) -> nn.Module:
        """Return the module in a file, parallel again."""
        from isobatch_torch.loading import load

        return load(path, devices, output_device, options=options)


BACKEND = TorchBackend()
