"""`isobatch parity --train`: real digits trained in both frameworks side by side, alone and over replicas."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from isobatch.digits import Images
from isobatch.page import page, section, table
from isobatch.parallel import over_cpus
from isobatch.parity import make_room, versions
from isobatch.registry import get_backend
from isobatch.trajectory import Trajectory, follow
from isobatch.twins import training_twin

__all__ = ["TrainReport", "TrainRun", "render_training", "run_training"]

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
class TrainReport:
    """All runs.

    Args:
        data: What was trained on.
        epochs: How often it was seen.
        runs: One for each number of replicas.
        versions: Of Python, the frameworks and this library.
    """

    data: str
    epochs: int
    runs: tuple[TrainRun, ...]
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
    for number, count in enumerate(replicas):

        def tell(part: float, number: int = number, count: int = count) -> None:
            progress(f"training over {count} replicas", (number + part) / len(replicas))

        runs.append(_run(images, count, epochs, seed, tell))
    return TrainReport(images.name, epochs, tuple(runs), versions())


def _run(
    images: Images, replicas: int, epochs: int, seed: int, progress: Callable[[float], None]
) -> TrainRun:
    import numpy as np

    keras_side, torch_side = (
        importlib.import_module(f"isobatch_{name}.training") for name in ("keras", "torch")
    )
    start = time.perf_counter()
    with keras_side.float64_default():
        model = keras_side.compiled_digits(images.shape, images.classes, seed)
        training = training_twin(model)
        training.module = over_cpus(training.module, replicas)
        parallel = over_cpus(model, replicas)
        importlib.import_module("isobatch_keras.mirror").adopt_compilation(parallel, model)
        sides = torch_side.TorchSide(training), keras_side.KerasSide(parallel)
        found = follow(*sides, _batches(images, epochs, seed, progress))
        test = images.test.astype("float64")
        logits = {
            "keras": keras_side.predict(model, test),
            "torch": torch_side.predict(training.network, test),
        }
    accuracy = {name: float(np.mean(one.argmax(-1) == images.test_labels)) for name, one in logits.items()}
    return TrainRun(replicas, found, accuracy, time.perf_counter() - start)


def _batches(
    images: Images, epochs: int, seed: int, progress: Callable[[float], None]
) -> Iterator[tuple[Any, ...]]:
    import numpy as np

    rng = np.random.default_rng(seed)
    count = len(images.train)
    for epoch in range(epochs):
        order = rng.permutation(count)
        for first in range(0, count, _BATCH):
            rows = order[first : first + _BATCH]
            progress((epoch + first / count) / epochs)
            yield images.train[rows].astype("float64"), images.train_labels[rows]


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
