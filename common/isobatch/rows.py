"""Who gets which rows: the one rule that every splitter of a batch, in either framework, follows.

The arithmetic uses only `+ - * //` and `abs`, so `row_stop` gives the same answer for a Python integer
and for an integer tensor inside a traced graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias, get_args

from isobatch.errors import BatchSizeError

__all__ = ["Policy", "check_policy", "row_stop", "split_sizes"]

PolicyName: TypeAlias = Literal["balanced", "keras", "torch"]
Policy: TypeAlias = PolicyName | Sequence[float]
"""A rule's name, or one positive weight for each replica."""

_WEIGHT_UNIT = 1 << 20  # weights become integers of this total, so batches up to 2**42 rows stay exact


def split_sizes(
    batch: int,
    replicas: int,
    policy: Policy = "balanced",
    *,
    sizes: Sequence[int] | None = None,
    min_rows: int = 1,
) -> tuple[int, ...]:
    """Return how many rows of a batch each replica gets.

    Shards are contiguous and in rank order; a replica beyond the rows there are gets 0.

    Args:
        batch: Number of rows, 0 or more.
        replicas: Number of replicas, 1 or more.
        policy: `"balanced"`: sizes differ by at most one, larger first. `"keras"`: the floor, and the last
            replica takes the rest, as `keras.utils.multi_gpu_model` did. `"torch"`: chunks of the ceiling,
            perhaps fewer than replicas, as `torch.chunk` and `torch.nn.DataParallel` do. Or one positive
            weight for each replica, for devices of unequal speed.
        sizes: Explicit sizes, instead of a policy; checked and returned.
        min_rows: Use fewer replicas rather than give one fewer rows than this (only with `"balanced"`).

    Returns:
        One size for each replica; they add up to `batch`.

    Raises:
        BatchSizeError: `batch` is negative, or `sizes` does not have `replicas` entries that add up to it.
        ValueError: `replicas` or `min_rows` is below 1, or the policy is unknown or does not fit.

    >>> split_sizes(7, 4), split_sizes(7, 4, "keras"), split_sizes(5, 4, "torch")
    ((2, 2, 2, 1), (1, 1, 1, 4), (2, 2, 1, 0))
    >>> split_sizes(9, 2, (2, 1)), split_sizes(5, 4, min_rows=2)
    ((6, 3), (3, 2, 0, 0))
    """
    if isinstance(batch, bool) or batch < 0:
        msg = f"Expected a number of rows, 0 or more, got {batch!r}."
        raise BatchSizeError(msg)
    check_policy(policy, replicas, min_rows)
    if sizes is not None:
        if len(sizes) != replicas or min(sizes) < 0 or sum(sizes) != batch:
            msg = f"Expected {replicas} sizes of 0 or more that add up to {batch} rows, got {tuple(sizes)!r}."
            raise BatchSizeError(msg)
        return tuple(int(size) for size in sizes)
    stops = (row_stop(batch, replicas, rank, policy, min_rows=min_rows) for rank in range(replicas))
    return tuple(stop - start for start, stop in pairwise([0, *stops]))


def row_stop(batch: Any, replicas: int, rank: int, policy: Policy = "balanced", *, min_rows: int = 1) -> Any:
    """Return the first row that no longer belongs to `rank`: the start of the next one's rows.

    Args:
        batch: Number of rows: a Python integer, or a 0-d integer tensor of any framework.
        replicas: Number of replicas.
        rank: The replica, counted from 0.
        policy: As in `split_sizes`; taken as checked.
        min_rows: As in `split_sizes`.

    Returns:
        The row number, of the type of `batch`.

    >>> [row_stop(7, 4, rank) for rank in range(4)]
    [2, 4, 6, 7]
    """
    if policy == "balanced":
        used = _max(_min(batch // min_rows, replicas), 1)
        return _min(batch, (rank + 1) * (batch // used) + _min(batch % used, rank + 1))
    if policy == "keras":
        return batch if rank == replicas - 1 else (rank + 1) * (batch // replicas)
    if policy == "torch":
        return _min(batch, (rank + 1) * ((batch + replicas - 1) // replicas))
    units = _weight_units(policy)
    return (2 * batch * units[rank] + units[-1]) // (2 * units[-1])


def check_policy(policy: Policy, replicas: int, min_rows: int = 1) -> None:
    """Raise a `ValueError` that says what is wrong, unless the rule can deal rows to `replicas`.

    Args:
        policy: As in `split_sizes`.
        replicas: Number of replicas.
        min_rows: As in `split_sizes`.

    Raises:
        ValueError: `replicas` or `min_rows` is below 1, or the policy is unknown or does not fit.

    >>> check_policy("balanced", 4)
    """
    if isinstance(replicas, bool) or replicas < 1:
        msg = f"Expected 1 or more replicas, got {replicas!r}."
        raise ValueError(msg)
    if isinstance(policy, str):
        if policy not in get_args(PolicyName):
            msg = f"Expected policy to be one of {get_args(PolicyName)} or one weight for each replica, got {policy!r}."
            raise ValueError(msg)
    elif len(policy) != replicas or not all(0 < weight < float("inf") for weight in policy):
        msg = f"Expected {replicas} positive weights, one for each replica, got {policy!r}."
        raise ValueError(msg)
    if min_rows < 1 or (min_rows > 1 and policy != "balanced"):
        msg = f"Expected min_rows to be 1, or more with policy='balanced', got {min_rows!r} with policy={policy!r}."
        raise ValueError(msg)


def _weight_units(weights: Sequence[float]) -> list[int]:
    """Running totals of the weights, in integer units."""
    total = sum(weights)
    return [round(_WEIGHT_UNIT * part / total) for part in accumulate(weights)]


def _min(a: Any, b: Any) -> Any:
    return (a + b - abs(a - b)) // 2  # the builtin would branch on a tensor's value


def _max(a: Any, b: Any) -> Any:
    return (a + b + abs(a - b)) // 2
