"""How fast a model of the user's own runs in both frameworks, alone and over replicas; what `isobatch bench` does."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isobatch.compare import compare
from isobatch.errors import DataError, ModelError
from isobatch.model_parity import load_batch, load_keras_model
from isobatch.parallel import data_parallel
from isobatch.parity import finite, make_room, versions
from isobatch.registry import get_backend
from isobatch.timing import Timing, peak_memory, ratio, take_turns
from isobatch.trees import flatten
from isobatch.twins import twin

__all__ = ["BenchReport", "Choice", "run_bench"]

FRAMEWORKS = ("keras", "torch")

_WRONG = 1e-2
"""A scaled gap that float32 rounding does not reach: what is that far off is not the same network, and timing it worthless."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run the model on one number of rows.

    Args:
        framework: `"keras"` or `"torch"`.
        replicas: Number of replicas; 0 for the model by itself.
        rows: Rows of a call.
        timing: Of one call.
        memory: Bytes that a call takes at its peak beside what was taken before; `None` where the system does not tell.
        gap: How far the outputs are from those of the Keras model by itself, scaled; in training, the loss.
    """

    framework: str
    replicas: int
    rows: int
    timing: Timing
    memory: int | None
    gap: float

    def __str__(self) -> str:
        return _title(self.framework, self.replicas)

    @property
    def speed(self) -> float:
        """Rows a second, by the median."""
        return self.rows / self.timing.median


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All that was measured.

    Args:
        model: As the user named it.
        training: Whether steps of training were timed rather than forward passes.
        choices: In the order they were measured; those of one number of rows took turns.
        complete: Whether all that was asked for is there.
        versions: Of Python, the frameworks and this library.
    """

    model: str
    training: bool
    choices: tuple[Choice, ...]
    complete: bool
    versions: dict[str, str]

    @property
    def fastest(self) -> Choice:
        """The choice with the most rows a second."""
        return max(self.choices, key=lambda choice: choice.speed)

    def alone(self, choice: Choice) -> Choice:
        """Return the Keras model by itself on as many rows, which a choice is held against."""
        return next(other for other in self.choices if other.rows == choice.rows)

    def advice(self) -> str:
        """Return one sentence: which choice is fastest here, by how much, and how sure that is."""
        best = self.fastest
        others = [one for one in self.choices if one.rows == best.rows and one is not best]
        text = f"Fastest here: {best} at {best.rows} rows a call, {best.speed:,.0f} rows a second"
        if not others:
            return f"{text}."
        second = max(others, key=lambda choice: choice.speed)
        lead = ratio(second.timing, best.timing)
        if lead.low <= 1:
            return f"{text}; {second} is as fast within the noise: ratio {lead}."
        return f"{text}, {lead} times as many as {second}, which comes next."

    def as_dict(self) -> dict[str, Any]:
        """Return everything in plain containers, as it goes into JSON."""
        plain: dict[str, Any] = finite({**asdict(self), "advice": self.advice() if self.choices else None})
        return plain


def run_bench(
    name: str,
    *,
    replicas: Sequence[int] = (2, 4),
    batches: Sequence[int] = (32, 256),
    training: bool = False,
    data: Path | None = None,
    size: int | None = None,
    seconds: float = 2.0,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda _text, _done: None,
) -> BenchReport:
    """Time a Keras model and its twin, alone and over replicas.

    Ctrl-C ends it early; what has been measured by then is in the report.

    Args:
        name: A `.keras` or `.h5` file, `module:function`, or the name of a model of `keras.applications`.
        replicas: Numbers of replicas, beside the model by itself.
        batches: Numbers of rows of a call.
        training: Time steps of training: forward, backward, and SGD on the mean square of the outputs.
        data: As for `isobatch.model_parity.run_model`; random rows if it is `None`.
        size: Height and width of the images of an application.
        seconds: How long to time each choice.
        seed: Of random rows, and of the weights of an application.
        progress: Told what is being done, and how much of all has been.

    Returns:
        The report.

    Raises:
        BackendError: Keras or torch is not installed.
        DataError: The data do not fit the model, or have fewer rows than `batches` asks for.
        ModelError: There is no such model, or the choices do not predict the same.
        SpecError: The model has layers without a word in a spec.
    """
    progress("starting the frameworks", 0.0)
    for framework in reversed(FRAMEWORKS):  # torch must be loaded before TensorFlow
        get_backend(framework)
    make_room(max(replicas, default=1))
    model = load_keras_model(name, size, seed)
    models = {"keras": model, "torch": twin(model)}
    ways = {(framework, 0): models[framework] for framework in FRAMEWORKS}
    choices: list[Choice] = []
    complete = False
    try:
        for count in replicas:
            for framework in FRAMEWORKS:
                ways[framework, count] = _parallel(framework, models[framework], count)
        for number, rows in enumerate(batches):
            progress(f"{rows} rows", number / len(batches))
            inputs = _inputs(models["torch"], data, rows, seed)
            choices += _measure(ways, inputs, rows, seconds, training=training)
        complete = True
    except KeyboardInterrupt:
        if not choices:
            raise
    progress("done", 1.0)
    return BenchReport(name, training, tuple(choices), complete, versions())


def _parallel(framework: str, model: Any, count: int) -> Any:
    found = get_backend(framework).devices()
    there = [device for device in found if device.kind == found[0].kind]  # accelerators come first
    return data_parallel(model, [there[rank % len(there)] for rank in range(count)])


def _inputs(module: Any, data: Path | None, rows: int, seed: int) -> dict[str, Any]:
    """A batch as each side takes it."""
    spec = importlib.import_module("isobatch_torch.spec").spec_of(module)
    batch, _ = load_batch(spec, data, rows, seed)
    arrays = spec.bind(batch)
    ordered = [arrays[one.name] for one in spec.inputs]
    if len(ordered[0]) != rows:
        msg = f"Expected data of at least {rows} rows, got {len(ordered[0])}."
        raise DataError(msg)
    return {"keras": batch, "torch": ordered}


def _measure(
    ways: Mapping[tuple[str, int], Any],
    inputs: Mapping[str, Any],
    rows: int,
    seconds: float,
    *,
    training: bool,
) -> list[Choice]:
    calls = {}
    for (framework, count), model in ways.items():
        work = importlib.import_module(f"isobatch_{framework}.workload")
        make = work.step if training else work.forward
        calls[_title(framework, count)] = make(model, inputs[framework])
    gaps = _gaps(calls)
    if not training:  # where dropout and batch statistics differ between replicas
        _check(gaps)
    memory = {title: peak_memory(call) for title, call in calls.items()}
    timings: dict[str, Timing] = {}
    try:
        for timings in take_turns(calls, seconds=seconds):  # noqa: B007 - the last one has them all
            pass
    except KeyboardInterrupt:
        if not timings:
            raise
    return [
        Choice(framework, count, rows, timings[title], memory[title], gaps[title])
        for framework, count in ways
        for title in [_title(framework, count)]
    ]


def _gaps(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """How far from the first call's result the others' are."""
    import numpy as np

    results = {
        title: [np.asarray(leaf, "float64") for leaf in flatten(call())[0]] for title, call in calls.items()
    }
    first = next(iter(results.values()))
    return {title: compare(found, first, _WRONG).scaled for title, found in results.items()}


def _check(gaps: Mapping[str, float]) -> None:
    wrong = [f"{title} ({gap:.1e})" for title, gap in gaps.items() if gap > _WRONG]
    if wrong:
        msg = f"Expected all choices to compute the same, but scaled differences from {next(iter(gaps))} are: {', '.join(wrong)}."
        raise ModelError(msg)


def _title(framework: str, replicas: int) -> str:
    name = {"keras": "Keras"}.get(framework, framework)
    return f"{name} alone" if not replicas else f"{name} over {replicas} replica{'s' if replicas > 1 else ''}"
