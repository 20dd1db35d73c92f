"""The module whose parts run on different devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from isobatch.devices import Device, DeviceRequest
from isobatch.errors import ModelError
from isobatch.placement import Placement
from isobatch_torch.accelerators import one_device
from isobatch_torch.stages import Stages, move_parts
from isobatch_torch.wrapper import Wrapper

__all__ = ["DeviceParallel", "check_placeable"]


class DeviceParallel(Wrapper, nn.Module):  # pyright: ignore[reportIncompatibleVariableOverride] - training
    """Run parts of a module on different devices, its own code in between.

    To its user it is the module: same parameters under the same names, same attributes and methods, same state. The parts' weights
    move to their devices; a weight that two parts share lies with the first and is sent to the other.

    Args:
        module: What is placed; `placed.module` is this very object.
        placement: Its submodules and their devices, in any usual spelling.
        output_device: Where operations run whose inputs come from several devices; by default the CPU.

    Raises:
        DeviceError: A device is absent or cannot be understood.
        ModelError: The module is a wrapper itself, or has no such parts.

    >>> import torch
    >>> placed = DeviceParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), {"0": "cpu:0", "1": "cpu:1"})
    >>> placed(torch.ones(5, 3)).shape, list(placed.state_dict())
    (torch.Size([5, 2]), ['0.weight', '0.bias', '1.weight', '1.bias'])
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Mapping[str, Any],
        output_device: DeviceRequest = None,
    ) -> None:
        names = check_placeable(module)
        found = Placement.of(placement, names, lambda spellings: [one_device(one) for one in spellings])
        output = Device("cpu") if output_device is None else one_device(output_device)
        self.wrap(module, _placement=found, _output=output, _engine=None)
        move_parts(module, found)

    @property
    def placement(self) -> Placement:
        """The parts, and the devices they run on."""
        placement: Placement = vars(self)["_placement"]
        return placement

    @property
    def devices(self) -> tuple[Device, ...]:  # type: ignore[override]
        """The devices in use."""
        return self.placement.devices

    def call_method(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run any method of the module with its parts on their devices.

        Args:
            method: Its name.
            *args: As the method takes them.
            **kwargs: Likewise.

        Returns:
            What the method would return.
        """
        if vars(self)["_engine"] is None:
            vars(self)["_engine"] = Stages(self.placement, vars(self)["_output"])
        return vars(self)["_engine"].run(self.module, method, *args, **kwargs)

    def invalidate(self) -> None:
        """Forget what calls have shown."""
        vars(self)["_engine"] = None


def check_placeable(module: nn.Module) -> list[str]:
    """Return the names of a module's submodules, outer ones first.

    Args:
        module: The template.

    Raises:
        ModelError: It is a wrapper.
    """
    if isinstance(module, (Wrapper, nn.DataParallel)):
        msg = (
            f"Expected a module that runs on one device yet, got {type(module).__name__}; give its .module. For both kinds of "
            "parallelism: isobatch.data_parallel(module, devices=[('gpu:0', 'gpu:1'), ...], placement=...)."
        )
        raise ModelError(msg)
    return [name for name, _ in module.named_modules() if name]
