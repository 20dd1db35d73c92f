"""Which part of a model runs on which device: what a person writes, what it means, and a choice by cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from os import PathLike
from typing import Any, Literal, TypeAlias

from isobatch.devices import Device
from isobatch.errors import DataError, DeviceError, ModelError

__all__ = ["Balance", "Part", "Placement", "PlacementRequest", "crossings", "spread"]

Balance: TypeAlias = Literal["time", "memory"]
PlacementRequest: TypeAlias = Mapping[str, Any] | Callable[[str], Any] | str
"""Names, prefixes or patterns of parts and their devices; a function from name to device or `None`; or `"auto"`."""

_VERSION = 1
_HALF_THE_GAIN = 0.5  # branches that save less of what the devices could save at best give way to stages


class Placement(Mapping[str, Device]):
    """Parts of a model, by name, and the devices they run on; what is in none of them runs where its inputs are.

    A part takes all that is inside of it along. It is a mapping, prints as a table, and can be given back as a request.

    Args:
        devices: The devices, by part.

    >>> placement = Placement({"left": Device("cpu", 0), "right": Device("cpu", 1)})
    >>> print(placement)
    part   device
    left   cpu:0
    right  cpu:1
    """

    def __init__(self, devices: Mapping[str, Device]) -> None:
        self._devices = dict(devices)

    @classmethod
    def of(
        cls,
        request: Mapping[str, Any] | Callable[[str], Any],
        names: Sequence[str],
        resolve: Callable[[Sequence[Any]], Sequence[Device]],
    ) -> Placement:
        """Return what a request means for a model.

        Args:
            request: Keys are names of parts (with all that is inside), or patterns with `*`, `?` and `[...]`, where `*` crosses
                dots too; values are devices. Or a function, asked for each name from the outside inwards until it gives a device.
            names: Of all that can be placed, outer ones before what is inside of them: `encoder`, `encoder.0`.
            resolve: Returns the devices that spellings mean.

        Raises:
            ModelError: A key matches nothing, a part is named twice, or nothing is placed.
            DeviceError: A device is absent or cannot be understood.

        >>> names = ["left", "left.0", "left.1", "right"]
        >>> found = Placement.of({"left.*": "cpu:1"}, names, lambda spellings: [Device.parse(s) for s in spellings])
        >>> {name: str(device) for name, device in found.items()}
        {'left.0': 'cpu:1', 'left.1': 'cpu:1'}
        """
        wanted = _by_function(request, names) if callable(request) else _by_pattern(request, names)
        if not wanted:
            msg = f"Expected a placement that names parts of the model, it names none.{_existing(names)}"
            raise ModelError(msg)
        return cls(dict(zip(wanted, resolve(list(wanted.values())), strict=True)))

    def __getitem__(self, name: str) -> Device:
        return self._devices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._devices)

    def __len__(self) -> int:
        return len(self._devices)

    def __repr__(self) -> str:
        return f"Placement({ {name: str(device) for name, device in self.items()} })"

    def __str__(self) -> str:
        width = max(map(len, ("part", *self)))
        return "\n".join(f"{name:<{width}}  {device}" for name, device in (("part", "device"), *self.items()))

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices in use, each once, in the order of the parts."""
        return tuple(dict.fromkeys(self.values()))

    def part_of(self, name: str) -> str | None:
        """Return the part that something belongs to, `None` if it is in none.

        Args:
            name: Of a layer or submodule.

        >>> Placement({"left": Device("cpu")}).part_of("left.0")
        'left'
        """
        return next((part for part in _outwards(name) if part in self._devices), None)

    def on(self, group: Sequence[Device]) -> Placement:
        """Return the same placement on other devices: the first in use becomes the first of the group, and so on.

        Args:
            group: At least as many devices as are in use; those in use themselves mean themselves.

        Raises:
            DeviceError: The group has fewer devices.
        """
        if len(group) < len(self.devices):
            msg = (
                f"Expected groups of at least {len(self.devices)} devices, as many as the placement uses "
                f"({', '.join(map(str, self.devices))}), got {tuple(map(str, group))}."
            )
            raise DeviceError(msg)
        swapped = dict(zip(self.devices, group, strict=False))
        return Placement({name: swapped[device] for name, device in self.items()})

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a JSON file.

        Args:
            path: Where to.
        """
        import json
        from pathlib import Path

        content = {
            "isobatch_placement": _VERSION,
            "devices": {name: str(device) for name, device in self.items()},
        }
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Placement:
        """Return what `save` wrote; a plain JSON object of names and devices is read too.

        Args:
            path: The file.

        Raises:
            FileNotFoundError: There is no such file.
            DataError: It holds something else.
            DeviceError: A device cannot be understood.
        """
        import json
        from pathlib import Path

        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            msg = f"Expected a placement as JSON in {Path(path).name!r}, could not read it: {error}."
            raise DataError(msg) from error
        if isinstance(content, dict) and "isobatch_placement" in content:
            if content["isobatch_placement"] != _VERSION:
                msg = f"Expected a placement of version {_VERSION}, got {content['isobatch_placement']!r}; a newer isobatch may read it."
                raise DataError(msg)
            content = content.get("devices")
        if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):
            msg = f"Expected names of parts and of devices in {Path(path).name!r}, got {content!r}."
            raise DataError(msg)
        return cls({name: Device.parse(device) for name, device in content.items()})


def _by_pattern(request: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    named: dict[str, str] = {}  # part -> key
    for key in request:
        found = [name for name in names if name == key] or [name for name in names if fnmatchcase(name, key)]
        if not found:
            msg = f"Expected names or patterns of the model's parts, {key!r} matches none.{_existing(names)}"
            raise ModelError(msg)
        outermost = [name for name in found if not set(_outwards(name)[1:]) & set(found)]
        for name in outermost:
            rival = named.get(name)
            if rival is not None:
                msg = f"Expected each part to be named once, got {name!r} named by {rival!r} and by {key!r}."
                raise ModelError(msg)
            named[name] = key
    for name, key in named.items():
        outer = next((part for part in _outwards(name)[1:] if part in named), None)
        if outer is not None:
            msg = (
                f"Expected each part to be named once, got {name!r} named by {key!r} and, with all of {outer!r}, by {named[outer]!r}. "
                f"Name the other parts of {outer!r} one by one."
            )
            raise ModelError(msg)
    return {name: request[named[name]] for name in names if name in named}


def _by_function(request: Callable[[str], Any], names: Sequence[str]) -> dict[str, Any]:
    placed: dict[str, Any] = {}
    for name in names:
        if not any(part in placed for part in _outwards(name)) and (device := request(name)) is not None:
            placed[name] = device
    return placed


def _outwards(name: str) -> list[str]:
    """Return a name and those of what it is inside of: `a.b.c`, `a.b`, `a`."""
    words = name.split(".")
    return [".".join(words[:end]) for end in range(len(words), 0, -1)]


def _existing(names: Sequence[str]) -> str:
    shown = ", ".join(names[:40]) or "none"
    return f" There are: {shown}{f' and {len(names) - 40} more' if len(names) > 40 else ''}."


@dataclass(frozen=True, slots=True)
class Part:
    """What `"auto"` knows of a part.

    Args:
        name: Its name.
        after: The parts whose outputs it reads.
        cost: Seconds of its forward pass, or bytes of its parameters and outputs.
    """

    name: str
    after: tuple[str, ...]
    cost: float


def crossings(parts: Sequence[Part], placement: Placement) -> int:
    """Return how many edges between parts a placement cuts: the least number of tensors that have to travel.

    Args:
        parts: With the edges between them.
        placement: Where they are.

    >>> two = [Part("a", (), 1.0), Part("b", ("a",), 1.0)]
    >>> crossings(two, Placement({"a": Device("cpu", 0), "b": Device("cpu", 1)}))
    1
    """
    where = {part.name: placement.get(placement.part_of(part.name) or "") for part in parts}
    return sum(where[part.name] != where[before] for part in parts for before in part.after)


def spread(parts: Sequence[Part], devices: Sequence[Device]) -> Placement:
    """Place parts by cost: independent branches on different devices, otherwise consecutive stages of equal cost.

    Between two parts that everything has to pass, what does not depend on each other is a branch. The dearest branch goes to the
    device with the least to do, and so on. Where this saves less than half of what so many devices could save at
    best, the parts become stages instead: cut where the dearest stage costs least.

    Args:
        parts: In an order in which they can run.
        devices: Two or more.

    Raises:
        DeviceError: There is only one device.
        ModelError: There is only one part.

    >>> chain = [Part("a", (), 1.0), Part("b", ("a",), 1.0), Part("c", ("b",), 2.0)]
    >>> {name: str(device) for name, device in spread(chain, [Device("cpu", 0), Device("cpu", 1)]).items()}
    {'a': 'cpu:0', 'b': 'cpu:0', 'c': 'cpu:1'}
    """
    if len(set(devices)) < 2:
        msg = f"Expected two or more devices for placement='auto', got {', '.join(map(str, devices))}; pass devices=2 or their names."
        raise DeviceError(msg)
    if len(parts) < 2:
        msg = f"Expected a model of two or more parts, got {[part.name for part in parts]}."
        raise ModelError(msg)
    places, time = _branches(parts, len(devices))
    total = sum(part.cost for part in parts)
    if total - time < _HALF_THE_GAIN * (total - total / len(devices)):
        places = _stages([part.cost for part in parts], len(devices))
    return Placement({part.name: devices[place] for part, place in zip(parts, places, strict=True)})


def _branches(parts: Sequence[Part], count: int) -> tuple[list[int], float]:
    """Return each part's device, and the time until the last is done if branches run at once."""
    index = {part.name: i for i, part in enumerate(parts)}
    ancestors: list[set[int]] = []
    for part in parts:
        before = {index[name] for name in part.after if index[name] < len(ancestors)}
        ancestors.append(before.union(*(ancestors[i] for i in before)))
    heirs = [sum(i in found for found in ancestors) for i in range(len(parts))]
    passes = [len(ancestors[i]) + heirs[i] == len(parts) - 1 for i in range(len(parts))]
    loads, places, time = [0.0] * count, [0] * len(parts), 0.0
    for segment in _segments(passes):
        start = list(loads)
        for branch in sorted(
            _components(segment, parts, index), key=lambda b: -sum(parts[i].cost for i in b)
        ):
            place = min(range(count), key=lambda i: (loads[i] - start[i], loads[i]))
            loads[place] += sum(parts[i].cost for i in branch)
            for i in branch:
                places[i] = place
        time += max(now - then for now, then in zip(loads, start, strict=True))
    return places, time


def _segments(passes: Sequence[bool]) -> Iterator[list[int]]:
    """Cut a sequence into runs of parts that everything passes, and runs of parts that it does not."""
    edges = [i for i in range(1, len(passes)) if passes[i] != passes[i - 1]]
    for start, stop in pairwise([0, *edges, len(passes)]):
        yield list(range(start, stop))


def _components(segment: Sequence[int], parts: Sequence[Part], index: Mapping[str, int]) -> list[list[int]]:
    """Return the parts of a segment by what is connected within it."""
    groups: list[list[int]] = []
    for i in segment:
        near = {index[name] for name in parts[i].after}
        touching = [group for group in groups if near.intersection(group)]
        groups = [group for group in groups if group not in touching]
        groups.append([*(j for group in touching for j in group), i])
    return groups


def _stages(costs: Sequence[float], count: int) -> list[int]:
    """Cut a chain into at most so many stages whose dearest costs least; exactly, by dynamic programming."""
    sums = [0.0, *accumulate(costs)]
    best: list[tuple[float, tuple[int, ...]]] = [
        (total, ()) for total in sums
    ]  # one stage up to here; where it was cut
    for _ in range(count - 1):
        best = [
            min(
                (
                    best[end],
                    *(
                        (max(best[cut][0], sums[end] - sums[cut]), (*best[cut][1], cut))
                        for cut in range(1, end)
                    ),
                ),
                key=lambda found: found[0],
            )
            for end in range(len(sums))
        ]
    cuts = best[-1][1]
    return [sum(i >= cut for cut in cuts) for i in range(len(costs))]
