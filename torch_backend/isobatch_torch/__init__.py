"""Data parallelism for torch: `torch.nn.DataParallel`, done right."""

from isobatch.backend import current_replica
from isobatch_torch.data_parallel import DataParallel
from isobatch_torch.functional import (
    data_parallel,
    gather,
    parallel_apply,
    replicate,
    scatter,
    scatter_kwargs,
)
from isobatch_torch.loading import load

__all__ = [
    "DataParallel",
    "current_replica",
    "data_parallel",
    "gather",
    "load",
    "parallel_apply",
    "replicate",
    "scatter",
    "scatter_kwargs",
]
