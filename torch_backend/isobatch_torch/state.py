"""Running state: what a model updates in its forward pass without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from isobatch.backend import StatePolicy
from isobatch.errors import StructureError
from isobatch_torch.arrays import equal
from isobatch_torch.checks import template_path
from isobatch_torch.internals import buffers_of, version_of
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
        ranks: Those that run.
        policy: `"merge"`, `"first"` or `"sequential"`.
        live: Buffers that replicas are known to update; `None`: not known, so any may be.
    """

    def __init__(
        self, copies: Copies, ranks: Sequence[int], policy: StatePolicy, live: frozenset[Place] | None
    ) -> None:
        self.copies = copies
        self.ranks = ranks
        self.policy = policy
        self.unknown = live is None
        self.statistics: list[dict[nn.Module, list[Statistics]]] = [{} for _ in ranks]
        own: list[dict[int, torch.Tensor]] = [
            {} for _ in ranks
        ]  # by identity, so that tied buffers stay tied
        self.loans = [
            self.lend(node, name, buffer, own, updated=live is None or (node.path, name) in live)
            for node, name, buffer in copies.buffers
        ]

    def lend(
        self,
        node: Node,
        name: str,
        buffer: torch.Tensor,
        own: list[dict[int, torch.Tensor]],
        *,
        updated: bool,
    ) -> _Loan:
        """Give every replica a buffer: a copy of its own if it is going to update it."""
        parts = [buffer] * len(self.ranks)
        start = buffer
        if updated and not buffer.requires_grad:
            if self.policy != "merge" and self.unknown:
                start = buffer.clone()  # the template's own is going to be written to
            for position in range(
                {"merge": 0, "first": 1, "sequential": len(parts)}[self.policy], len(parts)
            ):
                parts[position] = own[position].setdefault(id(buffer), buffer.clone())
                buffers_of(node.copies[self.ranks[position]])[name] = parts[position]
        return _Loan(node, name, buffer, parts, start, version_of(buffer))

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
            rank = self.ranks[position]
            for loan in self.loans:
                buffers_of(loan.node.copies[rank])[loan.name] = buffers_of(loan.node.original)[loan.name]
            try:
                return call()
            finally:
                for loan in self.loans:
                    buffers_of(loan.node.original)[loan.name] = buffers_of(loan.node.copies[rank])[loan.name]

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
