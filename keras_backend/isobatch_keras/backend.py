"""The Keras backend: what Keras itself must do for the shared interface."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import keras

from isobatch.backend import Backend, Options, Replica, Result, Scalars, Shard
from isobatch.clusters import cluster_of
from isobatch.devices import Device, DeviceRequest
from isobatch.placement import Balance, Part, Placement
from isobatch_keras import arrays
from isobatch_keras.devices import resolve, scope, visible_devices
from isobatch_keras.files import read_model
from isobatch_keras.gathering import Joining
from isobatch_keras.mirror import adopt_compilation
from isobatch_keras.norms import norms_of
from isobatch_keras.parallel import parallelize
from isobatch_keras.placing import Placed, graph_of, part_names
from isobatch_keras.replica import run
from isobatch_keras.state import Outcome, settle
from isobatch_keras.survey import survey

__all__ = ["BACKEND", "KerasBackend"]


class KerasBackend(Backend):
    """Data parallelism for `keras.Model`."""

    name: ClassVar[str] = "keras"

    def devices(self) -> tuple[Device, ...]:
        """Return the devices this process sees, accelerators first."""
        return visible_devices()

    def resolve(self, request: DeviceRequest) -> tuple[Device, ...]:
        """Return the devices that a request means, shared where there are too few logical CPUs."""
        return resolve(request)

    def shape(self, value: Any) -> tuple[int, ...] | None:
        """Return an array's shape; `None` for what is no array."""
        return arrays.shape(value)

    def take(self, array: Any, rows: slice | None, axis: int, device: Device) -> Any:
        """Return rows of an array, or all of it, as a tensor on a device."""
        with scope(device):
            tensor = keras.ops.convert_to_tensor(array)
            return tensor if rows is None else arrays.take(tensor, rows.start, rows.stop, axis)

    def join(self, arrays: Sequence[Any], axis: int, device: Device) -> Any:
        """Return arrays put together along an axis, on a device."""
        return Joining([1] * len(arrays)).join(arrays, axis, device)

    def reduce(self, arrays: Sequence[Any], weights: Sequence[int], how: Scalars, device: Device) -> Any:
        """Return 0-d arrays reduced to one, on a device."""
        return Joining(weights).reduce(arrays, weights, how, device)

    def equal(self, a: Any, b: Any) -> bool:
        """Return whether two arrays have the same values, NaN being equal to NaN."""
        return Joining([]).equal(a, b)

    def replicate(self, model: keras.Model, devices: Sequence[Device]) -> list[Replica[keras.Model]]:
        """Return the model, shared, as run on each device."""
        return [Replica(rank, device, model) for rank, device in enumerate(devices)]

    def parallel_apply(self, replicas: Sequence[Replica[Any]], shards: Sequence[Shard]) -> list[Result]:
        """Run each shard's replica, one after another, and settle the model's running state once."""
        outcomes: list[Outcome] = []
        norms = norms_of(replicas[0].module) if replicas else []
        for shard in shards:
            module = replicas[shard.rank].module
            size = 1 if shard.rows is None else len(shard.rows)
            outcomes.append(
                run(module, shard, size, outcomes[-1] if outcomes else None, policy="merge", norms=norms)
            )
        if outcomes:
            settle(outcomes, "merge", norms)
        return [Result(outcome.shard, outcome.output) for outcome in outcomes]

    def data_parallel(
        self,
        model: keras.Model,
        devices: DeviceRequest,
        options: Options,
        output_device: DeviceRequest,
        placements: Sequence[Placement] | None = None,
    ) -> keras.Model:
        """Return a `keras.Model` that splits each batch between replicas, one that works with those of other processes in a cluster."""
        cluster = cluster_of(devices)
        places = resolve(devices if cluster is None else cluster.local_devices(visible_devices()))
        return parallelize(
            model, places, options, _output(output_device), cluster=cluster, placements=placements
        )

    def parts(self, model: keras.Model) -> list[str]:
        """Name the operations of a model's graph, and those inside of nested models."""
        return list(part_names(graph_of(model)))

    def survey(self, model: keras.Model, example: Any, balance: Balance) -> list[Part]:
        """Return the operations in an order in which they can run, with what each depends on and costs."""
        return survey(model, example, balance)

    def device_parallel(
        self, model: keras.Model, placement: Placement, output_device: DeviceRequest
    ) -> keras.Model:
        """Return a `keras.Model` whose operations run on the devices of their parts."""
        return Placed(model, placement, _output(output_device))

    def load(
        self,
        path: str | PathLike[str],
        devices: DeviceRequest,
        options: Options,
        output_device: DeviceRequest,
    ) -> keras.Model:
        """Return the model in a file, parallel again, compiled as it was saved, with its optimizer."""
        if not Path(path).exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        model = read_model(path)
        parallel = self.data_parallel(model, devices, options, output_device)
        adopt_compilation(parallel, model)
        return parallel


def _output(request: DeviceRequest) -> Device:
    return Device("cpu", 0) if request is None else resolve(request)[0]


BACKEND = KerasBackend()
