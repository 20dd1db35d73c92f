"""`isobatch parity --train`: real digits trained in both frameworks side by side, alone and over replicas."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from isobatch.compare import compare
from isobatch.digits import Images
from isobatch.page import page, section, table
from isobatch.parallel import over_cpus
from isobatch.parity import make_room, versions
from isobatch.registry import get_backend
from isobatch.trajectory import Trajectory, follow
from isobatch.twins import training_twin

__all__ = ["Rounding", "TrainReport", "TrainRun", "render_training", "run_training"]

_BATCH = 64
_WIDTH, _HEIGHT, _LEFT = 900, 260, 60
_COLOURS = ("#0969da", "#bc4c00")


@dataclass(frozen=True, slots=True)
class TrainRun:
    """Both frameworks trained over so many replicas.

    Args:
        replicas: How many.
        trajectory: The steps of both, side by side.
        accuracy: On images never trained on, by framework.
        seconds: How long it took.
    """

    replicas: int
    trajectory: Trajectory
    accuracy: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class Rounding:
    """How far float32 runs of both frameworks are apart, beside each one's own distance from its float64 run.

    Args:
        what: Of what: all losses, or the outputs in the end.
        gap: Torch against Keras, the greatest difference over the greatest value.
        own: Float32 against float64, by framework.
    """

    what: str
    gap: float
    own: Mapping[str, float]

    def __str__(self) -> str:
        own = ", ".join(f"{name} {gap:.1e}" for name, gap in self.own.items())
        return f"float32, {self.what}: gap {self.gap:.1e}; against its own float64 {own}"


@dataclass(frozen=True, slots=True)
class TrainReport:
    """All runs.

    Args:
        data: What was trained on.
        epochs: How often it was seen.
        runs: One for each number of replicas.
        rounding: Of the first number of replicas in float32.
        versions: Of Python, the frameworks and this library.
    """

    data: str
    epochs: int
    runs: tuple[TrainRun, ...]
    rounding: tuple[Rounding, ...]
    versions: Mapping[str, str]

    @property
    def passed(self) -> bool:
        """Whether no run parted."""
        return all(run.trajectory.passed for run in self.runs)

    def __str__(self) -> str:
        lines = [f"{self.data}: {self.epochs} epochs in float64, batches of {_BATCH}, Adam."]
        for run in self.runs:
            found = ", ".join(f"{name} {share:.4f}" for name, share in run.accuracy.items())
            lines.append(
                f"{run.replicas} replicas: {run.trajectory}; test accuracy {found}; {run.seconds:.0f} s"
            )
        lines += map(str, self.rounding)
        return "\n".join([*lines, "PASS" if self.passed else "FAIL"])

    def as_dict(self) -> dict[str, Any]:
        """Return everything in plain containers, as it goes into JSON."""
        return {**asdict(self), "passed": self.passed}


def run_training(
    images: Images,
    replicas: Sequence[int],
    *,
    epochs: int,
    seed: int,
    progress: Callable[[str, float], None] = lambda _text, _done: None,
) -> TrainReport:
    """Train the digits network in both frameworks from the same weights on the same batches.

    Args:
        images: The data.
        replicas: Numbers of replicas.
        epochs: How often the images are seen.
        seed: Of the first weights and the order of rows.
        progress: Told what is being done, and how much of all has been.

    Returns:
        The report.
    """
    for name in ("torch", "keras"):
        get_backend(name)
    make_room(max(replicas))
    runs: list[TrainRun] = []
    first: Any = None
    for number, count in enumerate(replicas):

        def tell(part: float, number: int = number, count: int = count) -> None:
            progress(f"training over {count} replicas", (number + part) / (len(replicas) + 1))

        run, logits = _run(images, count, epochs, seed, tell)
        runs.append(run)
        first = first or (run, logits)
    progress("training in float32", len(replicas) / (len(replicas) + 1))
    rounding = _rounding(images, first, epochs, seed, lambda _part: None)
    return TrainReport(images.name, epochs, tuple(runs), rounding, versions())


def _run(
    images: Images, replicas: int, epochs: int, seed: int, progress: Callable[[float], None]
) -> tuple[TrainRun, Mapping[str, Any]]:
    """Return a run in float64, and what both sides say of the test images."""
    import numpy as np

    start = time.perf_counter()
    found, logits = _train(
        images, replicas, "float64", _batches(images, epochs, seed, "float64", progress), seed
    )
    accuracy = {name: float(np.mean(one.argmax(-1) == images.test_labels)) for name, one in logits.items()}
    return TrainRun(replicas, found, accuracy, time.perf_counter() - start), logits


def _rounding(
    images: Images,
    doubled: tuple[TrainRun, Mapping[str, Any]],
    epochs: int,
    seed: int,
    progress: Callable[[float], None],
) -> tuple[Rounding, ...]:
    """Train the same in float32, and hold it against float64: what of it both sides share is rounding."""
    import numpy as np

    run, logits = doubled
    batches = _batches(images, epochs, seed, "float32", progress)
    found, ours = _train(images, run.replicas, "float32", batches, seed)
    pairs = {
        "loss": (
            dict(zip(found.sides, found.losses, strict=True)),
            dict(zip(found.sides, run.trajectory.losses, strict=True)),
        ),
        "test logits": (ours, logits),
    }

    def gap(a: Any, b: Any) -> float:
        return compare(np.asarray(a, "float64"), np.asarray(b, "float64"), 0.0).scaled

    return tuple(
        Rounding(
            what,
            gap(single["torch"], single["keras"]),
            {name: gap(single[name], double[name]) for name in single},
        )
        for what, (single, double) in pairs.items()
    )


def _train(
    images: Images, replicas: int, dtype: str, batches: Iterator[tuple[Any, ...]], seed: int
) -> tuple[Trajectory, Mapping[str, Any]]:
    keras_side, torch_side = (
        importlib.import_module(f"isobatch_{name}.training") for name in ("keras", "torch")
    )
    with keras_side.default_type(dtype):
        model = keras_side.compiled_digits(images.shape, images.classes, seed, dtype)
        training = training_twin(model)
        training.module = over_cpus(training.module, replicas)
        parallel = over_cpus(model, replicas)
        importlib.import_module("isobatch_keras.mirror").adopt_compilation(parallel, model)
        found = follow(torch_side.TorchSide(training), keras_side.KerasSide(parallel), batches)
        test = images.test.astype(dtype)
        said = {
            "torch": torch_side.predict(training.network, test),
            "keras": keras_side.predict(model, test),
        }
    return found, said


def _batches(
    images: Images, epochs: int, seed: int, dtype: str, progress: Callable[[float], None]
) -> Iterator[tuple[Any, ...]]:
    import numpy as np

    rng = np.random.default_rng(seed)
    count = len(images.train)
    for epoch in range(epochs):
        order = rng.permutation(count)
        for first in range(0, count, _BATCH):
            rows = order[first : first + _BATCH]
            progress((epoch + first / count) / epochs)
            yield images.train[rows].astype(dtype), images.train_labels[rows]


def render_training(report: TrainReport) -> str:
    """Return the report as a page with the losses of both frameworks drawn over each other.

    Args:
        report: From `run_training`.
    """
    heads = ("replicas", "both sides", "accuracy of Keras", "accuracy of torch", "seconds")
    rows = [
        (
            str(run.replicas),
            str(run.trajectory),
            *(f"{run.accuracy[name]:.4f}" for name in ("keras", "torch")),
            f"{run.seconds:.0f}",
        )
        for run in report.runs
    ]
    return page(
        "Training in Keras and in torch",
        f"{report.data}: {report.epochs} epochs in float64, from the same weights, on the same batches.",
        [
            section("Step by step", table(heads, rows, (not run.trajectory.passed for run in report.runs))),
            *(
                section(f"Losses over {run.replicas} replicas", _curves(run.trajectory))
                for run in report.runs
            ),
            section("Versions", table(("what", "version"), report.versions.items())),
        ],
        "PASS" if report.passed else "FAIL",
    )


def _curves(found: Trajectory) -> str:
    top = max(max(losses) for losses in found.losses) or 1.0
    lines = []
    for number, (name, losses) in enumerate(zip(found.sides, found.losses, strict=True)):
        step = (_WIDTH - _LEFT) / max(len(losses) - 1, 1)
        points = " ".join(
            f"{_LEFT + step * i:.1f},{_HEIGHT - (_HEIGHT - 20) * one / top:.1f}"
            for i, one in enumerate(losses)
        )
        dashes = ' stroke-dasharray="6 6"' if number else ""
        colour = _COLOURS[number]
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        lines.append(
            f'<rect x="{_WIDTH - 110}" y="{18 * number + 6}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{_WIDTH - 94}" y="{18 * number + 15}">{name}</text>'
        )
    marks = f'<text x="2" y="24">{top:.2f}</text><text x="2" y="{_HEIGHT}">0</text>'
    marks += f'<text x="{_LEFT}" y="{_HEIGHT + 18}">step 1</text><text x="{_WIDTH - 60}" y="{_HEIGHT + 18}">step {found.steps}</text>'
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 26}" role="img">{marks}{"".join(lines)}</svg>'
