"""What this package needs of torch that has no public name, all in one place."""

# ruff: noqa: SLF001
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.nn.modules import batchnorm
from torch.nn.parallel._functions import Broadcast, Gather
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

__all__ = [
    "BatchNorm",
    "Broadcast",
    "Gather",
    "RunningNorm",
    "buffers_of",
    "children_of",
    "function_modes",
    "hooks_of",
    "is_confined",
    "make_nodes",
    "mark_parameter",
    "move_towards",
    "node_count",
    "parameters_of",
    "redirected",
    "set_grad_mode",
    "uncompiled",
    "use_own_parameters",
    "version_of",
]

RunningNorm = batchnorm._NormBase
BatchNorm = batchnorm._BatchNorm

_C: Any = torch._C


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own dictionary of parameters; none for a scripted module, whose are not Python's."""
    found: dict[str, nn.Parameter | None] = vars(module).get("_parameters", {})
    return found


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own dictionary of buffers; likewise."""
    found: dict[str, torch.Tensor | None] = vars(module).get("_buffers", {})
    return found


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's own dictionary of modules; likewise."""
    found: dict[str, nn.Module | None] = {} if isinstance(module, torch.jit.ScriptModule) else module._modules
    return found


def hooks_of(module: nn.Module) -> list[Any]:
    """Return what runs before a module's forward pass."""
    return list(module._forward_pre_hooks.values())


def use_own_parameters(module: nn.Module) -> None:
    """Let a recurrent layer, which keeps a list of its parameters, use those that it has now."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def mark_parameter(tensor: Any) -> None:
    """Make a tensor that is part of a graph a parameter to `isinstance`."""
    tensor._is_param = True


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor has been edited in place; tensors made in inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def move_towards(states: list[torch.Tensor], values: list[torch.Tensor], factor: float) -> None:
    """Edit tensors in place: so much of the new values, the rest of the old ones."""
    torch._foreach_mul_(states, 1 - factor)
    torch._foreach_add_(states, values, alpha=factor)


def set_grad_mode(on: bool) -> None:  # noqa: FBT001
    """Say whether autograd records in this thread."""
    _C._set_grad_enabled(on)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that `torch.compile` leaves alone; without loading the compiler, as `torch.compiler.disable` does."""
    found: Callable[..., Any] = _disable_dynamo(function)
    return found


def node_count() -> int:
    """Return this thread's counter of autograd nodes, which decides the order in which gradients are added."""
    count: int = _C._autograd._get_sequence_nr()
    return count


def make_nodes(count: int) -> None:
    """Move this thread's counter of autograd nodes on."""
    torch.atleast_1d([_SEED] * count)  # type: ignore[no-untyped-call] # views, made without returning to Python


def function_modes() -> bool:
    """Say whether this thread is under a function mode; a default device is one."""
    return bool(_C._len_torch_function_stack())


def is_confined() -> bool:
    """Say whether this thread is under something that other threads cannot share.

    Function transforms, forward-mode differentiation, dispatch and function modes (export, fake tensors), tracing and
    saved-tensor hooks act on the thread they were entered in; elsewhere the same code would give other results without a word.

    Returns:
        Whether replicas have to run in this thread.

    >>> is_confined()
    False
    """
    return bool(
        _C._len_torch_dispatch_stack()
        or _C._functorch.peek_interpreter_stack() is not None
        or _C._autograd._top_saved_tensors_default_hooks(True) is not None  # noqa: FBT003
        or _C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or torch.compiler.is_compiling()
        or (function_modes() and not all(isinstance(mode, DeviceContext) for mode in _modes()))
    )


def _modes() -> list[Any]:
    return _get_current_function_mode_stack()  # type: ignore[no-untyped-call]


@contextmanager
def redirected(entries: Mapping[nn.Module, Callable[..., Any]]) -> Generator[None]:
    """Let calls of modules' forward passes, made in this context, go through functions.

    The forward pass is replaced in the very module, so that whoever refers to it is redirected; other threads, and other contexts
    around the same module, have its own.

    Args:
        entries: Called with the module's own forward pass and the arguments of the call.
    """
    token = _entries.set({**_entries.get(), **entries})
    with _redirecting.lock:
        for module in entries:
            own, users = _redirecting.users.get(module, (vars(module).get("forward"), 0))
            if not users:
                vars(module)["forward"] = partial(_redirect, module, module.forward)
            _redirecting.users[module] = own, users + 1
    try:
        yield
    finally:
        _entries.reset(token)
        with _redirecting.lock:
            for module in entries:
                own, users = _redirecting.users.pop(module)
                if users > 1:
                    _redirecting.users[module] = own, users - 1
                elif own is None:
                    vars(module).pop("forward", None)
                else:
                    vars(module)["forward"] = own


def _redirect(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    entry = _entries.get().get(module)
    return forward(*args, **kwargs) if entry is None else entry(forward, *args, **kwargs)


class _Redirecting:
    """Which modules are redirected: their own instance-level forward pass, and by how many calls."""

    def __init__(self) -> None:
        self.users: dict[nn.Module, tuple[Any, int]] = {}
        self.unlock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.unlock)  # another thread may have held it

    def unlock(self) -> None:
        self.lock = threading.Lock()


_entries: ContextVar[Mapping[nn.Module, Callable[..., Any]]] = ContextVar(
    "isobatch_torch_entries", default=MappingProxyType({})
)
_redirecting = _Redirecting()
_SEED = torch.zeros((), requires_grad=True)
