"""Make a model parallel, whatever kind of Keras model it is."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from isobatch.backend import Options
from isobatch.clusters import Cluster
from isobatch.devices import Device
from isobatch.errors import BackendError, ModelError
from isobatch.placement import Placement
from isobatch_keras.mirror import Mirror
from isobatch_keras.placing import graph_of
from isobatch_keras.template import check, functional_of
from isobatch_keras.wrapper import Parallel, ParallelCall

__all__ = ["parallelize"]


_TRIED = ("tensorflow", "torch")


def parallelize(
    model: keras.Model,
    devices: tuple[Device, ...],
    options: Options,
    output_device: Device,
    *,
    cluster: Cluster | None = None,
    placements: Sequence[Placement] | None = None,
) -> keras.Model:
    """Return a model that runs one replica of another on each device.

    Args:
        model: The template.
        devices: One for each replica.
        options: How to split, join and keep state.
        output_device: Where outputs are joined.
        cluster: The processes, if there are several, of which each has such a model.
        placements: Where the parts of each replica run, if they run on different devices.

    Raises:
        BackendError: Keras runs on another backend than TensorFlow or torch.
        ModelError: The model cannot be made parallel.
        ValueError: An option is unknown or does not fit the number of devices.
    """
    if keras.config.backend() not in _TRIED:
        msg = (
            f"Expected Keras to run on {' or '.join(_TRIED)}, it runs on {keras.config.backend()}. Set KERAS_BACKEND before keras is "
            "imported; for JAX, keras.distribution.DataParallel does the same."
        )
        raise BackendError(msg)
    options.check(len(devices))
    if issubclass(type(model), Mirror):  # not isinstance: a parallel model says it is of its template's class
        msg = (
            f"Expected a model that is not parallel yet, got {model!r}; make its `template` parallel instead."
        )
        raise ModelError(msg)
    check(model, options)
    functional = functional_of(model) is not None
    if cluster is not None and cluster.size > 1:
        from isobatch_keras.cluster import ClusterCall, ClusterModel

        return (ClusterModel if functional else ClusterCall)(model, devices, options, output_device, cluster)
    if placements is not None:
        graph_of(model)
        return Parallel(model, devices, options, output_device, tuple(placements))
    cls = Parallel if functional else ParallelCall
    return cls(model, devices, options, output_device)
