"""Two sides train on the same batches; the first step and tensor where they part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from isobatch.compare import Comparison, compare
from isobatch.counted import Counted

if TYPE_CHECKING:
    import numpy as np

__all__ = ["FLOOR", "Parting", "Side", "Step", "Trajectory", "follow"]

FLOOR = 1e-9
"""The greatest scaled gap of a step in float64 that rounding explains."""

Arrays = Mapping[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of training did.

    Args:
        loss: Before the step.
        gradients: Of every trained weight, by key.
        weights: After the step, running statistics included, by key.
    """

    loss: float
    gradients: Arrays
    weights: Arrays


class Side(Protocol):
    """A network in one framework while it is trained."""

    name: str

    def step(self, batch: tuple[Any, ...]) -> Step:
        """Train on one batch, `(inputs, targets)` or `(inputs, targets, sample_weight)`, and tell what it did."""
        ...

    def counting(self, counted: Counted) -> Any:
        """Return a context in which dropout draws counted numbers, the same in both frameworks."""
        ...


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two sides part.

    Args:
        step: Which step, counted from 1.
        part: What was looked at: `"loss"`, `"gradients"` or `"weights"`.
        check: How far they are apart there; its path is the tensor's key.
    """

    step: int
    part: str
    check: Comparison

    def __str__(self) -> str:
        return f"step {self.step}, {self.part}, {self.check.path}: {self.check}"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Two trainings side by side.

    Args:
        sides: Their names.
        allowed: The greatest scaled gap that passes.
        steps: How many steps were taken.
        gaps: The greatest scaled gap of each part over all steps.
        partings: Where they part first: all tensors that are apart in the first part of the first step that has any, the worst first.
        losses: Of each side, step by step.
    """

    sides: tuple[str, str]
    allowed: float
    steps: int
    gaps: Mapping[str, float]
    partings: tuple[Parting, ...]
    losses: tuple[Sequence[float], Sequence[float]]

    @property
    def passed(self) -> bool:
        """Whether the sides never parted."""
        return not self.partings

    def __str__(self) -> str:
        gaps = ", ".join(f"{part} {gap:.1e}" for part, gap in self.gaps.items())
        names = f"{self.sides[0]} and {self.sides[1]}"
        if self.passed:
            return (
                f"PASS: {names} agree over {self.steps} steps in float64 ({gaps}; {self.allowed:.0e} allowed)"
            )
        first, *rest = self.partings
        others = f", and {len(rest)} more tensors there" if rest else ""
        return f"FAIL: {names} part at {first}{others}"


def follow(
    a: Side,
    b: Side,
    batches: Iterable[tuple[Any, ...]],
    *,
    allowed: float = FLOOR,
    dropout_seed: int | None = None,
) -> Trajectory:
    """Train both sides on the same batches and compare them step by step.

    Args:
        a: One side.
        b: The other, taken as right.
        batches: Tuples `(inputs, targets)` or `(inputs, targets, sample_weight)`, each for one step.
        allowed: The greatest scaled gap that passes; a tensor is scaled by its own greatest value, a gradient by that of all.
        dropout_seed: Lets dropout layers draw the numbers of `Counted` on both sides; `None`: each draws its own.

    Returns:
        The verdict.
    """
    gaps: dict[str, float] = {}
    partings: tuple[Parting, ...] = ()
    losses: tuple[list[float], list[float]] = [], []
    count = 0
    with ExitStack() as stack:
        counts = [None if dropout_seed is None else Counted(dropout_seed) for _ in range(2)]
        for side, counted in zip((a, b), counts, strict=True):
            if counted is not None:
                stack.enter_context(side.counting(counted))
        for count, batch in enumerate(batches, 1):
            for counted in counts:
                if counted is not None:
                    counted.start(count)
            ours, theirs = a.step(batch), b.step(batch)
            losses[0].append(ours.loss)
            losses[1].append(theirs.loss)
            for part, checks in _checks(ours, theirs, allowed):
                gaps[part] = max([gaps.get(part, 0.0), *(check.scaled for check in checks)])
                wrong = sorted(
                    (check for check in checks if not check.passed), key=lambda check: -check.scaled
                )
                partings = partings or tuple(Parting(count, part, check) for check in wrong)
    return Trajectory((a.name, b.name), allowed, count, gaps, partings, losses)


def _checks(a: Step, b: Step, allowed: float) -> Iterator[tuple[str, list[Comparison]]]:
    """Compare two steps part by part, in the order in which a fault would show."""
    import numpy as np

    yield "loss", [_named("loss", np.asarray(a.loss), np.asarray(b.loss), allowed)]
    # A gradient that is zero but for rounding, such as that of a bias before BatchNorm, has no size of its own.
    whole = max((float(np.abs(one).max()) for one in b.gradients.values() if one.size), default=0.0) or 1.0
    yield "gradients", _each(a.gradients, b.gradients, allowed, whole)
    yield "weights", _each(a.weights, b.weights, allowed, None)


def _each(a: Arrays, b: Arrays, allowed: float, scale: float | None) -> list[Comparison]:
    import numpy as np

    if set(a) != set(b):
        return [compare(dict.fromkeys(sorted(a), 0), dict.fromkeys(sorted(b), 0), allowed)]
    found = []
    for key, expected in b.items():
        own = float(np.max(np.abs(expected), initial=0.0))
        factor = 1.0 if scale is None or not own else own / scale
        check = _named(key, a[key], expected, allowed / factor if own else allowed)
        found.append(replace(check, scaled=check.scaled * factor, allowed=allowed))
    return found


def _named(name: str, a: Any, b: Any, allowed: float) -> Comparison:
    return replace(compare(a, b, allowed), path=name)
