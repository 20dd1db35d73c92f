"""Parity of a model that the user names: where it comes from, on what it runs, and everything that goes into the report."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.errors import DataError, ModelError
from isobatch.parity import finite, make_room, versions
from isobatch.placement import Placement
from isobatch.registry import get_backend
from isobatch.spec import Node, Spec
from isobatch.verdict import Verdict, judge

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ModelReport", "load_batch", "load_keras_model", "load_torch_module", "run_model", "write_twin"]

_MODEL_FILES = (".keras", ".h5", ".hdf5")
_PIXEL_SCALE = 0.05  # a first rescaling by less than this, such as 1/255 or 1/127.5, takes pixels
_GREATEST_WORD = 10  # of random integers that go into no embedding


@dataclass(frozen=True, slots=True)
class ModelReport:
    """All of a parity run on one model.

    Args:
        model: As the user named it.
        module: What it was held against.
        data: What it ran on.
        verdict: The answer.
        seconds: How long each part took, by name.
        versions: Of Python, the frameworks and this library.
    """

    model: str
    module: str
    data: str
    verdict: Verdict
    seconds: dict[str, float]
    versions: dict[str, str]

    @property
    def passed(self) -> bool:
        """Whether the networks are the same."""
        return self.verdict.passed

    def as_dict(self) -> dict[str, Any]:
        """Return everything in plain containers, as it goes into JSON; a gap without a number is `None`."""
        plain: dict[str, Any] = finite(
            {**asdict(self), "passed": self.passed, "verdict": self.verdict.as_dict()}
        )
        return plain


def run_model(
    name: str,
    *,
    data: Path | None = None,
    module: str | None = None,
    weights: Path | None = None,
    layout: str = "channels_last",
    replicas: Sequence[int] = (),
    placement: Path | None = None,
    rows: int = 8,
    size: int | None = None,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda _text, _done: None,
) -> ModelReport:
    """Hold a Keras model against its twin, or against a torch module.

    Args:
        name: A `.keras` or `.h5` file, `module:function`, or the name of a model of `keras.applications`.
        data: A `.npz` or `.npy` file or a folder of images; random rows if it is `None`.
        module: `module:function` that returns the torch module; the twin if it is `None`.
        weights: A file with the torch module's `state_dict`.
        layout: `"channels_first"` if that module takes and gives channels first.
        replicas: Numbers of replicas over which both sides are run as well.
        placement: A file with parts and their devices, with which both sides are run as well; see `isobatch.Placement.load`.
        rows: How many rows at most.
        size: Height and width of the images of an application.
        seed: Of random rows, and of the weights of an application.
        progress: Told what is being done, and how much of all has been.

    Returns:
        The report.

    Raises:
        BackendError: Keras or torch is not installed.
        DataError: The data do not fit the model.
        ModelError: There is no such model or module.
        SpecError: The model has layers without a word in a spec.
    """
    placed = None if placement is None else Placement.load(placement)
    seconds: dict[str, float] = {}
    began = time.perf_counter()

    def lap(part: str, text: str, done: float) -> None:
        seconds[part] = time.perf_counter() - began - sum(seconds.values())
        progress(text, done)

    progress("starting the frameworks", 0.0)
    for framework in ("torch", "keras"):
        get_backend(framework)
    cpus = [device.index + 1 for device in (placed.devices if placed else ()) if device.kind == "cpu"]
    needed = max((*replicas, *cpus), default=0)
    if needed:
        make_room(needed)
    lap("start", f"loading {name}", 0.1)
    model = load_keras_model(name, size, seed)
    lap("model", "building the twin", 0.2)
    spec, other = _other_side(model, module, weights)
    lap("twin", "reading the data", 0.3)
    batch, description = load_batch(spec, data, rows, seed)
    lap("data", "running both in float64, layer by layer", 0.4)
    verdict = judge(model, other, batch, layout=layout, replicas=replicas, placement=placed)
    lap("verdict", "done", 1.0)
    against = "its twin" if module is None else module
    return ModelReport(name, against, description, verdict, seconds, versions())


def write_twin(name: str, folder: Path, size: int | None = None, seed: int = 0) -> Spec:
    """Write the spec and the weights of a model's twin, from which a machine without Keras builds it.

    Args:
        name: As for `run_model`.
        folder: Where to.
        size: Height and width of the images of an application.
        seed: Of the weights of an application.

    Returns:
        The spec.
    """
    get_backend("keras")
    spec: Spec = _keras_side().to_spec(load_keras_model(name, size, seed))
    spec.save(folder)
    return spec


def load_keras_model(name: str, size: int | None = None, seed: int = 0) -> Any:
    """Return the Keras model that a name stands for.

    Args:
        name: As for `run_model`.
        size: Height and width of the images of an application.
        seed: Of the weights of an application.

    Raises:
        ModelError: There is no such model; the message has Keras's reason.
    """
    if name.lower().endswith(_MODEL_FILES):
        return _keras_side().open_model(name)
    if ":" in name:
        return _called(name)
    return _keras_side().application(name, size, seed)


def load_torch_module(name: str, weights: Path | None = None) -> Any:
    """Return the torch module that a function returns.

    Args:
        name: `module:function`.
        weights: A file with its `state_dict`.

    Raises:
        ModelError: There is no such function, or the file does not fit.
    """
    module = _called(name)
    return module if weights is None else _torch_side().with_weights(module, weights)


def load_batch(spec: Spec, data: Path | None, rows: int, seed: int) -> tuple[Any, str]:
    """Return a batch for a network, as it is given it, and what it is.

    Args:
        spec: The network.
        data: As for `run_model`.
        rows: How many rows at most.
        seed: Of random rows.

    Raises:
        DataError: The data do not fit the network.
    """
    if data is None:
        arrays, text = _random_rows(spec, rows, seed), f"{rows} random rows, seed {seed}"
    elif data.is_dir():
        arrays = [_keras_side().images(data, spec.inputs[0].shape, rows)]
        text = f"{len(arrays[0])} images of {data}"
    else:
        arrays = [array[:rows] for array in _arrays(spec, data)]
        text = f"{len(arrays[0])} rows of {data}"
    for one, array in zip(spec.inputs, arrays, strict=True):
        wrong = len(array.shape) != len(one.shape) + 1
        wrong = wrong or any(
            want is not None and want != got for want, got in zip(one.shape, array.shape[1:], strict=False)
        )
        if wrong or not len(array):
            msg = f"Expected rows of shape {one.shape} for input {one.name!r}, got an array {array.shape}."
            raise DataError(msg)
    by_name = {one.name: array for one, array in zip(spec.inputs, arrays, strict=True)}
    return _packed(spec.signature, by_name), text


def _arrays(spec: Spec, path: Path) -> list[np.ndarray[Any, Any]]:
    import numpy as np

    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        msg = (
            f"Expected a .npz or .npy file of plain arrays or a folder of images, got {str(path)!r}: {error}"
        )
        raise DataError(msg) from None
    if isinstance(found, np.ndarray):
        return [found] * len(spec.inputs)
    names = [one.name for one in spec.inputs]
    if set(names) <= set(found):
        return [found[name] for name in names]
    if len(names) == 1 and ("x" in found or len(found) == 1):
        return [found["x" if "x" in found else next(iter(found))]]
    msg = f"Expected arrays {names} in {str(path)!r}, got {sorted(found)}."
    raise DataError(msg)


def _random_rows(spec: Spec, rows: int, seed: int) -> list[np.ndarray[Any, Any]]:
    """What the network's first operations expect: integers that an embedding has rows for, pixels for a rescaling, else normal numbers."""
    import numpy as np

    rng = np.random.default_rng(seed)
    arrays: list[np.ndarray[Any, Any]] = []
    for one in spec.inputs:
        shape = (rows, *(_GREATEST_WORD if size is None else size for size in one.shape))
        sizes = [
            spec.tensors[node.weights["embeddings"]].shape[0]
            for node in spec.nodes
            if node.operation == "embedding" and node.inputs[0] == one.name
        ]
        scales = [abs(float(node.attributes["scale"])) for node in spec.nodes if _rescales(node, one.name)]
        if sizes or "int" in one.dtype:
            dtype = one.dtype if "int" in one.dtype else "float32"
            arrays.append(rng.integers(0, min(sizes, default=_GREATEST_WORD), shape).astype(dtype))
        elif scales and 0 < min(scales) < _PIXEL_SCALE:
            arrays.append(rng.integers(0, 256, shape).astype("float32"))
        else:
            arrays.append(rng.standard_normal(shape).astype("float32"))
    return arrays


def _rescales(node: Node, name: str) -> bool:
    return (
        node.operation == "rescale"
        and node.inputs[0] == name
        and not isinstance(node.attributes["scale"], list)
    )


def _packed(signature: Any, by_name: dict[str, Any]) -> Any:
    if isinstance(signature, dict):
        return {key: _packed(value, by_name) for key, value in signature.items()}
    return [_packed(one, by_name) for one in signature] if isinstance(signature, list) else by_name[signature]


def _other_side(model: Any, module: str | None, weights: Path | None) -> tuple[Spec, Any]:
    spec: Spec = _keras_side().to_spec(model)
    if module is not None:
        return spec, load_torch_module(module, weights)
    twin = _torch_side().from_spec(spec)
    return spec, twin if weights is None else _torch_side().with_weights(twin, weights)


def _called(name: str) -> Any:
    """What the function of `module:function` returns; modules in the current folder are found too."""
    module, _, function = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, ValueError) as error:
        msg = f"Expected {name!r} to be module:function that returns a model: {type(error).__name__}: {error}"
        raise ModelError(msg) from error


def _keras_side() -> Any:
    return importlib.import_module("isobatch_keras.spec")


def _torch_side() -> Any:
    return importlib.import_module("isobatch_torch.spec")
