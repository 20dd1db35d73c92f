"""Opening model files."""

from __future__ import annotations

import zipfile
from os import PathLike, fspath
from pathlib import Path

import keras

from isobatch.errors import ModelError

__all__ = ["read_model"]


def read_model(path: str | PathLike[str], *, compiled: bool = True) -> keras.Model:
    """Return the model in a file that is there, as Keras opens it.

    Args:
        path: A `.keras`, `.h5` or `.hdf5` file.
        compiled: Whether it is compiled as it was saved.

    Raises:
        ModelError: A `.keras` file is no archive; Keras would say that there is no such file.
    """
    if fspath(path).endswith(".keras") and Path(path).is_file() and not zipfile.is_zipfile(path):
        msg = f"Expected {fspath(path)!r} to be a whole .keras archive, it is none: it was cut off, or is a file of another kind."
        raise ModelError(msg)
    return keras.saving.load_model(path, compile=compiled)
