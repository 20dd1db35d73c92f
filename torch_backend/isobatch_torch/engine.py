"""One parallel call: which replicas run, where, in which order, and what is learned for the next call."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

import torch
from torch import nn

from isobatch.backend import Replica, Result, Shard, StatePolicy, running
from isobatch.devices import Device
from isobatch.placement import Placement
from isobatch_torch.accelerators import current
from isobatch_torch.internals import is_confined
from isobatch_torch.memories import Memories
from isobatch_torch.random import part_streams, positions, shared_generators
from isobatch_torch.replicas import Copies
from isobatch_torch.stages import Stages
from isobatch_torch.state import Place, RunningState
from isobatch_torch.workers import Outcome, ThreadState, add_note, run_all, run_here

__all__ = ["Engine", "Schedule", "bound_call", "check_outcomes", "run_template"]

Schedule: TypeAlias = Literal["auto", "threads", "sequential"]
"""Replicas run at once, each in the worker of its rank (without gradients, the first in the caller's thread), or one after another there.

`"auto"` is `"threads"` on accelerators. On the CPU it is `"threads"` only where no gradients are recorded and replicas take a while:
the backward pass runs in the caller's thread with all cores, whose helpers go on spinning through the next forward pass, so that two
workers on two cores took 1.1 to 2.2 times the plain step where one replica after another took 0.8 to 1.3 times (bench/test_torch.py).
"""

_BRIEF = (
    2e-4  # seconds; threads that share the interpreter take turns, and turns take longer than such replicas
)
_MODES = 64  # combinations of method and training flags that are remembered


class Engine:
    """Runs a template's replicas.

    The first call in each mode (training or not) is a rehearsal: replicas run one after another, which shows what they do:
    update buffers, draw random numbers, make how many autograd nodes. Those that draw from one generator go on to run one
    after another, since threads would deal its numbers out by chance, and so do those that are over in no time.

    Args:
        template: The module to run.
        devices: One for each replica.
        placements: Where the parts of each replica run, if they run on different devices.

    >>> engine = Engine(nn.Linear(2, 1), [Device("cpu", 0), Device("cpu", 1)])
    >>> shards = [Shard(r, engine.devices[r], range(r, r + 1), 2, (torch.ones(1, 2),), {}) for r in range(2)]
    >>> [result.output.shape for result in engine.run("__call__", shards)]
    [torch.Size([1, 1]), torch.Size([1, 1])]
    """

    def __init__(
        self,
        template: nn.Module,
        devices: Sequence[Device],
        placements: Sequence[Placement] | None = None,
    ) -> None:
        self.template = template
        self.devices = devices
        self.stages = [Stages(one, one.devices[0]) for one in placements or ()]
        self.copies = Copies(template, len(devices))
        self.on_cpu = all(device.kind == "cpu" for device in devices)
        self.memories = Memories(devices, placements)
        self.generators = shared_generators(devices, [])
        self.habits: dict[Any, _Habits] = {}
        self.lock = threading.Lock()
        _ENGINES.add(self)

    def replicate(self) -> list[Replica[nn.Module]]:
        """Return all replicas, up to date with the template."""
        with self.lock:
            self.prepare(range(len(self.devices)))
        return [Replica(rank, device, self.copies.root(rank)) for rank, device in enumerate(self.devices)]

    def run(
        self,
        method: str,
        shards: Sequence[Shard],
        state: StatePolicy = "merge",
        schedule: Schedule = "auto",
    ) -> list[Result]:
        """Run a method of the replicas on their shards.

        Args:
            method: Its name; `"__call__"` for the forward pass with its hooks.
            shards: In rank order.
            state: What becomes of running state.
            schedule: At once or one after another.

        Returns:
            One result for each shard.

        Raises:
            BaseException: What the lowest failing replica raised, with a note that says which one it was.
        """
        with (
            self.lock
        ):  # calls from several threads: the workers are the same, and one may lend buffers to the replicas
            outcomes = self.perform(method, shards, state, schedule)
        return [Result(shard, outcome.value) for shard, outcome in zip(shards, outcomes, strict=True)]

    def perform(
        self, method: str, shards: Sequence[Shard], state: StatePolicy, schedule: Schedule
    ) -> list[Outcome]:
        """Do what `run` says, for one call at a time."""
        ranks = [shard.rank for shard in shards]
        self.prepare(ranks)
        mode = (method, state, self.copies.modes, self.copies.layout)
        known = self.habits.get(mode)
        confined = is_confined()
        live = (
            known.live if known else frozenset[Place]() if confined and not any(self.copies.modes) else None
        )
        kept = RunningState(self.copies, self.memories, ranks, state, live)
        calls = [
            kept.bind(position, bound_call(self.method(shard.rank, method), shard))
            for position, shard in enumerate(shards)
        ]
        gap = known.gap(state) if known else None
        here = confined or self.in_turn(schedule, gap)
        before = None if confined or (known and (gap is None or here)) else positions(self.generators)
        outcomes = self.call(calls, kept, here=here, gap=gap, schedule=schedule)
        check_outcomes(outcomes, shards)
        updated = kept.updated() | (known.live if known else frozenset())
        live = updated | kept.overwritten()
        kept.store([len(shard.rows or (None,)) for shard in shards], updated)
        if not confined:
            drew = before is not None and before != positions(self.generators)
            self.learn(mode, known, live, drew=drew, here=here, outcomes=outcomes)
        return outcomes

    def method(self, rank: int, name: str) -> Callable[..., Any]:
        """Return a method of a replica, with its parts on their devices if they have any."""
        root = self.copies.root(rank)
        return partial(self.stages[rank].run, root, name) if self.stages else getattr(root, name)

    def prepare(self, ranks: Sequence[int]) -> None:
        """Bring replicas up to date with the template."""
        if self.copies.refresh():
            self.memories.check(self.copies)
            self.generators = shared_generators(self.devices, [node.original for node in self.copies.nodes])
        self.memories.move(self.copies, ranks)
        if self.memories.away:
            part_streams(self.devices)

    def in_turn(self, schedule: Schedule, gap: int | None) -> bool:
        """Say whether a schedule lets replicas run one after another in the caller's thread."""
        if schedule == "auto":
            return self.on_cpu and (gap is None or torch.is_grad_enabled())
        return schedule == "sequential"

    def call(
        self,
        calls: Sequence[Callable[[], Any]],
        kept: RunningState,
        *,
        here: bool,
        gap: int | None,
        schedule: Schedule,
    ) -> list[Outcome]:
        """Make the replicas' calls, and take their state back."""
        threads = torch.get_num_threads()
        # Without gradients the next call may run in workers: the bits must not depend on which it is.
        if not here or (schedule == "auto" and not torch.is_grad_enabled()):
            threads = max(1, threads // len(self.devices))
        state = ThreadState.capture(threads)
        try:
            return run_here(calls, state) if here else run_all(calls, kept.ranks, state, gap)
        except BaseException:
            self.copies = Copies(
                self.template, len(self.devices)
            )  # workers may go on for a while with the old ones
            raise
        finally:
            kept.take_back()

    def learn(
        self,
        mode: Any,
        known: _Habits | None,
        live: frozenset[Place],
        *,
        drew: bool,
        here: bool,
        outcomes: Sequence[Outcome],
    ) -> None:
        """Remember what a call has shown about a mode."""
        nodes = max(outcome.nodes for outcome in outcomes)
        seconds = max(outcome.seconds for outcome in outcomes)
        if torch.is_grad_enabled():
            nodes = max(nodes, 1)
        if known is None:
            if len(self.habits) >= _MODES:
                self.habits.clear()
            self.habits[mode] = _Habits(live, drew, nodes, seconds)
            return
        known.seconds = min(known.seconds, seconds)
        surprises = ["drew random numbers"] if drew and not here and not known.draws else []
        surprises += [f"updated {'.'.join(filter(None, place))}" for place in sorted(live - known.live)]
        known.live, known.draws, known.nodes = live, known.draws or drew, max(known.nodes, nodes)
        if surprises:
            msg = (
                f"Replicas {', '.join(surprises)} for the first time, which the calls before had not shown: this call is not "
                "reproducible. From now on it is taken into account."
            )
            warnings.warn(msg, RuntimeWarning, stacklevel=2)


def _unlock() -> None:
    """In a forked child: forget calls that other threads of the parent were making."""
    for engine in _ENGINES:
        engine.lock = threading.Lock()


_ENGINES: WeakSet[Engine] = WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


@dataclass(slots=True)
class _Habits:
    """What replicas do in one mode."""

    live: frozenset[Place]
    draws: bool
    nodes: int  # most autograd nodes that one replica made; 0 where none recorded yet
    seconds: float  # shortest that the longest replica took

    def gap(self, state: StatePolicy) -> int | None:
        """Return how far apart the workers' counters of autograd nodes have to be; `None` if replicas cannot run at once."""
        if self.draws or self.seconds < _BRIEF or (torch.is_grad_enabled() and not self.nodes):
            return None
        if state == "sequential" and self.live:
            return None
        return 4 * self.nodes + 100


def run_template(template: nn.Module, method: str, shard: Shard) -> Result:
    """Run the template itself, in the caller's thread: the only replica of a call.

    Args:
        template: The module.
        method: Its method's name.
        shard: What it gets.
    """
    token = running.set(shard)
    try:
        with current(shard.device):
            return Result(shard, getattr(template, method)(*shard.args, **shard.kwargs))
    except BaseException as error:
        add_note(error, f"in {shard}")
        raise
    finally:
        running.reset(token)


def bound_call(method: Callable[..., Any], shard: Shard) -> Callable[[], Any]:
    """Return the call of a replica on its shard, on its device; to be made in a context of its own.

    Args:
        method: The replica or a method of it.
        shard: What it gets.
    """
    place = current(shard.device)  # with the caller's stream

    def call() -> Any:
        running.set(shard)
        with place:
            return method(*shard.args, **shard.kwargs)

    return call


def check_outcomes(outcomes: Sequence[Outcome], shards: Sequence[Shard]) -> None:
    """Raise the error of the lowest failing replica, if any.

    Args:
        outcomes: What came of the calls.
        shards: What they were made with.

    Raises:
        BaseException: That error, with a note that says where it came from.
    """
    errors = [outcome.error for outcome in outcomes]
    for outcome in outcomes:
        outcome.error = None  # its traceback will refer to frames that refer to the outcomes
    for error, shard in zip(errors, shards, strict=False):
        if error is None:
            continue
        add_note(error, f"in {shard}")
        if "more than 1 value per channel" in str(error):
            rows = ", ".join(str(len(shard.rows or ())) for shard in shards)
            add_note(
                error,
                f"The replicas got {rows} rows; min_rows=2 uses fewer replicas rather than give one a single row.",
            )
        try:
            raise error
        finally:
            del error, errors
