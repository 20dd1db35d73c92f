"""One interface for data parallelism over Keras and PyTorch, and proof that the two agree."""

from isobatch.backend import Backend, Options, Replica, Result, Shard, current_replica
from isobatch.clusters import Cluster, cluster
from isobatch.devices import Device
from isobatch.errors import (
    BackendError,
    BatchSizeError,
    ClusterError,
    DataError,
    DeviceError,
    DeviceWarning,
    IsobatchError,
    LeafTypeError,
    ModelError,
    SpecError,
    StructureError,
)
from isobatch.parallel import data_parallel, device_parallel, load, virtual_devices
from isobatch.placement import Placement
from isobatch.registry import available_backends, get_backend
from isobatch.rows import split_sizes
from isobatch.training_state import TrainingState
from isobatch.trees import Broadcast, Rows
from isobatch.twins import copy_weights, training_twin, twin

__version__ = "0.1.0.dev0"

__all__ = [
    "Backend",
    "BackendError",
    "BatchSizeError",
    "Broadcast",
    "Cluster",
    "ClusterError",
    "DataError",
    "Device",
    "DeviceError",
    "DeviceWarning",
    "IsobatchError",
    "LeafTypeError",
    "ModelError",
    "Options",
    "Placement",
    "Replica",
    "Result",
    "Rows",
    "Shard",
    "SpecError",
    "StructureError",
    "TrainingState",
    "available_backends",
    "cluster",
    "copy_weights",
    "current_replica",
    "data_parallel",
    "device_parallel",
    "get_backend",
    "load",
    "split_sizes",
    "training_twin",
    "twin",
    "virtual_devices",
]
