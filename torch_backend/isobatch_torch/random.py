"""Random numbers: which generators replicas draw from, and whether they have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from isobatch.devices import Device
from isobatch_torch.accelerators import KIND, memory

__all__ = ["part_streams", "positions"]


def positions(devices: Sequence[Device]) -> tuple[bytes, ...]:
    """Return where the generators stand that several replicas draw from: the CPU's, and that of a card named twice.

    Args:
        devices: One for each replica.

    >>> before = positions([Device("cpu")])
    >>> _ = torch.rand(1)
    >>> positions([Device("cpu")]) == before
    False
    """
    shared = [place for place, count in Counter(_cards(devices)).items() if count > 1]
    generators = [torch.default_generator, *map(_generator, shared)]
    return tuple(generator.get_state().numpy().tobytes() for generator in generators)


def part_streams(devices: Sequence[Device]) -> None:
    """Give cards streams of their own: `torch.manual_seed` gives all of them the same.

    Args:
        devices: One for each replica.
    """
    places = list(dict.fromkeys(_cards(devices)))
    if not places:
        return
    seed = _generator(places[0]).initial_seed()
    for offset, place in enumerate(places[1:], 1):
        generator = _generator(place)
        if generator.initial_seed() == seed:
            generator.manual_seed(seed + offset)


def _cards(devices: Sequence[Device]) -> list[torch.device]:
    return [place for place in map(memory, devices) if place.type == KIND]


def _generator(place: torch.device) -> Any:
    return torch.get_device_module(place).default_generators[place.index]
