"""Data parallelism for torch: `torch.nn.DataParallel`, done right."""

from isobatch.backend import current_replica
from isobatch_torch.data_parallel import DataParallel
from isobatch_torch.device_parallel import DeviceParallel
from isobatch_torch.functional import (
    data_parallel,
    gather,
    parallel_apply,
    replicate,
    scatter,
    scatter_kwargs,
)
from isobatch_torch.loader import data_loader
from isobatch_torch.loading import load
from isobatch_torch.spec import from_spec, register_layer

__all__ = [
    "DataParallel",
    "DeviceParallel",
    "current_replica",
    "data_loader",
    "data_parallel",
    "from_spec",
    "gather",
    "load",
    "parallel_apply",
    "register_layer",
    "replicate",
    "scatter",
    "scatter_kwargs",
]
