"""What placing by cost has to know of a module: its parts, what depends on what, and what each costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from isobatch.errors import ModelError
from isobatch.placement import Balance, Part
from isobatch.trees import flatten
from isobatch_torch.device_parallel import check_placeable
from isobatch_torch.internals import redirected

__all__ = ["survey"]

_RUNS = 3


def survey(module: nn.Module, example: Any, balance: Balance) -> list[Part]:
    """Return the innermost modules that are called, in the order of their calls.

    The module's own code runs on the example, in evaluation mode and without gradients; which tensors come from which part is seen in it.

    Args:
        module: A module.
        example: Its arguments for a few rows: a tuple, or the only one.
        balance: Whether the cost is seconds of a forward pass (of several, the fastest) or bytes of weights and outputs.

    Raises:
        ModelError: There is no example, or the module is a wrapper.
    """
    check_placeable(module)
    if example is None:
        msg = "Expected example=inputs for a few rows, which a torch module does not tell; got None."
        raise ModelError(msg)
    args = example if isinstance(example, tuple) else (example,)
    modes = {part: part.training for part in module.modules()}
    runs = [_Run() for _ in range(_RUNS if balance == "time" else 1)]
    try:
        module.eval()
        with torch.no_grad():
            for run in runs:
                run.make(module, args)
    finally:
        for part, mode in modes.items():
            part.training = mode
    first = runs[0]
    return [
        Part(
            name,
            tuple(before),
            min(run.seconds[name] for run in runs) if balance == "time" else first.bytes[name],
        )
        for name, before in first.after.items()
    ]


class _Run:
    """One run in which it is noted which parts run, how long, and where tensors come from."""

    def __init__(self) -> None:
        self.after: dict[str, dict[str, None]] = {}
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, float] = {}
        self.origins: dict[
            int, tuple[torch.Tensor, frozenset[str]]
        ] = {}  # tensors are kept so that no other gets their `id`
        self.depths: list[int] = []  # for each call going on, how many calls were made in it

    def make(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        entries = {part: partial(self.call, name, part) for name, part in module.named_modules() if name}
        with _Tracing(self), redirected(entries):
            module(*args)

    def call(self, name: str, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.depths:
            self.depths[-1] += 1
        self.depths.append(0)
        start = perf_counter()
        try:
            output = forward(*args, **kwargs)
        finally:
            inner = self.depths.pop()
        if inner:
            return output
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        before = frozenset(one for one in self.coming_from((args, kwargs)) if one != name)
        self.after.setdefault(name, {}).update(dict.fromkeys(sorted(before)))
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start
        weights = () if name in self.bytes else (*part.parameters(), *part.buffers())
        self.bytes[name] = self.bytes.get(name, 0.0) + sum(x.nbytes for x in (*weights, *_tensors(output)))
        self.mark(output, frozenset((name,)))
        return output

    def coming_from(self, value: Any) -> frozenset[str]:
        return frozenset().union(*(self.origins[id(x)][1] for x in _tensors(value) if id(x) in self.origins))

    def mark(self, value: Any, origins: frozenset[str]) -> None:
        self.origins.update((id(tensor), (tensor, origins)) for tensor in _tensors(value))


class _Tracing(TorchFunctionMode):
    """Says of each tensor that code between the parts makes, which parts it comes from."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if (origins := self.run.coming_from((args, kwargs))) or not self.run.depths:
            self.run.mark(output, origins)
        return output


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(value, _is_tensor)[0] if _is_tensor(leaf)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
