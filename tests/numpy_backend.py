"""A third backend, on numpy alone: what is shared can be tested fast, without a framework."""

from __future__ import annotations

import numpy as np

from isobatch import Backend, Replica, Result
from isobatch.devices import Device


class NumpyBackend(Backend):
    name = "numpy"

    def devices(self):
        return (Device("cpu", 0),)

    def shape(self, value):
        return value.shape if isinstance(value, np.ndarray | np.generic) else None

    def take(self, array, rows, axis, device):
        return array if rows is None else array[(slice(None),) * axis + (rows,)]

    def join(self, arrays, axis, device):
        return np.concatenate(arrays, axis)

    def reduce(self, arrays, weights, how, device):
        stacked = np.stack(arrays)
        if how == "stack":
            return stacked
        return (
            stacked.sum(0) if how == "sum" else np.average(stacked, weights=weights).astype(stacked.dtype)[()]
        )

    def equal(self, a, b):
        return (
            a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
        )

    def replicate(self, model, devices):
        return [Replica(rank, device, model) for rank, device in enumerate(devices)]

    def parallel_apply(self, replicas, shards):
        return [Result(shard, replicas[shard.rank].module(*shard.args, **shard.kwargs)) for shard in shards]

    def run(self, function, count, *args, options=None, **kwargs):
        """The four verbs in one line each."""
        devices = [Device("cpu", rank) for rank in range(count)]
        shards = self.scatter(args, devices, kwargs=kwargs, options=options)
        results = self.parallel_apply(self.replicate(function, devices), shards)
        return self.gather(results, devices[0], options=options)


NUMPY = NumpyBackend()
