"""Weights on other memories than the template's: broadcast to each accelerator, and back by their gradients' sum."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from isobatch.devices import Device
from isobatch.errors import ModelError
from isobatch.placement import Placement
from isobatch_torch.accelerators import KIND, memory, same_memory, torch_text
from isobatch_torch.checks import template_path
from isobatch_torch.internals import (
    Broadcast,
    hooks_of,
    mark_parameter,
    parameters_of,
    use_own_parameters,
    version_of,
)
from isobatch_torch.replicas import Copies, Node

__all__ = ["Memories", "is_home"]


def is_home(module: nn.Module, device: Device) -> bool:
    """Say whether a module lies where a replica on a device would run.

    Args:
        module: The template.
        device: Where the replica runs.

    >>> is_home(nn.Linear(1, 1), Device("cpu", 1))
    True
    """
    if KIND is None:
        return True
    tensor = _any_tensor(module)
    return tensor is None or same_memory(tensor, memory(device))


def _any_tensor(module: nn.Module) -> torch.Tensor | None:
    return next(chain(module.parameters(), module.buffers()), None)


class Memories:
    """What of a template's weights lies on which memory.

    With gradients the weights are broadcast for every call, as part of the graph. Without, copies are kept until a weight is
    replaced or edited in place; edits through `.data` or from other libraries do not show: `DataParallel.invalidate` is for them.

    Args:
        devices: One for each replica; the template lies on the first.
        placements: Where the parts of each replica run, if they run on different devices; the template's lie on those of the first.
    """

    def __init__(self, devices: Sequence[Device], placements: Sequence[Placement] | None = None) -> None:
        self.places = [memory(device) for device in devices]
        self.placements = placements
        self.device = devices[0]
        used = self.places if placements is None else [memory(d) for one in placements for d in one.devices]
        home = self.places[:1] if placements is None else [memory(d) for d in placements[0].devices]
        self.away = list(dict.fromkeys(place for place in used if place not in home))
        self.kept: dict[tuple[int, torch.device], tuple[torch.Tensor, int, torch.Tensor]] = {}

    def check(self, copies: Copies) -> None:
        """Raise unless a template lies on the first device, with all that its replicas need to be moved.

        Args:
            copies: Its replicas.

        Raises:
            ModelError: The template is elsewhere, or has tensors that nobody knows how to move.
        """
        tensor = _any_tensor(copies.template) if self.placements is None else None
        if tensor is not None and not same_memory(tensor, self.places[0]):
            cure = f"call module.to({torch_text(self.device)!r}) first."
            if tensor.is_meta:
                cure = f"there they have no values: call module.to_empty(device={torch_text(self.device)!r}) and load some first."
            msg = (
                f"Expected the module's parameters on {self.device}, the first of its devices, got them on {tensor.device}; "
                f"{cure}"
            )
            raise ModelError(msg)
        lines = [line for node in copies.nodes if self.away for line in _unregistered(node)]
        if lines:
            msg = "Expected tensors that can follow a module to other devices, got\n  " + "\n  ".join(lines)
            raise ModelError(msg)

    def move(self, copies: Copies, ranks: Sequence[int]) -> None:
        """Give the replicas that run on other memories their parameters.

        Args:
            copies: The replicas.
            ranks: Those that run.
        """
        if not self.away:
            return
        wanted: dict[torch.device, dict[int, torch.Tensor]] = {}
        for node in copies.nodes:
            for place in {self.place(rank, node.path) for rank in ranks}:
                if place in self.away:
                    found = [tensor for tensor in parameters_of(node.original).values() if tensor is not None]
                    wanted.setdefault(place, {}).update((id(tensor), tensor) for tensor in found)
        moved: dict[torch.device, dict[int, torch.Tensor]] = {}
        for names in {
            tuple(tensors) for tensors in wanted.values()
        }:  # places that want the same get it at once
            places = [place for place, tensors in wanted.items() if tuple(tensors) == names]
            sent = self.broadcast(list(wanted[places[0]].values()), places)
            moved.update(
                (place, dict(zip(names, tensors, strict=True)))
                for place, tensors in zip(places, sent, strict=True)
            )
        for node in copies.nodes:
            for rank in ranks:
                if (place := self.place(rank, node.path)) in moved:
                    _give(node.copies[rank], node.original, moved[place])

    def place(self, rank: int, path: str) -> torch.device:
        """Return where a module of a replica runs."""
        if self.placements is not None and (part := self.placements[rank].part_of(path)) is not None:
            return memory(self.placements[rank][part])
        return self.places[rank]

    def broadcast(self, tensors: list[torch.Tensor], places: list[torch.device]) -> list[list[torch.Tensor]]:
        """Return tensors on each place."""
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return [[self.copy(tensor, place) for tensor in tensors] for place in places]
        apart = any(tensor.device != self.places[0] for tensor in tensors)
        if apart or any(place.type != "cuda" for place in (self.places[0], *places)):
            return [[tensor.to(place) for tensor in tensors] for place in places]
        flat: Any = Broadcast.apply([self.places[0], *places], *tensors)  # type: ignore[no-untyped-call]
        count = len(tensors)
        return [list(flat[start : start + count]) for start in range(count, len(flat), count)]

    def copy(self, tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
        """Return a tensor's copy on a place that nobody is going to write to; itself where it lies there."""
        if same_memory(tensor, place):
            return tensor
        version = version_of(tensor)
        kept = self.kept.get((id(tensor), place))
        if kept is None or kept[0] is not tensor or kept[1] != version:
            kept = (
                tensor,
                version,
                tensor.detach().to(place, non_blocking=True).requires_grad_(tensor.requires_grad),
            )
            self.kept[id(tensor), place] = kept
        return kept[2]


def _give(copy: nn.Module, original: nn.Module, moved: dict[int, torch.Tensor]) -> None:
    own: dict[str, Any] = parameters_of(copy)
    for name, parameter in parameters_of(original).items():
        if parameter is not None:
            mark_parameter(tensor := moved[id(parameter)])
            own[name] = tensor
    use_own_parameters(copy)


def _unregistered(node: Node) -> list[str]:
    """Name the tensors in plain attributes, but for those that a hook computes anew for every call."""
    computed = {getattr(hook, "name", None) for hook in hooks_of(node.original)}
    return [
        f"{template_path(node.path, key)}: a tensor in a plain attribute; use register_buffer"
        for key, value in vars(node.original).items()
        if isinstance(value, torch.Tensor) and key not in computed
    ]
