"""Models in files."""

from __future__ import annotations

from os import PathLike, fspath

import torch
from torch import nn

from isobatch.backend import Options
from isobatch.devices import DeviceRequest
from isobatch.errors import ModelError
from isobatch_torch.backend import BACKEND
from isobatch_torch.data_parallel import DataParallel

__all__ = ["load"]


def load(
    path: str | PathLike[str],
    devices: DeviceRequest = None,
    output_device: DeviceRequest = None,
    *,
    options: Options | None = None,
) -> DataParallel:
    """Return the module in a file, parallel on the devices there are now.

    The file is unpickled, which runs what its author wants: load only files that you trust.

    Args:
        path: Written by `torch.save(parallel.module, path)`, which plain torch opens too, or by `torch.save(parallel, path)`.
        devices: As for `DataParallel`.
        output_device: As for `DataParallel`.
        options: As for `DataParallel`.

    Returns:
        A parallel module; its weights are on the CPU, or on the one accelerator asked for.

    Raises:
        FileNotFoundError: There is no such file.
        ModelError: The file holds no module.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "model.pt")
    ...     torch.save(nn.Linear(3, 2), path)
    ...     load(path, devices=2)(torch.ones(5, 3)).shape
    torch.Size([5, 2])
    """
    found = torch.load(path, map_location="cpu", weights_only=False)
    if isinstance(found, nn.DataParallel):
        found = found.module
    if not isinstance(found, nn.Module):
        msg = f"Expected a module in {fspath(path)!r}, got {type(found).__name__}."
        if isinstance(found, dict):
            msg += " Weights alone are loaded into a module that exists: parallel.load_state_dict(torch.load(path))."
        raise ModelError(msg)
    return BACKEND.data_parallel(found, devices, options or Options(), output_device)
