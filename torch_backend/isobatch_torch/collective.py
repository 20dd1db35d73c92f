"""What processes tell each other, through `torch.distributed`: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from isobatch.clusters import whereabouts
from isobatch.errors import ClusterError

__all__ = ["TorchCollective", "at_exit", "connect", "explain"]

_ROLL_CALL = 3  # seconds within which a process that is still there notices that another one is not


class TorchCollective:
    """The processes of the default group.

    Args:
        rank: This process.
        size: How many there are.
        store: Where they write to each other without a group; it outlives a lost process, except under rank 0 without an agent.
    """

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank = rank
        self.size = size
        self.store = store
        self.people = [whereabouts()]
        self.people = self.exchange(whereabouts())

    def sum(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the sum of all processes' arrays; the same bits everywhere."""
        tensor = torch.from_numpy(np.array(array, copy=True, order="C"))
        self.add_up(tensor)
        return tensor.numpy()

    def concatenate(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return all processes' arrays, by rank along the first axis."""
        lengths = np.zeros(self.size, "int64")
        lengths[self.rank] = len(array)
        lengths = self.sum(lengths)
        own = torch.zeros((int(lengths.max()), *array.shape[1:]), dtype=torch.from_numpy(array[:0]).dtype)
        own[: len(array)] = torch.from_numpy(np.array(array, copy=True, order="C"))
        parts = [torch.empty_like(own) for _ in lengths]
        with self.noticing():
            dist.all_gather(parts, own)
        return torch.cat(
            [part[:length] for part, length in zip(parts, lengths.tolist(), strict=True)]
        ).numpy()

    def first(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the array of rank 0."""
        tensor = torch.from_numpy(np.array(array, copy=True, order="C"))
        with self.noticing():
            dist.broadcast(tensor, 0)
        return tensor.numpy()

    def exchange(self, value: Any) -> list[Any]:
        """Return every process's value, by rank."""
        found: list[Any] = [None] * self.size
        with self.noticing():
            dist.all_gather_object(found, value)
        return found

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a tensor by the sum of all processes' ones, and return it."""
        with self.noticing():
            dist.all_reduce(tensor)
        return tensor

    def start_to_add_up(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return what waits for the sum of all processes' tensors, and returns it."""
        with self.noticing():
            work: Any = dist.all_reduce(tensor, async_op=True)

        def wait() -> torch.Tensor:
            with self.noticing():
                work.wait()
            return tensor

        return wait

    @contextmanager
    def noticing(self) -> Generator[None]:
        """Say which process is missing where the engine only says that a connection is."""
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            if isinstance(error, ClusterError):
                raise
            msg = self.missing() or "Expected every process to take part in a step, not all did in time."
            raise ClusterError(msg) from error

    def missing(self) -> str:
        """Return a sentence that says which processes do not answer any more; an empty one if all do."""
        silent = set(range(self.size)) - {self.rank}
        try:
            self.store.set(f"isobatch/here/{self.rank}", "")
            end = time.monotonic() + _ROLL_CALL
            while silent and time.monotonic() < end:
                silent -= {rank for rank in silent if self.store.check([f"isobatch/here/{rank}"])}
                time.sleep(0.05)
        except (dist.DistError, RuntimeError):
            silent = {0}  # the store was with it
        if not silent or len(self.people) < self.size:
            return ""
        who = "; ".join(f"rank {rank}, {self.people[rank]}" for rank in sorted(silent))
        return f"Lost {who}. The others cannot go on without it."


def explain(error: BaseException) -> None:
    """Add to an error of the engine which process is missing, where DistributedDataParallel raised it by itself.

    Args:
        error: Any error that is about to end the process.
    """
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
    if not _connected or not isinstance(error, RuntimeError) or isinstance(error, ClusterError):
        return
    if any(word in str(error) for word in words) and (missing := _connected[0].missing()):
        error.add_note(missing)


_connected: list[TorchCollective] = []


def connect(rank: int, size: int, timeout: float) -> TorchCollective:
    """Meet the other processes at the address in the environment, once; later calls return the same.

    Args:
        rank: This process.
        size: How many there are to be.
        timeout: Seconds to wait, here and in every step.

    Raises:
        ClusterError: They did not come in time, or the address is taken by something else.
    """
    if _connected:
        return _connected[0]
    try:
        if not dist.is_initialized():
            store, *_ = next(iter(rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout))))
            # torchrun keeps its store over a restart, with the addresses of the processes before (seen with torch 2.13).
            attempt = c10d.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            dist.init_process_group(
                store=attempt, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
            )
            atexit.register(_leave)
            sys.excepthook = partial(_report, sys.excepthook)
        if (dist.get_rank(), dist.get_world_size()) != (rank, size):
            msg = f"Expected rank {rank} of {size} processes, got a group in which this is rank {dist.get_rank()} of {dist.get_world_size()}."
            raise ClusterError(msg)
        _connected.append(TorchCollective(rank, size, c10d._get_default_store()))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - no public way
    except (dist.DistError, RuntimeError, ValueError) as error:
        if isinstance(error, ClusterError):
            raise
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        msg = (
            f"Expected {size} processes to meet at {where} within {timeout:g} s, this one is rank {rank}: {error} "
            "Check that every process is told the same address and WORLD_SIZE, that all are started, and that nothing else listens there."
        )
        raise ClusterError(msg) from error
    return _connected[0]


def _report(report: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: Any) -> None:
    explain(error)
    report(kind, error, trace)


def at_exit(release: Callable[[], None]) -> None:
    """Have something let go of the group when this process ends.

    Args:
        release: Called before the group is taken down.
    """
    _holding.append(release)


_holding: list[Callable[[], None]] = []


def _leave() -> None:
    """Take the group down while Python is still whole.

    gloo's threads may hold tensors, and abort the process if they drop them later (pytorch/pytorch#190489, seen with torch 2.13). A
    process that fails must not wait for the others.
    """
    if hasattr(sys, "last_value"):
        return
    _connected.clear()
    with suppress(Exception):
        for release in _holding:
            release()
        gc.collect()
        dist.destroy_process_group()
        gc.collect()
