"""Split the arguments of a call by rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from isobatch.backend import Options, Shard
from isobatch.devices import Device
from isobatch.errors import BatchSizeError, LeafTypeError
from isobatch.rows import Policy, split_sizes
from isobatch.trees import Broadcast, Path, Rows, flatten, path_text, unflatten

if TYPE_CHECKING:
    import optree

    from isobatch.backend import Backend

__all__ = ["scatter"]


def scatter(
    backend: Backend,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    devices: Sequence[Device],
    options: Options,
    *,
    sizes: Sequence[int] | None = None,
    names: Sequence[str] = (),
) -> list[Shard]:
    """Return a shard for every replica that gets rows.

    Every array with at least one axis is split; 0-d arrays and other values are given to all. Marks decide
    otherwise: `Broadcast` is given whole, `Rows` is split although it is no array. With no rows at all, or
    nothing to split, there is one shard, for rank 0.

    Args:
        backend: Whose arrays these are.
        args: Positional arguments, containers included.
        kwargs: Keyword arguments.
        devices: One for each replica.
        options: Policy, batch axis and names of what is not split.
        sizes: Rows of each replica, instead of the policy.
        names: Names of the positional parameters, for `options.axis` and `options.broadcast`.

    Returns:
        Shards in rank order, without marks.

    Raises:
        BatchSizeError: Arrays disagree on the number of rows, or one lacks the batch axis.
        LeafTypeError: An argument is an iterator, which several replicas cannot share.
    """
    leaves: Sequence[Any] = args
    spec, shapes = None, [backend.shape(value) for value in args]
    if kwargs or not all(shapes):  # else they are arrays alone, as most often: no container to walk
        leaves, spec = flatten((args, dict(kwargs)), lambda value: backend.shape(value) is not None)
        shapes = [backend.shape(leaf) for leaf in leaves]
    by_name = options.broadcast or not isinstance(options.axis, int)
    paths = _paths(spec, len(args)) if by_name else [()] * len(leaves)
    parts = [
        _part(backend, leaf, shape, path, options, names=names)
        for leaf, shape, path in zip(leaves, shapes, paths, strict=True)
    ]
    counts = {part.rows for part in parts if part.rows is not None}
    if len(counts) > 1 or any(part.fault for part in parts):
        raise _error(parts, _paths(spec, len(args)))
    batch = int(counts.pop()) if counts else None  # a traced size is a symbol
    policy = options.policy if isinstance(options.policy, str) else tuple(options.policy)
    explicit = None if sizes is None else tuple(sizes)
    shards = []
    for rank, rows in _bounds(batch, len(devices), policy, explicit, options.min_rows):
        values = [part.take(backend, rows, devices[rank]) for part in parts]
        own_args, own_kwargs = (tuple(values), {}) if spec is None else unflatten(spec, values)
        shards.append(Shard(rank, devices[rank], rows, batch or 0, own_args, own_kwargs))
    return shards


@functools.lru_cache
def _bounds(
    batch: int | None, replicas: int, policy: Policy, sizes: tuple[int, ...] | None, min_rows: int
) -> list[tuple[int, range | None]]:
    """Return which ranks get which rows; batches of few sizes come again and again."""
    if batch is None:
        return [(0, None)]
    dealt = split_sizes(batch, replicas, policy, sizes=sizes, min_rows=min_rows)
    stops = pairwise(accumulate(dealt, initial=0))
    return [(rank, range(*bounds)) for rank, bounds in enumerate(stops) if dealt[rank]] or [(0, range(0))]


def _paths(spec: optree.PyTreeSpec | None, count: int) -> list[Path]:
    """Return where each leaf is among the arguments."""
    return [(0, index) for index in range(count)] if spec is None else spec.paths()


@dataclass(slots=True)
class _Part:
    """One leaf of the arguments, and how it is dealt."""

    value: Any
    shape: tuple[int, ...] | None
    axis: int = 0
    rows: int | None = None  # None: given whole
    fault: str = ""

    def take(self, backend: Backend, rows: range | None, device: Device) -> Any:
        if self.shape is None:
            return self.value if self.rows is None or rows is None else self.value[rows.start : rows.stop]
        cut = None if self.rows is None or rows is None else slice(rows.start, rows.stop)
        return backend.take(self.value, cut, self.axis, device)


def _part(
    backend: Backend,
    leaf: Any,
    shape: tuple[int, ...] | None,
    path: Path,
    options: Options,
    *,
    names: Sequence[str],
) -> _Part:
    if isinstance(leaf, Broadcast):
        return _Part(leaf.value, backend.shape(leaf.value))
    if isinstance(leaf, Rows):
        inner = backend.shape(leaf.value)
        return _Part(leaf.value, inner, rows=inner[0] if inner else len(leaf.value))
    if shape is None and isinstance(leaf, Iterator):
        return _Part(leaf, None, fault="an iterator")
    words = _words(path, names) if shape else []
    if not shape or not set(words).isdisjoint(options.broadcast):
        return _Part(leaf, shape)
    axis = (
        options.axis
        if isinstance(options.axis, int)
        else next((options.axis[w] for w in words if w in options.axis), 0)
    )
    if not -len(shape) <= axis < len(shape):
        return _Part(leaf, shape, fault=f"no axis {axis}")
    return _Part(leaf, shape, axis % len(shape), shape[axis])


def _words(path: Path, names: Sequence[str]) -> list[Any]:
    """What a leaf may be called, the most particular first: a key in the mapping that is the argument, the argument's name, its position."""
    if not path:
        return []
    argument = path[1]
    named = [names[argument]] if isinstance(argument, int) and argument < len(names) else []
    return [*(key for key in path[2:3] if isinstance(key, str)), *named, argument]


def _error(parts: Sequence[_Part], paths: Sequence[Path]) -> BatchSizeError | LeafTypeError:
    where = [path_text(path[1:], ("args", "kwargs")[path[0]]) for path in paths]
    for part, place in zip(parts, where, strict=True):
        if part.fault == "an iterator":
            msg = (
                f"Expected values that several replicas can share, got {part.value!r} at {place}. Make it a list or an array, "
                "or mark it isobatch.Broadcast(...) if sharing one iterator is meant."
            )
            return LeafTypeError(msg)
    lines = [
        f"  {place}: {part.fault or f'{part.rows} rows'}" + (f", shape {part.shape}" if part.shape else "")
        for part, place in zip(parts, where, strict=True)
        if part.fault or part.rows is not None
    ]
    msg = (
        "Expected every array of the batch to have the same number of rows, got\n" + "\n".join(lines) + "\n"
        "Mark an array without a batch axis isobatch.Broadcast(...), or name it in broadcast=(...); axis=... sets another batch axis."
    )
    return BatchSizeError(msg)
