"""The interface between what is shared and a framework: what a backend must do, and what is passed through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar, get_args

from isobatch.devices import Device, DeviceRequest
from isobatch.placement import Balance, Part, Placement
from isobatch.rows import Policy, check_policy

__all__ = [
    "Axis",
    "Backend",
    "Options",
    "Replica",
    "Result",
    "Scalars",
    "Shard",
    "StatePolicy",
    "current_replica",
    "running",
]

M = TypeVar("M")

Scalars: TypeAlias = Literal["mean", "sum", "stack"]
StatePolicy: TypeAlias = Literal["merge", "first", "sequential"]
Axis: TypeAlias = int | Mapping[Any, int]
"""A batch axis: one for all arrays, or by argument name, position or mapping key (0 for those not named)."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a parallel model splits, joins and keeps state; the same for both frameworks.

    Args:
        policy: Who gets which rows; see `split_sizes`.
        min_rows: Use fewer replicas rather than give one fewer rows than this.
        axis: The batch axis of inputs.
        output_axis: The batch axis of outputs.
        broadcast: Names of arguments, or keys of a mapping of inputs, that every replica gets whole.
        scalars: How 0-d float outputs of the replicas become one: their row-weighted mean, their sum, or a vector of all.
        state: What becomes of running state: `"merge"` pools it over all rows, `"first"` keeps what rank 0 saw (as
            `torch.nn.DataParallel` does), `"sequential"` updates it replica after replica (as `multi_gpu_model` did).
    """

    policy: Policy = "balanced"
    min_rows: int = 1
    axis: Axis = 0
    output_axis: Axis = 0
    broadcast: tuple[str, ...] = ()
    scalars: Scalars = "mean"
    state: StatePolicy = "merge"

    def check(self, replicas: int) -> Options:
        """Return these options if every word is known and fits the number of replicas.

        Args:
            replicas: Number of replicas.

        Raises:
            ValueError: A word is unknown, or the policy does not fit `replicas`.

        >>> Options(policy=(2, 1)).check(2).policy
        (2, 1)
        """
        check_policy(self.policy, replicas, self.min_rows)
        for name, words in (("scalars", get_args(Scalars)), ("state", get_args(StatePolicy))):
            if getattr(self, name) not in words:
                msg = f"Expected {name} to be one of {words}, got {getattr(self, name)!r}."
                raise ValueError(msg)
        if isinstance(self.broadcast, str):
            msg = f"Expected broadcast to be a tuple of names, got {self.broadcast!r}; write broadcast=({self.broadcast!r},)."
            raise ValueError(msg)  # noqa: TRY004 - one kind of error for every option
        return self


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows one replica gets, with everything that travels with them.

    Args:
        rank: The replica it is for.
        device: Where it lies.
        rows: Which rows of the batch these are; `None` when the call had nothing to split.
        total: Rows of the whole batch.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    rank: int
    device: Device
    rows: range | None
    total: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        rows = (
            "all rows"
            if self.rows is None
            else f"rows {self.rows.start}..{self.rows.stop - 1}"
            if self.rows
            else "no rows"
        )
        return f"replica {self.rank} on {self.device}, {rows}"


@dataclass(frozen=True, slots=True)
class Replica(Generic[M]):
    """The template as run on one device.

    Args:
        rank: Position among the replicas, from 0.
        device: Where it runs.
        module: What is called; it shares the template's weights.
    """

    rank: int
    device: Device
    module: M


@dataclass(frozen=True, slots=True)
class Result:
    """What one replica returned.

    Args:
        shard: What it was called with.
        output: What came back, marks included.
    """

    shard: Shard
    output: Any


class Backend(Protocol):
    """What a framework must do itself; the verbs that need nothing else are written once, here.

    Arrays are the framework's tensors and numpy arrays. An explicit subclass inherits `scatter` and `gather`.
    """

    name: ClassVar[str]

    def devices(self) -> tuple[Device, ...]:
        """Return the devices this process sees, accelerators first; no memory on them is taken."""
        ...

    def resolve(self, request: DeviceRequest) -> tuple[Device, ...]:
        """Return the devices that a request means; see `isobatch.devices.resolve_devices`."""
        ...

    def shape(self, value: Any) -> tuple[int, ...] | None:
        """Return an array's shape, `()` for a 0-d one, and `None` for what is no array."""
        ...

    def take(self, array: Any, rows: slice | None, axis: int, device: Device) -> Any:
        """Return rows of an array (all of it for `None`) on a device, as a view where that is possible."""
        ...

    def join(self, arrays: Sequence[Any], axis: int, device: Device) -> Any:
        """Return arrays put together along an axis, on a device."""
        ...

    def reduce(self, arrays: Sequence[Any], weights: Sequence[int], how: Scalars, device: Device) -> Any:
        """Return 0-d arrays reduced to one: `"mean"` weights them by rows, `"stack"` gives a vector."""
        ...

    def equal(self, a: Any, b: Any) -> bool:
        """Return whether two arrays have the same shape, type and values, NaN being equal to NaN."""
        ...

    def replicate(self, model: Any, devices: Sequence[Device]) -> list[Replica[Any]]:
        """Return the model as run on each device; no weight is copied where devices share memory."""
        ...

    def parallel_apply(self, replicas: Sequence[Replica[Any]], shards: Sequence[Shard]) -> list[Result]:
        """Run on each shard the replica of its rank."""
        ...

    def data_parallel(
        self,
        model: Any,
        devices: DeviceRequest,
        options: Options,
        output_device: DeviceRequest,
        placements: Sequence[Placement] | None = None,
    ) -> Any:
        """Return a model of the same kind that splits each batch between replicas, each placed on devices of its own if asked for."""
        ...

    def parts(self, model: Any) -> list[str]:
        """Name everything in a model that can be placed, outer parts before what is inside of them."""
        ...

    def survey(self, model: Any, example: Any, balance: Balance) -> list[Part]:
        """Return the innermost parts in an order in which they can run, with what each depends on and costs."""
        ...

    def device_parallel(self, model: Any, placement: Placement, output_device: DeviceRequest) -> Any:
        """Return a model of the same kind whose parts run on different devices."""
        ...

    def load(
        self,
        path: str | PathLike[str],
        devices: DeviceRequest,
        options: Options,
        output_device: DeviceRequest,
    ) -> Any:
        """Return the model in a file, parallel again."""
        ...

    def scatter(
        self,
        inputs: Any,
        devices: Sequence[Device],
        *,
        kwargs: Mapping[str, Any] | None = None,
        options: Options | None = None,
        sizes: Sequence[int] | None = None,
        names: Sequence[str] = (),
    ) -> list[Shard]:
        """Split the arguments of a call by rows; see `isobatch.scatter.scatter`."""
        from isobatch.scatter import scatter

        args = inputs if isinstance(inputs, tuple) else (inputs,)
        return scatter(self, args, kwargs or {}, devices, options or Options(), sizes=sizes, names=names)

    def gather(self, results: Sequence[Result], device: Device, *, options: Options | None = None) -> Any:
        """Join what the replicas returned; see `isobatch.gather.gather`."""
        from isobatch.gather import gather

        return gather(self, results, device, options or Options())


running: ContextVar[Shard | None] = ContextVar("isobatch_running", default=None)
"""Set by the backends around each replica's call."""


def current_replica() -> Shard | None:
    """Return the shard that the replica now running was called with; `None` outside of a parallel call.

    Returns:
        Its `rank`, `device`, `rows` and `total` say where the code is.

    >>> current_replica() is None
    True
    """
    return running.get()
