"""Processes that train one model together: which there are, who gets which rows, and what they tell each other.

A launcher such as `torchrun` starts the same script several times and says in the environment who is who. What the processes
tell each other goes through `torch.distributed`, which every process under that launcher has, whatever its models are made of.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from isobatch.backend import Options
from isobatch.devices import Device, DeviceRequest
from isobatch.errors import ClusterError, DeviceError
from isobatch.rows import row_stop

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "Batches",
    "Cluster",
    "Collective",
    "cluster",
    "cluster_of",
    "emptied",
    "whereabouts",
    "write_whole",
]

_SETTINGS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class Collective(Protocol):
    """What the processes of a cluster can do together; each of them has to do it, in the same order."""

    def sum(self, array: Any) -> Any:
        """Return the sum of all processes' numpy arrays of one shape and type, the same bits everywhere."""
        ...

    def concatenate(self, array: Any) -> Any:
        """Return all processes' numpy arrays, by rank along the first axis; they may differ in length there."""
        ...

    def first(self, array: Any) -> Any:
        """Return the numpy array of rank 0."""
        ...

    def exchange(self, value: Any) -> list[Any]:
        """Return every process's value, by rank; anything that pickles."""
        ...


class _Alone:
    """One process, which has nobody to talk to."""

    def sum(self, array: Any) -> Any:
        return array

    def concatenate(self, array: Any) -> Any:
        return array

    def first(self, array: Any) -> Any:
        return array

    def exchange(self, value: Any) -> list[Any]:
        return [value]


@dataclass(frozen=True, slots=True)
class Cluster:
    """All devices of all processes that a launcher has started, as seen from one of them.

    Args:
        rank: This process, counted from 0 over all hosts.
        size: How many processes there are.
        local_rank: This process, counted from 0 on its host.
        devices: Where the replicas of this process are to be; `None`: the accelerator of its local rank, or one CPU replica.
        collective: How it talks to the others.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    devices: DeviceRequest = None
    collective: Collective = field(default_factory=_Alone, repr=False, compare=False)

    def local_devices(self, visible: Sequence[Device]) -> DeviceRequest:
        """Return what to ask for as the devices of this process.

        Args:
            visible: What the framework sees.

        Raises:
            DeviceError: This host has fewer accelerators than processes.

        >>> Cluster(1, 2, 1).local_devices([Device("cpu"), Device("gpu", 0), Device("gpu", 1)])
        [Device(kind='gpu', index=1)]
        """
        accelerators = [device for device in visible if device.kind != "cpu"]
        if self.devices is not None or self.size == 1 or not accelerators:
            return self.devices
        if self.local_rank >= len(accelerators):
            msg = (
                f"Expected an accelerator for the process of local rank {self.local_rank}, got {len(accelerators)}: "
                f"{', '.join(map(str, accelerators))}. Start fewer processes on this host, or say which to use: isobatch.cluster(devices=...)."
            )
            raise DeviceError(msg)
        return [accelerators[self.local_rank]]

    def check(self, options: Options) -> None:
        """Raise unless several processes can go by these options.

        Args:
            options: Of a parallel model.

        Raises:
            ValueError: `state="sequential"`, which would have processes wait for each other, or `scalars="stack"`, of whose numbers each
                process has its own.

        >>> Cluster().check(Options(state="first"))
        """
        for name, got, others in (
            ("state", options.state, ("merge", "first")),
            ("scalars", options.scalars, ("mean", "sum")),
        ):
            if got not in others:
                msg = f"Expected {name} to be one of {others} in a cluster, got {got!r}."
                raise ValueError(msg)

    def rows(self, batch: int) -> range:
        """Return which rows of a whole batch are this process's: by rank, sizes differing by at most one.

        Args:
            batch: Rows of the whole batch.

        >>> [list(Cluster(rank, 2).rows(5)) for rank in range(2)]
        [[0, 1, 2], [3, 4]]
        """
        return range(*self._bounds(batch))

    def shard(self, *batch: Any) -> Any:
        """Return this process's rows of a whole batch.

        It works on arrays of any framework, and in a traced graph too: `dataset.map(cluster.shard)` shards a `tf.data.Dataset`
        of whole batches, `map(cluster.shard, loader)` any other iterable of them.

        Args:
            *batch: Arrays `(B, ...)`, or containers of them; those without an axis, and what is no array, go to every process.

        Returns:
            The same with `B / size` rows; a tuple if several were given.

        >>> import numpy as np
        >>> Cluster(1, 2).shard(np.arange(5), {"label": np.arange(5) % 2})
        (array([3, 4]), {'label': array([1, 0])})
        """
        from isobatch.trees import flatten, unflatten

        leaves, spec = flatten(batch, _has_rows)
        result = unflatten(spec, [self._part(leaf) if _has_rows(leaf) else leaf for leaf in leaves])
        return result if len(batch) > 1 else result[0]

    def batches(self, rows: int, size: int, *, shuffle: bool = False, seed: int = 0) -> Batches:
        """Return which rows of a data set this process gets in each step of an epoch.

        Args:
            rows: Of the whole data set.
            size: Rows of a whole batch; the last one may be smaller.
            shuffle: Whether to deal them in another order in each epoch.
            seed: Of that order, which is the same in every process, and for any number of them.

        >>> [rows.tolist() for rows in Cluster(1, 2).batches(5, 4)]
        [[2, 3], []]
        """
        return Batches(self, rows, size, shuffle, seed)

    def even(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield this process's batches, and then empty ones until every process has had all of its own.

        So a process that has fewer batches takes part in every step, with no rows in the last ones.

        Args:
            batches: Batches of rows of this process.

        Yields:
            As many batches in every process.

        Raises:
            ClusterError: No process has shown yet what a batch is like, or this one never had any.
        """
        import numpy as np

        empty, source = None, iter(batches)
        for batch in source:
            self.collective.sum(np.ones(1))
            empty = batch
            yield batch
        while self.collective.sum(np.zeros(1))[0]:
            if empty is None:
                msg = f"Expected at least one batch on every rank, got none on rank {self.rank}: what an empty batch is like is not known."
                raise ClusterError(msg)
            yield emptied(empty)

    def mean(self, value: Any, rows: int) -> Any:
        """Return the mean over all processes of numbers that each has computed on its rows, such as a loss.

        Args:
            value: A number, or an array of any framework on the CPU.
            rows: What it counts for: the rows it was computed on, 0 or more.

        Returns:
            A float, or a numpy array of the value's shape, in float64.

        >>> Cluster().mean(0.25, rows=33)
        0.25
        """
        import numpy as np

        own = np.asarray(value.detach() if hasattr(value, "detach") else value, dtype="float64")
        parts = np.append(own.reshape(-1) * rows if rows else np.zeros(own.size), float(rows))
        parts = self.collective.sum(parts)
        mean = (parts[:-1] / parts[-1]).reshape(own.shape) if parts[-1] else np.full(own.shape, np.nan)
        return mean if own.shape else float(mean)

    def save(self, path: str | os.PathLike[str], write: Callable[[Path], Any]) -> None:
        """Let rank 0 write a file, whole or not at all; the others wait until it is there.

        Args:
            path: The file; one that is there is replaced in one step.
            write: Called in rank 0 with the path of a new file beside it, of the same suffix.

        Raises:
            Exception: What `write` raised; in the other processes a `ClusterError` that says so.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Cluster().save(f"{folder}/a.txt", lambda file: file.write_text("whole"))
        ...     os.listdir(folder)
        ['a.txt']
        """
        from pathlib import Path

        failure: BaseException | None = None
        if self.rank == 0:
            try:
                write_whole(Path(path), write)
            except BaseException as error:  # noqa: BLE001 - raised below, after the others know
                failure = error
        told = self.collective.exchange(failure and f"{type(failure).__name__}: {failure}")[0]
        if failure is not None:
            raise failure
        if told:
            msg = f"Expected rank 0 to write {os.fspath(path)!r}, it failed: {told}"
            raise ClusterError(msg)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Make sure that something is the same in every process.

        Args:
            facts: What to compare, by name.

        Raises:
            ClusterError: It is not, in every process; the message says what, and where.

        >>> Cluster().agree({"weights": 4})
        """
        everywhere = self.collective.exchange({name: repr(fact) for name, fact in facts.items()})
        names = dict.fromkeys(name for one in everywhere for name in one)
        lines = [line for name in names if (line := _difference(name, [one.get(name) for one in everywhere]))]
        if lines:
            msg = "Expected every process to have the same, got\n" + "\n".join(lines)
            raise ClusterError(msg)

    def _bounds(self, batch: Any) -> tuple[Any, Any]:
        start = row_stop(batch, self.size, self.rank - 1) if self.rank else 0
        return start, row_stop(batch, self.size, self.rank)

    def _part(self, array: Any) -> Any:
        rows = array.shape[0]
        if rows is None:  # in a traced graph, whose framework is loaded; TensorFlow would rewrite an import
            rows = sys.modules["tensorflow"].shape(array)[0]
        start, stop = self._bounds(rows)
        return array[start:stop]


@dataclass(slots=True)
class Batches:
    """The rows of one process in each step: an epoch for each time it is gone through.

    Args:
        cluster: Who shares the rows.
        rows: Of the whole data set.
        size: Of a whole batch.
        shuffle: Whether to deal the rows in another order in each epoch.
        seed: Of that order.
        epoch: The next one; set it to resume.
    """

    cluster: Cluster
    rows: int
    size: int
    shuffle: bool = False
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.rows < 0 or self.size < 1:
            msg = f"Expected 0 or more rows in batches of 1 or more, got {self.rows!r} in batches of {self.size!r}."
            raise ValueError(msg)

    def __len__(self) -> int:
        return len(range(0, self.rows, self.size))

    def __iter__(self) -> Iterator[Any]:
        import numpy as np

        order = np.arange(self.rows)
        if self.shuffle:
            np.random.default_rng((self.seed, self.epoch)).shuffle(order)
        self.epoch += 1
        for start in range(0, self.rows, self.size):
            yield self.cluster.shard(order[start : start + self.size])


def cluster(devices: DeviceRequest = None, *, timeout: float = 300) -> Cluster:
    """Meet the processes that the launcher has started; without a launcher, one process by itself.

    Args:
        devices: Where the replicas of this process are to be, as in `data_parallel`; by default on the accelerator of its local
            rank, or one on the CPU.
        timeout: Seconds to wait for the others, here and in every step.

    Returns:
        The cluster, with its processes connected.

    Raises:
        ClusterError: What the launcher says makes no sense; or the others did not come in time, run other versions of Python or
            of this library, or something else listens where they were to meet.
        BackendError: There are several processes, but torch is not installed.

    >>> cluster().size
    1
    """
    given = {name: os.environ[name] for name in _SETTINGS if name in os.environ}
    if "WORLD_SIZE" not in given:
        return Cluster(devices=devices)
    rank, size, local_rank = (_setting(name, given) for name in _SETTINGS)
    if not 0 <= rank < size:
        msg = f"Expected a RANK of 0 to {size - 1} for WORLD_SIZE={size}, got RANK={rank}."
        raise ClusterError(msg)
    if size == 1:
        return Cluster(devices=devices)
    from isobatch import __version__
    from isobatch.registry import get_backend

    get_backend("torch")
    connect = importlib.import_module("isobatch_torch.collective").connect
    found = Cluster(rank, size, local_rank, devices, connect(rank, size, timeout))
    found.agree({"Python": sys.version.split()[0], "isobatch": __version__})
    return found


def cluster_of(devices: Any) -> Cluster | None:
    """Return the cluster that a request for devices means; `None` for the devices of one process.

    >>> cluster_of("cluster"), cluster_of(4)
    (Cluster(rank=0, size=1, local_rank=0, devices=None), None)
    """
    if isinstance(devices, Cluster):
        return devices
    return cluster() if devices == "cluster" else None


def whereabouts() -> str:
    """Return how to find this process.

    >>> str(os.getpid()) in whereabouts()
    True
    """
    import socket

    return f"process {os.getpid()} on {socket.gethostname()}"


def _setting(name: str, given: Mapping[str, str]) -> int:
    try:
        return int(given[name])
    except (KeyError, ValueError):
        msg = (
            f"Expected RANK, WORLD_SIZE and LOCAL_RANK to be numbers, as torchrun sets them, got {given!r}: {name} is "
            f"{given.get(name)!r}. Start the script with torchrun, or unset WORLD_SIZE to run in one process."
        )
        raise ClusterError(msg) from None


def _has_rows(leaf: Any) -> bool:
    return bool(getattr(leaf, "shape", ())) and hasattr(leaf, "dtype")


def emptied(batch: Any) -> Any:
    """Return a batch like another, without rows.

    >>> import numpy as np
    >>> emptied({"x": np.zeros((5, 2)), "name": "a"})
    {'x': array([], shape=(0, 2), dtype=float64), 'name': 'a'}
    """
    from isobatch.trees import flatten, unflatten

    leaves, spec = flatten(batch, _has_rows)
    return unflatten(spec, [leaf[:0] if _has_rows(leaf) else leaf for leaf in leaves])


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file whole or not at all: under another name first, and renamed when it is on the disk.

    Args:
        path: The file.
        write: Called with the path of a new file beside it, of the same suffix.
    """
    part = path.with_name(f".part-{os.getpid()}-{path.name}")
    try:
        write(part)
        for file in (part, path.parent):  # the bytes, then the name
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if file is part:
                part.replace(path)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()


def _difference(name: str, facts: Sequence[str | None]) -> str | None:
    ranks: dict[str | None, list[int]] = {}
    for rank, fact in enumerate(facts):
        ranks.setdefault(fact, []).append(rank)
    if len(ranks) == 1:
        return None
    shown = "; ".join(f"{fact} on rank {', '.join(map(str, which))}" for fact, which in ranks.items())
    return f"  {name}: {shown}"
