"""The threads that replicas run in, and what of the caller's thread they take over.

There is one thread for each rank, shared by all models, started when first needed and kept. Autograd adds up gradients in the
order of per-thread counters, later nodes first; each thread is therefore kept ahead of the one before it, so that the gradients
of shared weights are added from the last rank to the first: the order, and the bits, of a plain loop over the shards.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from time import thread_time
from typing import Any

import torch

from isobatch_torch.accelerators import KIND
from isobatch_torch.internals import function_modes, make_nodes, node_count, set_grad_mode

__all__ = ["Outcome", "ThreadState", "add_note", "run_all", "run_here"]


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error that does not have it yet."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


@dataclass(slots=True)
class Outcome:
    """What came of one call: a value or an error; how many autograd nodes and how much of its thread's time it took."""

    value: Any = None
    error: BaseException | None = None
    nodes: int = 0
    seconds: float = 0.0

    def run(self, call: Callable[[], Any]) -> None:
        """Make the call and note what came of it."""
        start, begin = node_count(), thread_time()
        try:
            self.value = call()
        except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are the caller's to handle
            # Without this frame: it would close a cycle from the error to this outcome.
            self.error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        self.nodes, self.seconds = node_count() - start, thread_time() - begin


def run_here(calls: Sequence[Callable[[], Any]], state: ThreadState) -> list[Outcome]:
    """Make calls one after another in this thread, up to the first that fails.

    Args:
        calls: One for each replica.
        state: This thread's own; what a call leaves switched is switched back.

    Returns:
        As many outcomes as calls were made.

    >>> [outcome.value for outcome in run_here([lambda: 1, lambda: 2], ThreadState.capture(threads=1))]
    [1, 2]
    """
    outcomes: list[Outcome] = []
    before, cache = torch.get_num_threads(), torch.is_autocast_cache_enabled()
    if state.threads != before:
        torch.set_num_threads(state.threads)
    state.apply()
    try:
        for call in calls:
            outcomes.append(Outcome())
            copy_context().run(outcomes[-1].run, call)
            state.apply()
            if outcomes[-1].error is not None:
                break
    finally:
        torch.set_autocast_cache_enabled(cache)
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
    return outcomes


def run_all(
    calls: Sequence[Callable[[], Any]], ranks: Sequence[int], state: ThreadState, gap: int | None
) -> list[Outcome]:
    """Make calls in the workers of their ranks; where no gradients are recorded, the caller makes the first one itself meanwhile.

    Args:
        calls: One for each replica.
        ranks: Which worker each call belongs to, ascending.
        state: What the workers take over.
        gap: Autograd nodes that one call is taken to make at most. `None`: unknown, the calls run one after another,
            up to the first that fails.

    Returns:
        As many outcomes as calls were made.

    Raises:
        KeyboardInterrupt: The user interrupted the wait; the workers end by themselves when their calls return.

    >>> state = ThreadState.capture(threads=1)
    >>> [outcome.value for outcome in run_all([lambda: 1, lambda: 2], [0, 1], state, gap=0)]
    [1, 2]
    """
    workers = _POOL.take(max(ranks) + 1)
    own = int(gap is not None and not state.grad)  # saves waking a worker, and often being woken by it
    resized = any(workers[rank].progress.threads != state.threads for rank in ranks[own:])
    done: SimpleQueue[None] = SimpleQueue()
    jobs: list[_Job] = []
    first: list[Outcome] = []
    floor = 0
    for call, rank in zip(calls, ranks, strict=True):
        floor = max(floor, workers[rank].progress.nodes) if state.grad else 0
        jobs.append(_Job(call, copy_context(), state, floor, workers[rank].jobs, done))
        floor += gap or 0
    try:
        if gap is None:
            for job, follower in pairwise(jobs):
                job.follower = follower
            jobs[0].post()
            done.get()
        else:
            for job in jobs[own:]:
                job.post()
            first = run_here(calls[:own], state)
            for _ in jobs[own:]:
                done.get()
    except BaseException:
        _POOL.reset()
        raise
    finally:
        if resized:  # a worker's number of threads became the one that new threads start with
            torch.set_num_threads(torch.get_num_threads())
    return first + [job.outcome for job in jobs if job.ran]


@dataclass(frozen=True, slots=True)
class ThreadState:
    """What of a thread's state torch keeps for each thread alone.

    Args:
        grad: Whether autograd records.
        inference: Whether inference mode is on.
        autocast: Kind of device, whether autocast is on there, and its type.
        autocast_cache: Whether autocast keeps casts of weights.
        default_device: Where new tensors are made, `None` for torch's own choice.
        threads: Threads that one operation may use.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_device: torch.device | None
    threads: int

    @classmethod
    def capture(cls, threads: int) -> ThreadState:
        """Return the calling thread's state.

        Args:
            threads: Threads that one operation may use in a worker.
        """
        grad = torch.is_grad_enabled()
        autocast = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _AUTOCAST_KINDS
        )
        # The cache of casts is one for all threads. Replicas that shared a cast would have their gradients added in its
        # narrow type, in the order in which they came to make it.
        cache = torch.is_autocast_cache_enabled() and not (grad and any(on for _, on, _ in autocast))
        device = torch.get_default_device() if function_modes() else None
        return cls(grad, torch.is_inference_mode_enabled(), autocast, cache, device, threads)

    def apply(self) -> None:
        """Give the calling thread this state, but for what only a context can give."""
        set_grad_mode(self.grad)
        for kind, on, dtype in self.autocast:
            torch.set_autocast_enabled(kind, on)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)

    def context(self) -> AbstractContextManager[Any]:
        """Return a context that gives the rest of it."""
        if not self.inference and self.default_device is None:
            return _NOTHING
        stack = ExitStack()
        if self.inference:
            stack.enter_context(torch.inference_mode())
            set_grad_mode(self.grad)
        if self.default_device is not None:
            stack.enter_context(self.default_device)
        return stack


@dataclass(slots=True)
class _Job:
    call: Callable[[], Any]
    context: Context  # the caller's context variables
    state: ThreadState
    floor: int  # where the counter of autograd nodes has to be at least
    queue: SimpleQueue[_Job | None]  # of its worker
    done: SimpleQueue[None]
    follower: _Job | None = None  # what is to run after it, if it succeeds
    outcome: Outcome = field(default_factory=Outcome)
    ran: bool = False

    def post(self) -> None:
        self.queue.put(self)

    def run(self) -> None:
        self.ran = True
        try:
            self.state.apply()
            with self.state.context():
                _advance(self.floor)
                self.context.run(self.outcome.run, self.call)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller must not wait for ever
            self.outcome.error = error

    def next(self) -> Callable[[], None]:
        """Return what its worker has to do when it has forgotten this job."""
        if self.follower is None or self.outcome.error is not None:
            return partial(self.done.put, None)
        self.follower.floor = max(self.follower.floor, node_count() if self.state.grad else 0)
        return self.follower.post


class _Worker:
    """A thread that makes one rank's calls; it ends when nobody refers to this object any more."""

    def __init__(self, rank: int) -> None:
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.progress = _Progress()
        threading.Thread(
            target=_serve, args=(self.jobs, self.progress), name=f"isobatch-{rank}", daemon=True
        ).start()
        weakref.finalize(self, self.jobs.put, None).atexit = False


@dataclass(slots=True)
class _Progress:
    nodes: int = 0  # autograd nodes made so far
    threads: int = 0  # threads that one operation may use now


def _serve(jobs: SimpleQueue[_Job | None], progress: _Progress) -> None:
    torch.get_num_threads()  # a thread's first use of it sets the number anew
    while (job := jobs.get()) is not None:
        if progress.threads != job.state.threads:
            progress.threads = job.state.threads
            torch.set_num_threads(progress.threads)
        job.run()
        progress.nodes = node_count()
        proceed = job.next()
        del job  # nothing of a call outlives it
        proceed()
        del proceed


class _Pool:
    """All workers of this process."""

    def __init__(self) -> None:
        self.reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.reset)  # threads do not survive a fork

    def reset(self) -> None:
        """Use new workers from now on."""
        self.workers: list[_Worker] = []
        self.lock = threading.Lock()

    def take(self, count: int) -> list[_Worker]:
        with self.lock:
            while len(self.workers) < count:
                self.workers.append(_Worker(len(self.workers)))
            return self.workers[:count]


def _advance(floor: int) -> None:
    """Bring this thread's counter of autograd nodes up to a number."""
    while (missing := floor - node_count()) > 0:
        make_nodes(min(missing, 1000))


_NOTHING: AbstractContextManager[Any] = nullcontext()
_AUTOCAST_KINDS = ("cpu",) if KIND is None else ("cpu", KIND)
_POOL = _Pool()
