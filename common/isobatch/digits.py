"""The data of the built-in parity run: real handwritten digits, or the user's own images."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

from isobatch.errors import BackendError, DataError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Images", "load_digits", "load_images"]


@dataclass(frozen=True, slots=True)
class Images:
    """Labelled images, split into those to train on and those to test on.

    Args:
        name: Where they come from.
        train: Float32 images to train on, `(N, height, width, channels)`.
        train_labels: Their classes, `(N,)`, integers from 0.
        test: Float32 images never trained on, `(M, height, width, channels)`.
        test_labels: Their classes, `(M,)`.
        classes: Number of classes.
    """

    name: str
    train: np.ndarray[Any, Any]
    train_labels: np.ndarray[Any, Any]
    test: np.ndarray[Any, Any]
    test_labels: np.ndarray[Any, Any]
    classes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of one image."""
        height, width, channels = self.train.shape[1:]
        return height, width, channels


def load_digits(seed: int = 0) -> Images:
    """Return the 1,797 handwritten digits that scikit-learn ships, 8x8 pixels from 0 to 1.

    The source is the test part of the UCI data set "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998).

    Args:
        seed: Decides which fifth is kept for the test.

    Returns:
        The digits.

    Raises:
        BackendError: scikit-learn is not installed.

    >>> digits = load_digits()
    >>> digits.train.shape, digits.test.shape, digits.classes
    ((1438, 8, 8, 1), (359, 8, 8, 1), 10)
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        msg = "Expected scikit-learn, whose digits the built-in run uses. Cure: pip install scikit-learn, or --data FILE.npz."
        raise BackendError(msg) from error
    bunch = load()
    return _split("the handwritten digits of scikit-learn", bunch.images / 16.0, bunch.target, seed)


def load_images(path: str | PathLike[str], seed: int = 0) -> Images:
    """Return labelled images from a NumPy archive.

    Args:
        path: A `.npz` file with `x`, images `(N, height, width)` or `(N, height, width, channels)` of at least 4x4 pixels, of
            any number type, and `y`, classes `(N,)`, integers from 0.
        seed: Decides which fifth is kept for the test.

    Returns:
        The images as float32, unchanged otherwise.

    Raises:
        DataError: The file is absent, no archive, or its arrays are not as described; the message says what was found.
    """
    import numpy as np

    try:
        with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in ("x", "y") if name in archive}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, BadZipFile) as error:
        msg = f"Expected a NumPy archive (.npz) with arrays x and y, cannot read {str(path)!r}: {error}"
        raise DataError(msg) from error
    x, y = arrays.get("x"), arrays.get("y")
    if x is None or y is None:
        msg = f"Expected arrays x and y in {str(path)!r}, got only {sorted(arrays)!r}."
        raise DataError(msg)
    _check(x, y, str(path))
    return _split(str(path), x[..., None] if x.ndim == 3 else x, y, seed)


def _check(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], path: str) -> None:
    import numpy as np

    faults = [
        (
            x.ndim not in (3, 4),
            f"x of shape (N, height, width) or (N, height, width, channels), got {x.shape}",
        ),
        (x.dtype.kind not in "fiub", f"numbers in x, got {x.dtype}"),
        (
            x.ndim in (3, 4) and (min(x.shape) < 1 or min(x.shape[1:3]) < 4),
            f"images of at least 4x4 pixels in x, got {x.shape}",
        ),
        (
            y.dtype.kind not in "iu" or y.shape != x.shape[:1],
            f"one integer class for each image in y, got {y.dtype} {y.shape}",
        ),
        ((x.shape or (0,))[0] < 10, f"at least 10 images, got {(x.shape or (0,))[0]}"),
    ]
    for wrong, expected in faults:
        if wrong:
            msg = f"Expected {expected}, in {path!r}."
            raise DataError(msg)
    bad = np.argwhere(~np.isfinite(x))
    if len(bad):
        msg = f"Expected finite numbers in x of {path!r}, got {x[tuple(bad[0])]} at {bad[0].tolist()} ({len(bad)} such values)."
        raise DataError(msg)
    if y.min() < 0 or y.max() >= len(y):
        msg = f"Expected classes from 0, fewer than images, in y of {path!r}, got {y.min()} to {y.max()}."
        raise DataError(msg)


def _split(name: str, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], seed: int) -> Images:
    import numpy as np

    order = np.random.default_rng(seed).permutation(len(x))
    x = (x if x.ndim == 4 else x[..., None])[order].astype(np.float32)
    y = y[order].astype(np.int64)
    test = len(x) // 5
    return Images(name, x[test:], y[test:], x[:test], y[:test], int(y.max()) + 1)
