"""The main job: one network in Keras and in torch, alone and over several replicas, on the same rows.

The verdict is given in float64, where a fault stands far above rounding; float32 is judged by the same rule and shown beside each
framework's own rounding error.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from isobatch.compare import Comparison, compare
from isobatch.digits import Images
from isobatch.errors import DataError, DeviceError
from isobatch.parallel import virtual_devices
from isobatch.registry import get_backend
from isobatch.rows import split_sizes

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "Case",
    "Network",
    "Report",
    "Weights",
    "allowed_gap",
    "compare_networks",
    "finite",
    "make_room",
    "run",
    "versions",
]

Weights: TypeAlias = "Mapping[str, np.ndarray[Any, Any]]"
Progress: TypeAlias = Callable[[str, float], None]
"""Called with what is being done, and which part of the whole job has been done, from 0 to 1."""

FRAMEWORKS = ("keras", "torch")
PRECISIONS = ("float64", "float32")
_TIMED_RUNS = 5
_TRAINING_SHARE = 0.25  # of the progress bar


class Network(Protocol):
    """The reference network in one framework and one precision; `isobatch_keras.reference` and `isobatch_torch.reference` have one."""

    def predict(self, images: np.ndarray[Any, Any], replicas: int | None = None) -> np.ndarray[Any, Any]:
        """Return the logits `(B, classes)` of images `(B, height, width, channels)`, by one model or by so many replicas."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """One number of replicas and one number of rows.

    Args:
        replicas: Number of replicas.
        batch: Number of rows.
        sizes: Rows that each replica got.
        checks: Comparisons by precision and name: `keras-torch` (the greater of single and parallel), `keras` and `torch`
            (parallel against single).
        rounding: Each framework's own float32 error: its single float32 run against its float64 run, scaled.
        milliseconds: Time of a float32 prediction by `keras`, `keras parallel`, `torch` and `torch parallel`: the best of five.
    """

    replicas: int
    batch: int
    sizes: tuple[int, ...]
    checks: Mapping[str, Mapping[str, Comparison]]
    rounding: Mapping[str, float]
    milliseconds: Mapping[str, float]

    @property
    def passed(self) -> bool:
        """Whether every comparison passed."""
        return all(check.passed for checks in self.checks.values() for check in checks.values())


@dataclass(frozen=True, slots=True)
class Report:
    """All of a parity run.

    Args:
        data: What it ran on.
        cases: One for each number of replicas and of rows.
        allowed: The greatest scaled gap that passes, by precision.
        terms: How many terms are added up on the way through the network, which `allowed` follows from.
        accuracy: Part of the test images classified right, by framework, single and parallel.
        seconds: How long the whole run took.
        seed: What the split of the data, the first weights and the order of rows came from.
        versions: Of Python, the frameworks and this library.
    """

    data: str
    cases: Sequence[Case]
    allowed: Mapping[str, float]
    terms: int
    accuracy: Mapping[str, float]
    seconds: float
    seed: int
    versions: Mapping[str, str]

    @property
    def passed(self) -> bool:
        """Whether every case passed, and both frameworks classify equally well."""
        return all(case.passed for case in self.cases) and len(set(self.accuracy.values())) == 1

    def as_dict(self) -> dict[str, Any]:
        """Return everything in plain containers, as it goes into JSON; a gap without a number is `None`."""
        cases = [{**asdict(case), "passed": case.passed} for case in self.cases]
        plain: dict[str, Any] = finite({**asdict(self), "passed": self.passed, "cases": cases})
        return plain


def run(
    images: Images,
    replicas: Sequence[int],
    batches: Sequence[int],
    *,
    seed: int = 0,
    epochs: int = 5,
    progress: Progress = lambda _text, _done: None,
) -> Report:
    """Train the reference network in Keras through `data_parallel`, carry it to torch and compare the two.

    Args:
        images: What to train and to compare on.
        replicas: Numbers of replicas, each 1 or more.
        batches: Numbers of rows, each from 1 to the number of test images.
        seed: For the first weights and the order of rows.
        epochs: How often the training images are seen.
        progress: Told what is being done.

    Returns:
        The report.

    Raises:
        BackendError: Keras or torch is not installed.
        DataError: Training diverged.
        ValueError: `replicas` or `batches` is empty or out of range.
    """
    began = time.perf_counter()
    _check_request(replicas, batches, len(images.test))
    # torch first: with both in one process it must be loaded before TensorFlow.
    references = {name: _reference(name) for name in reversed(FRAMEWORKS)}
    make_room(max(replicas))
    weights: Weights = references["keras"].train(
        images,
        replicas=min(2, max(replicas)),
        epochs=epochs,
        seed=seed,
        on_epoch=lambda epoch: progress(
            f"training, epoch {epoch} of {epochs}", _TRAINING_SHARE * epoch / epochs
        ),
    )
    if not all(math.isfinite(array.sum()) for array in weights.values()):
        msg = f"Expected images that can be trained on, but training on {images.name} diverged. Scale them to about 0..1."
        raise DataError(msg)
    networks = {
        precision: {
            name: references[name].ReferenceNetwork(images.shape, images.classes, precision, weights)
            for name in FRAMEWORKS
        }
        for precision in PRECISIONS
    }
    cases, allowed = compare_networks(
        networks,
        images.test,
        replicas,
        batches,
        terms=_terms(weights),
        progress=lambda text, done: progress(text, _TRAINING_SHARE + (1 - _TRAINING_SHARE) * done),
    )
    return Report(
        data=f"{images.name}: {len(images.train)} images to train on, {len(images.test)} to test",
        cases=cases,
        allowed=allowed,
        terms=_terms(weights),
        accuracy=_accuracies(networks["float32"], images, max(replicas)),
        seconds=time.perf_counter() - began,
        seed=seed,
        versions=versions(),
    )


def compare_networks(
    networks: Mapping[str, Mapping[str, Network]],
    rows: np.ndarray[Any, Any],
    replicas: Sequence[int],
    batches: Sequence[int],
    *,
    terms: int,
    progress: Progress = lambda _text, _done: None,
) -> tuple[list[Case], dict[str, float]]:
    """Compare a network's two sides for every number of replicas and of rows.

    Args:
        networks: By precision (`"float64"`, `"float32"`) and framework (`"keras"`, `"torch"`).
        rows: Float32 images; the first ones of it are each batch.
        replicas: Numbers of replicas.
        batches: Numbers of rows.
        terms: How many terms are added up on the way through the network.
        progress: Told what is being done.

    Returns:
        The cases, and the greatest gap allowed in each precision.
    """
    allowed = {precision: allowed_gap(terms, precision) for precision in PRECISIONS}
    cases: list[Case] = []
    for batch in batches:
        images = rows[:batch]
        single = {
            p: {name: networks[p][name].predict(images.astype(p)) for name in FRAMEWORKS} for p in PRECISIONS
        }
        rounding = {
            name: compare(single["float32"][name].astype("float64"), single["float64"][name], 1.0).scaled
            for name in FRAMEWORKS
        }
        times = {name: _milliseconds(networks["float32"][name], images, None) for name in FRAMEWORKS}
        for count in replicas:
            progress(f"{batch} rows over {count} replicas", len(cases) / (len(batches) * len(replicas)))
            checks = {
                p: _checks(
                    single[p],
                    {n: networks[p][n].predict(images.astype(p), count) for n in FRAMEWORKS},
                    allowed[p],
                )
                for p in PRECISIONS
            }
            parallel = {
                f"{n} parallel": _milliseconds(networks["float32"][n], images, count) for n in FRAMEWORKS
            }
            cases.append(
                Case(count, batch, split_sizes(batch, count), checks, rounding, {**times, **parallel})
            )
    progress("done", 1.0)
    return cases, allowed


def make_room(replicas: int) -> None:
    """Have a logical CPU device for each replica; where TensorFlow runs already, replicas share those that there are.

    Args:
        replicas: How many.
    """
    with contextlib.suppress(DeviceError):
        virtual_devices(replicas)


def allowed_gap(terms: int, precision: str) -> float:
    """Return the greatest scaled gap that rounding alone explains.

    A sum of `n` terms carries a relative error of at most about `n` units of rounding, whatever the order of adding (Higham,
    Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.1); both sides may err, so it is twice that.

    Args:
        terms: How many terms are added up on the way through the network.
        precision: `"float32"` or `"float64"`.

    Returns:
        `2 * terms * eps`.

    >>> allowed_gap(100, "float64")
    4.440892098500626e-14
    """
    import numpy as np

    return float(2 * terms * np.finfo(precision).eps)


def _terms(weights: Weights) -> int:
    """The terms of one output of each kernel, added up: all of its axes but the last are summed over."""
    return sum(array.size // array.shape[-1] for array in weights.values() if array.ndim > 1)


def _checks(
    single: Mapping[str, np.ndarray[Any, Any]], parallel: Mapping[str, np.ndarray[Any, Any]], allowed: float
) -> dict[str, Comparison]:
    between = [compare(side["torch"], side["keras"], allowed) for side in (single, parallel)]
    return {
        "keras-torch": max(between, key=lambda check: check.scaled),
        **{name: compare(parallel[name], single[name], allowed) for name in FRAMEWORKS},
    }


def _milliseconds(network: Network, images: np.ndarray[Any, Any], replicas: int | None) -> float:
    network.predict(images, replicas)  # the first call traces
    times = []
    for _ in range(_TIMED_RUNS):
        began = time.perf_counter()
        network.predict(images, replicas)
        times.append(time.perf_counter() - began)
    return 1000 * min(times)  # what other programs on the machine take is no part of the model


def _accuracies(networks: Mapping[str, Network], images: Images, replicas: int) -> dict[str, float]:
    found = {}
    for name in FRAMEWORKS:
        for label, count in ((name, None), (f"{name} parallel", replicas)):
            guesses = networks[name].predict(images.test, count).argmax(axis=-1)
            found[label] = float((guesses == images.test_labels).mean())
    return found


def _check_request(replicas: Sequence[int], batches: Sequence[int], rows: int) -> None:
    if not replicas or min(replicas) < 1:
        msg = f"Expected numbers of replicas of 1 or more, got {list(replicas)}."
        raise ValueError(msg)
    if not batches or min(batches) < 1 or max(batches) > rows:
        msg = f"Expected batch sizes from 1 to {rows}, the number of test images, got {list(batches)}."
        raise ValueError(msg)


def finite(tree: Any) -> Any:
    """Return plain containers with `None` for what JSON has no number for."""
    if isinstance(tree, dict):
        return {key: finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def _reference(name: str) -> Any:
    get_backend(name)  # says in our words what is not installed
    return importlib.import_module(f"isobatch_{name}.reference")


def versions() -> dict[str, str]:
    """Return the versions of Python, the frameworks and this library, by name."""
    names = [name for name in ("isobatch", "keras", "tensorflow", "torch", "numpy") if _version(name)]
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in names},
        "platform": sys.platform,
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
