"""The template's replicas: modules of their own that share its weights, kept up to date as the template is edited."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import nn

from isobatch_torch.checks import check_template
from isobatch_torch.internals import buffers_of, children_of
from isobatch_torch.norms import watch

__all__ = ["Copies", "Node", "core"]


class Node:
    """One module of the template, and its copy in each replica.

    Args:
        path: Its name in the template.
        original: The module.
        replicas: How many copies.
    """

    def __init__(self, path: str, original: nn.Module, replicas: int) -> None:
        self.path = path
        self.original = original
        # Of the very class, and without running any of its code: a copy has what the original has, nothing more.
        shared = isinstance(original, torch.jit.ScriptModule)  # whose parts are not Python's to copy
        self.copies = [original if shared else object.__new__(type(original)) for _ in range(replicas)]
        self.snapshot = _Snapshot(())

    def fill(self, copy_of: Callable[[nn.Module, int], nn.Module]) -> None:
        """Give each copy what the original has now.

        Args:
            copy_of: Says what a child's copy is in the replica of a rank.
        """
        self.snapshot = _Snapshot((self.original,))
        for rank, copy in enumerate(self.copies):
            if copy is self.original:
                continue
            contents = {
                key: value.copy() if _is_own(key, value) else value
                for key, value in vars(self.original).items()
            }
            for name, child in contents["_modules"].items():
                contents["_modules"][name] = None if child is None else copy_of(child, rank)
            contents.pop("_compiled_call_impl", None)  # of Module.compile: bound to the original
            copy.__class__ = type(self.original)  # parametrizations change it
            vars(copy).clear()
            vars(copy).update(contents)
            watch(copy)


class Copies:
    """Replicas of a template, rank by rank.

    Making them costs as much as the forward pass of a small network; seeing that nothing has changed costs a twentieth.

    Args:
        template: What is replicated. Its parameters and buffers are shared, not copied.
        replicas: How many.

    >>> template = nn.Sequential(nn.Linear(2, 2))
    >>> copies = Copies(template, 2)
    >>> copies.refresh(), copies.refresh()
    (True, False)
    >>> copies.root(1) is template, copies.root(1)[0].weight is template[0].weight
    (False, True)
    """

    def __init__(self, template: nn.Module, replicas: int) -> None:
        self.template = template
        self.replicas = replicas
        self.nodes: list[Node] = []
        self.modes: tuple[bool, ...] = ()
        self.buffers: list[tuple[Node, str, torch.Tensor]] = []
        self.layout = 0  # changes with the names of the buffers there are
        self._snapshot = _Snapshot(())

    def root(self, rank: int) -> nn.Module:
        """Return the replica of a rank."""
        return self.nodes[0].copies[rank]

    def refresh(self) -> bool:
        """Bring the replicas up to date with the template; say whether there was anything to do.

        A replica keeps what its forward pass stored in attributes until those of the template's module change.

        Raises:
            ModelError: The template refers to parts of itself in ways that would reach around its replicas.
        """
        if self.nodes and self._snapshot.holds():
            return False
        known = {node.original: node for node in self.nodes}
        nodes: dict[nn.Module, Node] = {}
        for path, module in _walk(core(self.template), "", set()):
            nodes[module] = known.get(module) or Node(path, module, self.replicas)
        check_template({node.path: module for module, node in nodes.items()})
        for node in nodes.values():
            if not node.snapshot.holds():
                node.fill(lambda child, rank: nodes[core(child)].copies[rank])
        self.nodes = list(nodes.values())
        self.modes = tuple(module.training for module in nodes)
        self.buffers = [
            (node, name, buffer)
            for node in self.nodes
            for name, buffer in buffers_of(node.original).items()
            if buffer is not None
        ]
        self.layout = hash(tuple((node.path, name) for node, name, _ in self.buffers))
        self._snapshot = _Snapshot(tuple(nodes))
        return True


def core(module: nn.Module) -> nn.Module:
    """Return the module that computes, inside of wrappers that a replica does without.

    Args:
        module: Perhaps a `DataParallel` inside of the template, or what `torch.compile` returned.

    >>> inner = nn.Linear(1, 1)
    >>> core(nn.DataParallel(inner)) is inner
    True
    """
    while True:
        if isinstance(module, nn.DataParallel):
            module = module.module
        elif "_orig_mod" in children_of(module):  # torch's OptimizedModule, whose class is slow to import
            module = module.get_submodule("_orig_mod")
        else:
            return module


class _Snapshot:
    """What modules contained at one time: the objects in their attributes, and in their own dictionaries."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.places = [place for module in modules for place in _places(module)]
        self.lengths = list(map(len, self.places))
        self.filled = [place for place in self.places if place]
        self.contents = list(chain.from_iterable(map(_values, self.filled)))

    def holds(self) -> bool:
        """Say whether the modules still contain the very same objects."""
        return bool(self.places) and (
            list(map(len, self.places)) == self.lengths
            and all(map(is_, chain.from_iterable(map(_values, self.filled)), self.contents))
        )


_values = methodcaller("values")


def _places(module: nn.Module) -> Iterator[dict[str, Any]]:
    contents = vars(module)
    yield contents
    yield from (value for key, value in contents.items() if isinstance(value, dict) and _is_own(key, value))


def _is_own(key: str, value: Any) -> bool:
    """Say whether an attribute is one of torch's collections that every module has for itself."""
    return key in {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"} or (
        "hooks" in key and key[0] == "_" and isinstance(value, dict)
    )


def _walk(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Name every module that takes part in computing, once."""
    if module in seen:
        return
    seen.add(module)
    yield path, module
    for name, child in children_of(module).items():
        if child is not None:
            yield from _walk(core(child), f"{path}.{name}" if path else name, seen)
