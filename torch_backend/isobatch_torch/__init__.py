"""Data parallelism for torch: `torch.nn.DataParallel`, done right."""

from isobatch.backend import current_replica
from isobatch_torch.data_parallel import DataParallel
from isobatch_torch.loading import load

__all__ = ["DataParallel", "current_replica", "load"]
