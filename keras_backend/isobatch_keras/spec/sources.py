"""Where Keras models and images come from, for the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np

from isobatch.errors import DataError, ModelError
from isobatch_keras.files import read_model

__all__ = ["application", "images", "open_model"]

_IMAGES = {".bmp", ".gif", ".jpeg", ".jpg", ".png"}


def open_model(path: str) -> Any:
    """Return the Keras model in a file, those of Keras 2 that Keras 3 can open included.

    Args:
        path: A `.keras`, `.h5` or `.hdf5` file.

    Raises:
        ModelError: Keras cannot open it; the message has its reason in one line.
    """
    if not Path(path).is_file():
        msg = f"Expected a model file, there is no {path!r}."
        raise ModelError(msg)
    try:
        return read_model(path, compiled=False)
    except Exception as error:
        reason = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        msg = f"Expected a model file that Keras {keras.__version__} can open, got {path!r}: {reason}"
        raise ModelError(msg) from error


def application(name: str, size: int | None, seed: int) -> Any:
    """Return a model of `keras.applications` with random weights.

    Its statistics, scales and offsets are moved off the zeros and ones they start with, which would hide what they do.

    Args:
        name: Its name, in any case.
        size: Height and width of its images; the model's own if it is `None`.
        seed: Of the weights.

    Raises:
        ModelError: There is no such model, or it cannot have images of this size.
    """
    known = {one.lower(): one for one in dir(keras.applications) if one[0].isupper()}
    plain = name.lower().replace("_", "")  # also as Keras's own modules are named
    if plain not in known:
        msg = f"Expected a .keras or .h5 file, module:function, or one of {', '.join(sorted(known.values()))}; got {name!r}."
        raise ModelError(msg)
    keras.utils.set_random_seed(seed)
    shape = {} if size is None else {"input_shape": (size, size, 3)}
    try:
        model = getattr(keras.applications, known[plain])(weights=None, **shape)
    except ValueError as error:
        msg = f"Expected another --size than {size} for {known[plain]}: {error}"
        raise ModelError(msg) from None
    rng = np.random.default_rng(seed)
    for variable in model.variables:
        if "float" in variable.dtype and len(variable.shape) == 1:
            variable.assign(variable.numpy() + rng.uniform(0.0, 0.1, variable.shape))
    return model


def images(folder: Path, shape: tuple[int | None, ...], rows: int) -> np.ndarray[Any, Any]:
    """Return the images of a folder in a network's size, values from 0 to 255.

    Args:
        folder: With image files, which are taken by name.
        shape: Of one image: height, width, channels.
        rows: How many at most.

    Returns:
        Float32 images `(B, height, width, channels)`.

    Raises:
        DataError: There are none, or the network takes no images.
    """
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _IMAGES)[:rows]
    if not paths:
        msg = f"Expected images in {str(folder)!r}, there are none that end in {', '.join(sorted(_IMAGES))}."
        raise DataError(msg)
    if len(shape) != 3 or shape[2] not in {1, 3, 4}:
        msg = f"Expected a network that takes images, got one that takes {shape}."
        raise DataError(msg)
    size = None if None in shape[:2] else shape[:2]
    mode = {1: "grayscale", 3: "rgb", 4: "rgba"}[shape[2]]
    loaded = [
        keras.utils.img_to_array(keras.utils.load_img(path, color_mode=mode, target_size=size))
        for path in paths
    ]
    return np.stack(loaded).astype("float32")
