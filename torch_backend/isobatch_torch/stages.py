"""One call of a module whose parts run on different devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from isobatch.devices import Device
from isobatch.placement import Placement
from isobatch.trees import flatten, unflatten
from isobatch_torch.accelerators import KIND, current, memory, same_memory, send
from isobatch_torch.internals import redirected
from isobatch_torch.workers import add_note

__all__ = ["Stages", "move_parts"]


class Stages:
    """Runs a module's own code, with each part's forward pass on the part's device.

    What a part gets is sent to its device, once however often it is used there. Accelerators work while Python goes on, so that
    branches on different ones run at once, forward and backward. CPU devices are one memory and the same cores: there the
    parts run one after another with all of them, which took half the time of one thread for each device (docs/device-parallelism.md).

    Args:
        placement: The parts and their devices.
        output: Where operations run whose inputs come from several devices.

    >>> module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> stages = Stages(Placement({"0": Device("cpu", 0), "1": Device("cpu", 1)}), Device("cpu"))
    >>> stages.run(module, "__call__", torch.ones(4, 2)).shape
    torch.Size([4, 1])
    """

    def __init__(self, placement: Placement, output: Device) -> None:
        self.placement = placement
        self.output = memory(output)
        self.apart = len({*map(memory, placement.devices), self.output}) > 1

    def run(self, module: nn.Module, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a module.

        Args:
            module: It has the parts.
            method: Its name.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            What it returns.

        Raises:
            BaseException: What a part raised, with a note that says which one it was.
        """
        transfers = _Transfers()
        entries = {
            module.get_submodule(name): partial(_enter, transfers, name, device)
            for name, device in self.placement.items()
        }
        with Together(self.output) if self.apart else nullcontext(), redirected(entries):
            return getattr(module, method)(*args, **kwargs)


def _enter(
    transfers: _Transfers, name: str, device: Device, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a part's forward pass on its device."""
    try:
        with current(device):
            if KIND is not None:
                args, kwargs = transfers.bring((args, kwargs), memory(device))
            return forward(*args, **kwargs)
    except BaseException as error:
        add_note(error, f"in part {name!r} on {device}")
        raise


class _Transfers:
    """What has been sent where in one call."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def bring(self, value: Any, place: torch.device) -> Any:
        """Return a container with its tensors on a place, each sent at most once."""
        leaves, spec = flatten(value, _is_tensor)
        return unflatten(spec, [self.there(leaf, place) if _is_tensor(leaf) else leaf for leaf in leaves])

    def there(self, tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
        if same_memory(tensor, place):
            return tensor
        key = id(tensor), place
        if key not in self.sent:  # the tensor is kept with it, so that no other gets its `id`
            self.sent[key] = tensor, send(tensor, place)
        return self.sent[key][1]


class Together(TorchFunctionMode):
    """Brings tensors together where torch refuses an operation because they lie on several devices.

    They go where the activations are, so that weights come to them; to the output device if the activations are apart.

    Args:
        output: The output device's memory.

    >>> with Together(torch.device("meta")):
    ...     torch.mm(torch.ones(2, 2, device="meta"), nn.Parameter(torch.ones(2, 2))).device
    device(type='meta')
    """

    def __init__(self, output: torch.device) -> None:
        super().__init__()
        self.output = output

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the function; once more with its tensors in one place if that is what it lacked."""
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if not any(words in str(error) for words in _APART):
                raise
        leaves, spec = flatten((args, kwargs or {}), _is_tensor)
        tensors = [leaf for leaf in leaves if _is_tensor(leaf)]
        places = {
            tensor.device for tensor in tensors if tensor.dim() and not isinstance(tensor, nn.Parameter)
        }
        place = places.pop() if len(places) == 1 else self.output
        args, kwargs = unflatten(spec, [leaf.to(place) if _is_tensor(leaf) else leaf for leaf in leaves])
        return func(*args, **kwargs)


def move_parts(module: nn.Module, placement: Placement) -> None:
    """Move the weights of a module's parts to their devices; a weight of two parts to the first one's.

    Args:
        module: It has the parts.
        placement: The parts and their devices.
    """
    for name, device in reversed(list(placement.items())):
        module.get_submodule(name).to(memory(device))


_APART = ("same device", "expected device")
"""What torch says of tensors on several devices."""


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
