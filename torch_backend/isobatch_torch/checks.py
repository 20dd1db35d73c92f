"""What a template must not have if its replicas are to be modules of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from isobatch.errors import ModelError

__all__ = ["check_template", "template_path"]


def check_template(modules: Mapping[str, nn.Module]) -> None:
    """Raise unless every part of a template can be replicated.

    What a template's attributes refer to is shared by all replicas. Modules and methods that are reached that way are the
    template's own: whatever they keep would be updated by all replicas at once.

    Args:
        modules: Every registered module by its path.

    Raises:
        ModelError: There are such references, parameters without a shape, or layers that expect several processes;
            the message names each.

    >>> model = nn.Module()
    >>> model.layers = [nn.Linear(1, 1)]
    >>> check_template({"": model})
    Traceback (most recent call last):
    isobatch.errors.ModelError: Expected a module that can be replicated, got
      template.layers[0]: a Linear that is not registered; use nn.ModuleList, nn.ModuleDict or an attribute of its own
    """
    modules = {
        path: module for path, module in modules.items() if not isinstance(module, torch.jit.ScriptModule)
    }
    lines = [
        f"{template_path(path)}: {problem}"
        for path, module in modules.items()
        for problem in _problems(module)
    ]
    lines += [
        line
        for path, module in modules.items()
        for key, value in vars(module).items()
        if key not in _REGISTERED
        for line in _stale(value, template_path(path, key), depth=3)
    ]
    if lines:
        msg = "Expected a module that can be replicated, got\n  " + "\n  ".join(lines)
        raise ModelError(msg)


def _problems(module: nn.Module) -> Iterator[str]:
    contents = vars(module)
    if "forward" in contents:
        yield "its forward is set on the object, for this object; define it in the class"
    if any(is_lazy(tensor) for tensor in (*contents["_parameters"].values(), *contents["_buffers"].values())):
        yield "uninitialized parameters; call the template once on a small batch before it is made parallel"
    if isinstance(module, nn.SyncBatchNorm) and module.training:
        yield (
            "a SyncBatchNorm synchronises processes, not replicas: each would normalise by its own rows; "
            "use BatchNorm, or torch.nn.parallel.DistributedDataParallel"
        )


def _stale(value: Any, path: str, depth: int) -> Iterator[str]:
    if isinstance(value, nn.Module):
        yield f"{path}: a {type(value).__name__} that is not registered; use nn.ModuleList, nn.ModuleDict or an attribute of its own"
    elif isinstance(value, MethodType):
        if isinstance(value.__self__, nn.Module):
            yield f"{path}: a method bound to the template; keep its name, or look it up when it is called"
    elif isinstance(value, partial):
        yield from _stale([value.func, *value.args, *value.keywords.values()], path, depth)
    elif depth and isinstance(value, dict):
        for key, entry in value.items():
            yield from _stale(entry, f"{path}[{key!r}]", depth - 1)
    elif depth and isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from _stale(entry, f"{path}[{index}]", depth - 1)


_REGISTERED = frozenset(vars(nn.Module())) | {"_compiled_call_impl", "forward"}


def template_path(*keys: str) -> str:
    """Return a place in the template as text that reads like code.

    Args:
        keys: Paths and names, from the outside in; empty ones are left out.

    >>> template_path("", "layers.0", "weight")
    'template.layers.0.weight'
    """
    return ".".join(filter(None, ("template", *keys)))
