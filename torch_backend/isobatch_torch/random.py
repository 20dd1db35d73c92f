"""Random numbers: which generators replicas draw from, and whether they have."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from isobatch.devices import Device
from isobatch_torch.accelerators import KIND, memory

__all__ = ["part_streams", "positions", "shared_generators"]


def shared_generators(devices: Sequence[Device], modules: Sequence[nn.Module]) -> list[torch.Generator]:
    """Return the generators that several replicas draw from: the CPU's, that of a card named twice, those kept in attributes.

    Args:
        devices: One for each replica.
        modules: The template's.

    >>> shared_generators([Device("cpu")], [nn.Linear(1, 1)]) == [torch.default_generator]
    True
    """
    cards = [place for place, count in Counter(_cards(devices)).items() if count > 1]
    kept = [
        value for module in modules for value in vars(module).values() if isinstance(value, torch.Generator)
    ]
    return [torch.default_generator, *map(_generator, cards), *kept]


def positions(generators: Sequence[torch.Generator]) -> list[Any]:
    """Return where generators stand, and with them those of Python and numpy, which all replicas share too.

    Args:
        generators: From `shared_generators`.

    >>> before = positions([torch.default_generator])
    >>> _ = torch.rand(1)
    >>> positions([torch.default_generator]) == before
    False
    """
    numpys = np.random.get_state(legacy=False)["state"]  # noqa: NPY002 - the generator that users may draw from
    stands = [generator.get_state().numpy().tobytes() for generator in generators]
    return [*stands, random.getstate(), numpys["pos"], numpys["key"].tobytes()]


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
