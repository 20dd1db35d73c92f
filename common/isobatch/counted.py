"""Dropout whose units are counted, not drawn: the same in both frameworks, and for every split of a batch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from isobatch.backend import current_replica
from isobatch.errors import SpecError

if TYPE_CHECKING:
    import numpy as np

    from isobatch.spec import Spec

__all__ = ["Counted"]

_DRAWING = ("alpha_dropout", "gaussian_dropout", "gaussian_noise")


class Counted:
    """Says which units dropout layers keep.

    It depends on the seed, the step, the layer's name, the count of its calls in the step, the row in the whole batch and the unit's place in
    the row: on nothing that a framework or a number of replicas could change.

    Args:
        seed: Any integer.

    >>> counted = Counted(7)
    >>> counted.start(1)
    >>> counted.kept("drop", (2, 4), 0.5).tolist()
    [[True, True, True, True], [True, False, False, False]]
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

    def kept(
        self, layer: str, shape: Sequence[int], rate: float, noise_shape: Sequence[int | None] | None = None
    ) -> np.ndarray[Any, Any]:
        """Return which units one call of a layer keeps.

        Args:
            layer: Its name.
            shape: Of the input, rows first.
            rate: Share of units that are not kept.
            noise_shape: Of the mask: 1 for an axis along which it is the same, `None` for the input's length; by default the input's.

        Returns:
            Booleans that broadcast to the input.
        """
        import numpy as np

        shard = current_replica()
        rank, first = (0, 0) if shard is None or shard.rows is None else (shard.rank, shard.rows.start)
        number = self._calls[layer, rank] = self._calls.get((layer, rank), -1) + 1
        key = zlib.crc32(f"{self.seed}/{self.step}/{layer}/{number}".encode())
        wanted = noise_shape or [None] * len(shape)
        rows, *rest = [length if one is None else int(one) for length, one in zip(shape, wanted, strict=True)]
        units = int(np.prod(rest, dtype=np.int64))
        start = first * units if wanted[0] is None else 0
        places = np.arange(start, start + rows * units, dtype=np.uint64).astype(np.uint32)
        numbers = _mixed(_mixed(places) ^ np.uint32(key))
        kept: np.ndarray[Any, Any] = np.greater_equal(numbers, rate * 2.0**32)
        return kept.reshape(rows, *rest)

    @staticmethod
    def check(spec: Spec) -> None:
        """Raise if a network draws random numbers that are not dropout's.

        Args:
            spec: The network.

        Raises:
            SpecError: It does; the message lists the layers.
        """
        odd = [
            f"{node.layer} ({node.operation})"
            for node in spec.nodes
            if node.operation in _DRAWING
            or any(node.attributes.get(name) for name in ("dropout", "recurrent_dropout"))
        ]
        if odd:
            msg = f"Expected dropout layers alone to draw random numbers, these do too: {', '.join(odd)}."
            raise SpecError(msg)


def _mixed(numbers: Any) -> Any:
    """Scramble 32-bit integers: the finalizer of MurmurHash3 (Austin Appleby, in the public domain)."""
    import numpy as np

    numbers = numbers ^ (numbers >> np.uint32(16))
    numbers = numbers * np.uint32(0x85EBCA6B)
    numbers = numbers ^ (numbers >> np.uint32(13))
    numbers = numbers * np.uint32(0xC2B2AE35)
    return numbers ^ (numbers >> np.uint32(16))
