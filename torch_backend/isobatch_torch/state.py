"""Running state: what a model updates in its forward pass without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from isobatch.backend import StatePolicy
from isobatch.errors import StructureError
from isobatch_torch.accelerators import same_memory
from isobatch_torch.arrays import equal
from isobatch_torch.checks import template_path
from isobatch_torch.internals import buffers_of, version_of
from isobatch_torch.memories import Memories
from isobatch_torch.norms import Statistics, merge_statistics, recorded
from isobatch_torch.replicas import Copies, Node

__all__ = ["Place", "RunningState"]

Place: TypeAlias = tuple[str, str]
"""A buffer: the path of its module in the template, and its name there."""


class RunningState:
    """The buffers of one parallel call: what each replica is given, and what becomes of what it leaves behind.

    A buffer that no replica updates is shared by all. One that takes part in autograd is shared as a parameter is.

    Args:
        copies: The replicas.
        memories: Where they are.
        ranks: Those that run.
        policy: `"merge"`, `"first"` or `"sequential"`.
        live: Buffers that replicas are known to update; `None`: not known, so any may be.
    """

    def __init__(
        self,
        copies: Copies,
        memories: Memories,
        ranks: Sequence[int],
        policy: StatePolicy,
        live: frozenset[Place] | None,
    ) -> None:
        self.copies = copies
        self.memories = memories
        self.ranks = ranks
        self.policy = policy
        self.unknown = live is None
        self.statistics: list[dict[nn.Module, list[Statistics]]] = [{} for _ in ranks]
        self.own: list[dict[int, torch.Tensor]] = [
            {} for _ in ranks
        ]  # by identity, so that tied buffers stay tied
        self.loans = [
            self.lend(node, name, buffer, updated=live is None or (node.path, name) in live)
            for node, name, buffer in copies.buffers
        ]

    def lend(self, node: Node, name: str, buffer: torch.Tensor, *, updated: bool) -> _Loan:
        """Give every replica a buffer: a copy of its own if it is going to update it."""
        updated = updated and not buffer.requires_grad
        own = (
            {"merge": 0, "first": 1, "sequential": len(self.ranks)}[self.policy]
            if updated
            else len(self.ranks)
        )
        start = (
            buffer.clone() if updated and own and self.unknown else buffer
        )  # the template's own may be written to
        parts = [
            self.part(position, node, buffer, own=position >= own) for position in range(len(self.ranks))
        ]
        for rank, part in zip(self.ranks, parts, strict=True):
            if part is not buffer:
                buffers_of(node.copies[rank])[name] = part
        return _Loan(node, name, buffer, parts, start, version_of(buffer))

    def part(self, position: int, node: Node, buffer: torch.Tensor, *, own: bool) -> torch.Tensor:
        """Return the buffer that one replica gets."""
        place = self.memories.place(self.ranks[position], node.path)
        if not own:
            return buffer.to(place) if buffer.requires_grad else self.memories.copy(buffer, place)
        copies = self.own[position]
        if id(buffer) not in copies:
            copies[id(buffer)] = buffer.clone() if same_memory(buffer, place) else buffer.to(place)
        return copies[id(buffer)]

    def bind(self, position: int, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return a replica's call with its running state around it; to be made in a context of its own."""
        if self.policy == "first":
            return call
        if self.policy == "merge":

            def recording() -> Any:
                recorded.set(self.statistics[position])
                return call()

            return recording

        def chained() -> Any:
            copies = [buffers_of(loan.node.copies[self.ranks[position]]) for loan in self.loans]
            for loan, buffers in zip(self.loans, copies, strict=True):
                place = self.memories.place(self.ranks[position], loan.node.path)
                buffer = buffers_of(loan.node.original)[loan.name]
                buffers[loan.name] = buffer if buffer is None else buffer.to(place)
            try:
                return call()
            finally:
                for loan, buffers in zip(self.loans, copies, strict=True):
                    end = buffers[loan.name]
                    buffers_of(loan.node.original)[loan.name] = (
                        end if end is None else end.to(loan.buffer.device)
                    )

        return chained

    def take_back(self) -> None:
        """Note what the replicas left, and let them share the template's buffers again."""
        for loan in self.loans:
            copies = [buffers_of(loan.node.copies[rank]) for rank in self.ranks]
            loan.ends = [buffers.get(loan.name) for buffers in copies]
            for buffers in copies:
                buffers[loan.name] = buffers_of(loan.node.original)[loan.name]

    def updated(self) -> frozenset[Place]:
        """Return the buffers that replicas turned out to update; after `take_back`, before `store`."""
        return frozenset(
            (loan.node.path, loan.name)
            for loan in self.loans
            if loan.rebound or (self.unknown and not loan.buffer.requires_grad and not loan.kept)
        )

    def overwritten(self) -> frozenset[Place]:
        """Return the buffers that were written to although all replicas shared them."""
        return frozenset(
            (loan.node.path, loan.name)
            for loan in self.loans
            if not self.unknown
            and loan.shared
            and not loan.buffer.requires_grad
            and version_of(loan.buffer) != loan.version
        )

    def store(self, sizes: Sequence[int], updated: frozenset[Place]) -> None:
        """Let the template have what the policy says.

        Args:
            sizes: Rows of each replica.
            updated: Which buffers to look at.

        Raises:
            StructureError: A buffer has become something else on each replica.
        """
        if self.policy == "sequential":
            return
        with torch.no_grad():
            for loan in self.loans:
                if (loan.node.path, loan.name) in updated:
                    ends = loan.ends if self.policy == "merge" else loan.ends[:1]
                    _store(loan, _merge(loan, ends, sizes))
            self.store_statistics()

    def store_statistics(self) -> None:
        """Pool the statistics of normalisation layers, call by call."""
        found = [
            (
                node.original,
                [
                    seen.get(node.copies[rank], [])
                    for rank, seen in zip(self.ranks, self.statistics, strict=True)
                ],
            )
            for node in (self.copies.nodes if any(self.statistics) else ())
        ]
        for call in range(max((len(calls) for _, parts in found for calls in parts), default=0)):
            parts = [(layer, [calls[call] for calls in parts if len(calls) > call]) for layer, parts in found]
            merge_statistics([(layer, seen) for layer, seen in parts if seen])


@dataclass(slots=True)
class _Loan:
    """One buffer, and what became of it."""

    node: Node
    name: str
    buffer: torch.Tensor
    parts: list[torch.Tensor]
    start: torch.Tensor
    version: int
    ends: list[torch.Tensor | None] = ()  # type: ignore[assignment]

    @property
    def shared(self) -> bool:
        return self.parts[-1] is self.buffer

    @property
    def rebound(self) -> bool:
        return any(end is not part for end, part in zip(self.ends, self.parts, strict=True))

    @property
    def kept(self) -> bool:
        return all(end is not None and equal(end, self.start) for end in self.ends)


def _merge(loan: _Loan, ends: Sequence[torch.Tensor | None], sizes: Sequence[int]) -> torch.Tensor | None:
    """Return the row-weighted mean of floats; of what cannot be averaged, the first replica's."""
    first = ends[0]
    if first is None or all(end is not None and equal(end, first) for end in ends[1:]):
        return first
    if any(end is None or end.shape != first.shape or end.dtype != first.dtype for end in ends):
        shown = ", ".join("None" if end is None else f"{tuple(end.shape)} {end.dtype}" for end in ends)
        msg = (
            f"Expected a buffer of one shape and type on every replica, got {shown} at {template_path(loan.node.path, loan.name)}. "
            "What belongs to rows is no running state: return it, and hand it in with the next batch."
        )
        raise StructureError(msg)
    if not (first.is_floating_point() or first.is_complex()):
        return first
    total = sum(sizes)
    terms = [
        end.to(first.device) * (size / total)
        for end, size in zip(ends, sizes, strict=True)
        if end is not None
    ]
    return torch.stack(terms).sum(0)


def _store(loan: _Loan, value: torch.Tensor | None) -> None:
    old = loan.buffer
    if value is None or value.shape != old.shape or value.dtype != old.dtype:
        buffers_of(loan.node.original)[loan.name] = None if value is None else value.detach().to(old.device)
    elif value is not old:
        old.copy_(value)
