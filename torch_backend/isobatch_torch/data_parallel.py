"""The module that splits each batch between replicas of another module."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import nn

from isobatch.backend import Options, Replica, Result, Shard, running
from isobatch.devices import Device, DeviceRequest, resolve_devices
from isobatch.errors import ModelError
from isobatch.placement import Placement
from isobatch_torch.accelerators import memory, one_device, visible
from isobatch_torch.backend import BACKEND
from isobatch_torch.engine import Engine, Schedule, run_template
from isobatch_torch.memories import is_home
from isobatch_torch.stages import move_parts
from isobatch_torch.wrapper import Wrapper

__all__ = ["DataParallel"]


class DataParallel(Wrapper, nn.DataParallel[nn.Module]):  # pyright: ignore[reportIncompatibleVariableOverride] - training
    """Split each batch, run one replica of a module per device, join the results: `torch.nn.DataParallel`, done right.

    To its user it is the module: same parameters under the same names, same attributes and methods, same state. Differences
    from `torch.nn.DataParallel` are listed in docs/migrating-from-DataParallel.md, with how to get the old behaviour.

    Args:
        module: What is made parallel. It keeps its weights; `parallel.module` is this very object.
        device_ids: `None`: every visible accelerator, or one CPU replica where there is none. A number of replicas, or a
            sequence of devices in any usual spelling; numbers mean accelerators, CPU devices where there are none.
        output_device: Where results are put together; by default the first device.
        dim: The batch axis of inputs and outputs, unless `options` say otherwise.
        options: Who gets which rows, what is not split, how scalars are reduced, what becomes of running state.
        schedule: `"threads"` runs the replicas at once, `"sequential"` one after another in the caller's thread; `"auto"` takes the
            faster of both: on the CPU they run one after another where gradients are recorded, or where each is over in no time.
        placements: Where the parts of each replica run, if they run on different devices; see `isobatch.data_parallel`.

    Raises:
        DeviceError: A device is absent or cannot be understood.
        ModelError: `module` is parallel already.
        ValueError: An option or the schedule is unknown.

    >>> parallel = DataParallel(nn.Linear(3, 2), ["cpu:0", "cpu:1"])
    >>> parallel(torch.ones(5, 3)).shape, list(parallel.state_dict())
    (torch.Size([5, 2]), ['weight', 'bias'])
    """

    module: nn.Module
    devices: tuple[Device, ...]
    options: Options
    schedule: Schedule

    def __init__(
        self,
        module: nn.Module,
        device_ids: DeviceRequest = None,
        output_device: DeviceRequest = None,
        dim: int = 0,
        *,
        options: Options | None = None,
        schedule: Schedule = "auto",
        placements: Sequence[Placement] | None = None,
    ) -> None:
        if isinstance(module, (nn.DataParallel, Wrapper)):
            msg = (
                f"Expected a module that is not parallel yet, got {type(module).__name__}; pass its .module."
            )
            raise ModelError(msg)
        devices = resolve_devices(device_ids, visible())
        output = devices[0] if output_device is None else one_device(output_device)
        # In place of nn.DataParallel's own constructor, which would want accelerators.
        self.wrap(module, devices=devices, dim=dim, _output=output, _engine=None, _placements=placements)
        self.options = options or Options(axis=dim, output_axis=dim)
        self.schedule = schedule
        if placements is not None:
            move_parts(module, placements[0])
        elif len(devices) == 1 and devices[0].kind != "cpu":
            module.to(memory(devices[0]))

    def call_method(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run any method of the module in parallel.

        Args:
            method: Its name.
            *args: As the method takes them, for the whole batch.
            **kwargs: Likewise.

        Returns:
            What the method would return.

        >>> class Coder(nn.Module):
        ...     def encode(self, x):
        ...         return x + 1
        >>> DataParallel(Coder(), ["cpu:0", "cpu:1"]).call_method("encode", torch.zeros(3))
        tensor([1., 1., 1.])
        """
        if running.get() is not None:  # inside of another parallel call, whose replicas are the parallelism
            return getattr(self.module, method)(*args, **kwargs)
        return self.gather(self.parallel_apply(self.scatter(args, kwargs, method), method))

    def scatter(  # type: ignore[override]
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], method: str = "__call__"
    ) -> list[Shard]:
        """Split the arguments of a call.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            method: Name of what is called.

        Returns:
            A shard for each replica that gets rows.
        """
        names: Sequence[str] = ()
        if self.options.broadcast or not isinstance(self.options.axis, int):
            called = self.module.forward if method == "__call__" else getattr(self.module, method)
            names = tuple(inspect.signature(called).parameters)
        return BACKEND.scatter(args, self.devices, kwargs=kwargs, options=self.options, names=names)

    def replicate(self) -> list[Replica[nn.Module]]:  # type: ignore[override]
        """Return the replicas, up to date with the module."""
        return self.engine.replicate()

    def parallel_apply(self, shards: Sequence[Shard], method: str = "__call__") -> list[Result]:  # type: ignore[override]
        """Run the replicas of these shards; a single one on the module's own device is the module itself.

        Args:
            shards: From `scatter`.
            method: Name of what is called.

        Returns:
            One result for each shard.
        """
        if len(shards) == 1 and vars(self)["_placements"] is None and is_home(self.module, shards[0].device):
            return [run_template(self.module, method, shards[0])]
        return self.engine.run(method, shards, self.options.state, self.schedule)

    def gather(self, results: Sequence[Result]) -> Any:  # type: ignore[override]
        """Join what the replicas returned.

        Args:
            results: From `parallel_apply`.

        Returns:
            One output, as if the module had returned it.
        """
        return BACKEND.gather(results, self._output, options=self.options)

    def invalidate(self) -> None:
        """Forget everything that was kept between calls: replicas, copies of weights on other devices, what calls have shown.

        It is seldom needed: edits of the module are noticed, but for those of weights through `.data` where replicas run
        without gradients on other devices than the module's.
        """
        vars(self)["_engine"] = None

    @property
    def engine(self) -> Engine:
        """What runs the replicas."""
        if vars(self)["_engine"] is None:
            vars(self)["_engine"] = Engine(self.module, self.devices, vars(self)["_placements"])
        engine: Engine = vars(self)["_engine"]
        return engine

    @property
    def device_ids(self) -> list[int]:  # type: ignore[override]
        """The devices' numbers, as `torch.nn.DataParallel` gives them."""
        return [device.index for device in self.devices]

    @property
    def src_device_obj(self) -> torch.device:  # type: ignore[override]
        """Where the weights are expected."""
        return memory(self.devices[0])

    @property
    def output_device(self) -> torch.device:  # type: ignore[override]
        """Where results are put together."""
        return memory(vars(self)["_output"])

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "options":
            vars(self)[name] = value.check(len(self.devices))
        elif name == "schedule":
            if value not in get_args(Schedule):
                msg = f"Expected schedule to be one of {get_args(Schedule)}, got {value!r}."
                raise ValueError(msg)
            vars(self)[name] = value
        else:
            super().__setattr__(name, value)
