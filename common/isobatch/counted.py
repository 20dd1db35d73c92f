"""Random numbers that are counted, not drawn: the same in both frameworks, and for every split of a batch."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from isobatch.backend import current_replica

__all__ = ["Counted", "mixed"]

_LOW = 0xFFFFFFFF


class Counted:
    """Says for each call of a dropout layer which numbers are its own.

    A unit's number depends on the seed, the step, the layer's name, the count of its calls in the step, the row in the whole batch, and the
    unit's place in the row: on nothing that a framework or a number of replicas could change.

    Args:
        seed: Any integer.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self._calls: dict[tuple[str, int], int] = {}

    def start(self, step: int) -> None:
        """Begin a step.

        Args:
            step: Its number.
        """
        self.step = step
        self._calls.clear()

    def call(self, layer: str) -> tuple[int, int]:
        """Count a call of a layer; return its key and the first row it has of the whole batch.

        Args:
            layer: Its name.
        """
        shard = current_replica()
        rank, row = (0, 0) if shard is None or shard.rows is None else (shard.rank, shard.rows.start)
        number = self._calls[layer, rank] = self._calls.get((layer, rank), -1) + 1
        text = f"{self.seed}/{self.step}/{layer}/{number}"
        return zlib.crc32(text.encode()), row


def mixed(numbers: Any, shift: Callable[[Any, int], Any], low: Callable[[Any], Any]) -> Any:
    """Scramble integers so that no bit shows where it came from: the finalizer of MurmurHash3 (A. Appleby, public domain), for 32 bits.

    Args:
        numbers: int64 arrays of any kind, from 0 to 2**32 - 1.
        shift: Shifts to the right.
        low: Returns the lowest 32 bits.

    Returns:
        Integers of the same range.

    >>> hex(mixed(1, lambda x, n: x >> n, lambda x: x & 0xFFFFFFFF))
    '0x514e28b7'
    """
    numbers = numbers ^ shift(numbers, 16)
    numbers = low(numbers * 0x85EBCA6B)
    numbers = numbers ^ shift(numbers, 13)
    numbers = low(numbers * 0xC2B2AE35)
    return numbers ^ shift(numbers, 16)
