"""How long calls take beside each other: taken in turns, so that what else the machine does meets all of them alike."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Ratio", "Timing", "keep_memory", "peak_memory", "ratio", "take_turns"]

NOISY = 0.2
"""A spread above this marks a timing as noisy."""

_SHORTEST = 0.05  # seconds of a sample; shorter calls are repeated within it
# Seconds of calls before a sample that are not counted. Threads that one call leaves spinning take a core from the next: on two cores,
# replicas in two threads took 1.3 to 1.5 times the plain forward pass right behind it, and 0.5 to 0.7 times when among themselves.
_SETTLING = 0.03
_RESAMPLES = 2000
# Of <malloc.h>: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD; see mallopt(3).
_MALLOC = {-1: 2**30, -2: 2**26, -3: 2**30}
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one call took, in each of several turns.

    Args:
        seconds: One for each turn.

    >>> Timing((0.2, 0.1, 0.3)).median
    0.2
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds of the median turn."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The middle half of the turns, as wide as it is, divided by the median."""
        low, _, high = statistics.quantiles(self.seconds, n=4) if len(self.seconds) > 1 else [0.0] * 3
        return (high - low) / self.median

    @property
    def noisy(self) -> bool:
        """Whether the turns differ so much that the machine was busy with something else."""
        return self.spread > NOISY


@dataclass(frozen=True, slots=True)
class Ratio:
    """One timing divided by another.

    Args:
        value: Ratio of the medians.
        low: Lower end of its 95 % interval.
        high: Upper end.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(one: Timing, other: Timing) -> Ratio:
    """Return how many times as long as another call one took, and how sure that is.

    The interval is the percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13) over turns; turns
    taken together are drawn together.

    Args:
        one: Timing of the call.
        other: Timing of what it is held against.

    >>> print(ratio(Timing((2.0, 2.0, 2.0)), Timing((1.0, 1.0, 1.0))))
    2.00 (2.00 to 2.00)
    """
    import numpy as np

    rng = np.random.default_rng(0)
    a, b = np.asarray(one.seconds), np.asarray(other.seconds)
    first = rng.integers(0, len(a), (_RESAMPLES, len(a)))
    second = first if len(a) == len(b) else rng.integers(0, len(b), (_RESAMPLES, len(b)))
    ratios = np.median(a[first], axis=1) / np.median(b[second], axis=1)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return Ratio(one.median / other.median, float(low), float(high))


def take_turns(
    calls: Mapping[str, Callable[[], Any]], *, seconds: float = 2.0, turns: tuple[int, int] = (5, 200)
) -> Iterator[dict[str, Timing]]:
    """Time calls in turns; each turn samples every call, and starts with another one.

    Short calls are repeated in a sample, after some that are not counted, in which the machine forgets the call before. The
    process keeps freed memory from then on: see `keep_memory`.

    Args:
        calls: By name. Each must have done all of its work when it returns.
        seconds: How long to go on, for each call.
        turns: At least and at most so many.

    Yields:
        After each turn, the timings so far by name; whoever stops early loses nothing.

    >>> *_, last = take_turns({"short": lambda: sum(range(10)), "long": lambda: sum(range(10_000))}, seconds=0.1)
    >>> ratio(last["long"], last["short"]).low > 2
    True
    """
    repeats = {name: _repeats(call) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    names, end = list(calls), time.perf_counter() + seconds * len(calls)
    keep_memory()
    with _uncollected():
        for turn in range(turns[1]):
            if turn >= turns[0] and time.perf_counter() > end:
                return
            for name in _rotated(names, turn):
                found[name].append(_sample(calls[name], repeats[name]))
            yield {name: Timing(tuple(samples)) for name, samples in found.items()}


def keep_memory() -> None:
    """Let the C library keep what is freed, in this process from now on; where it is not the GNU one, nothing happens.

    By chance it gives memory back after every call and fetches it again, page by page, for the next: a transformer's forward pass of
    1.9 ms took 3.9 ms in two processes of three (0 page faults a call, or 1000).

    >>> keep_memory()
    """
    if os.name == "posix" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        for option, number in _MALLOC.items():
            mallopt(option, number)


def peak_memory(call: Callable[[], Any]) -> int | None:
    """Return how many bytes of memory the process takes more at its peak while a call is made; `None` where Linux does not tell.

    Args:
        call: Made once.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)  # gives back what calls before have left in the C library's hands
        _RESET.write_text("5", encoding="ascii")  # sets the peak to what is taken now
        before = _kilobytes("VmRSS")
    except (OSError, AttributeError):
        return None
    call()
    return 1024 * max(0, _kilobytes("VmHWM") - before)


def _kilobytes(key: str) -> int:
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(key))
    return int(line.split()[1])


def _repeats(call: Callable[[], Any]) -> int:
    """How often a call is made within one sample, after two that warm it up."""
    for _ in range(2):
        call()
    return max(1, round(_SHORTEST / max(_sample(call, 1), 1e-9)))


def _sample(call: Callable[[], Any], repeats: int) -> float:
    settled = time.perf_counter() + _SETTLING
    while repeats > 1 and time.perf_counter() < settled:
        call()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


def _rotated(names: Sequence[str], turn: int) -> list[str]:
    first = turn % len(names)
    return [*names[first:], *names[:first]]


@contextmanager
def _uncollected() -> Generator[None]:
    """Keep the garbage collector from striking one call of a turn."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
