"""A module trained by several processes: `DistributedDataParallel` around the replicas of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook

from isobatch.backend import Options, Result, Shard, running
from isobatch.clusters import Cluster
from isobatch.devices import DeviceRequest
from isobatch.trees import flatten, unflatten
from isobatch_torch.accelerators import KIND, visible
from isobatch_torch.collective import TorchCollective, at_exit
from isobatch_torch.data_parallel import DataParallel
from isobatch_torch.internals import version_of
from isobatch_torch.norms import Across, across

__all__ = ["ClusterParallel"]


class ClusterParallel(DataParallel):
    """A `DataParallel` in each of several processes, which together train one module on one batch.

    Each process calls it on its rows of the batch. In training mode and in backward passes the processes talk to each other, so all have
    to take part, with no rows if need be; evaluation needs nobody. Gradients, running state and 0-d outputs are those of all
    rows: each process counts for the rows it had, as is right for losses that are means over rows. Where they are sums, say
    `scalars="sum"`: then gradients are added up as they are. `DistributedDataParallel` carries the gradients.

    Args:
        module: What is made parallel; every process gets the weights of rank 0.
        cluster: The processes, and the devices of this one.
        output_device: As for `DataParallel`.
        options: As for `DataParallel`, but for those that `Cluster.check` refuses.
        ddp: What `DistributedDataParallel` takes, such as `find_unused_parameters=True`.

    Raises:
        ClusterError: The module, or torch, is not the same in every process.
        ValueError: An option is one that `Cluster.check` refuses.
    """

    cluster: Cluster

    def __init__(
        self,
        module: nn.Module,
        cluster: Cluster,
        output_device: DeviceRequest = None,
        *,
        options: Options | None = None,
        **ddp: Any,
    ) -> None:
        super().__init__(module, cluster.local_devices(visible()), output_device, options=options)
        cluster.check(self.options)
        vars(self).update(cluster=cluster, _ddp=None, _ddp_options=ddp, _step=None, _random=None)
        if not _members:
            at_exit(_forget)
        _members.add(self)
        self._agree()
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                torch.distributed.broadcast(tensor.data, 0)

    def _agree(self) -> None:
        """Make sure that all processes have the same module."""
        module = self.module
        tensors = dict((*module.named_parameters(), *module.named_buffers()))
        self.cluster.agree(
            {
                "torch": torch.__version__,
                "model": type(module).__qualname__,
                "options": self.options,
                **{
                    name: f"{tuple(x.shape)} {x.dtype} trained={x.requires_grad}"
                    for name, x in tensors.items()
                },
            }
        )

    def call_method(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run any method of the module on this process's rows; see `DataParallel.call_method`."""
        if running.get() is not None or not (self.training or torch.is_grad_enabled()):
            return super().call_method(method, *args, **kwargs)
        return self._engine_of_gradients()(method, args, kwargs)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Add up gradients in this process alone, to be shared by the first backward pass after it.

        Each backward pass counts for its own rows. Only the number of rows is told the others meanwhile: 8 bytes a call.
        """
        engine = self._engine_of_gradients()
        if isinstance(engine, DistributedDataParallel):
            with engine.no_sync():
                yield
        else:
            yield

    def _engine_of_gradients(self) -> nn.Module:
        """Return what is called, and has the gradients of `backward` added up; up to date with what is trained."""
        trained = tuple((id(p), p.requires_grad) for p in self.module.parameters())
        if vars(self)["_ddp"] is None or vars(self)["_ddp"][0] != trained:
            vars(self)["_ddp"] = (trained, self._build(), self._watch_gradients())
        engine: nn.Module = vars(self)["_ddp"][1]
        return engine

    def _build(self) -> nn.Module:
        inside = _Inside(self)
        if not any(parameter.requires_grad for parameter in inside.parameters()):
            return inside  # which DistributedDataParallel refuses
        options: dict[str, Any] = {_SYNC_BUFFERS: False, "init_sync": False, **vars(self)["_ddp_options"]}
        return DistributedDataParallel(inside, **options)

    def _watch_gradients(self) -> list[Any]:
        """Weight each gradient by rows before it is added up; `DistributedDataParallel` averages ranks as equals."""
        old = vars(self)["_ddp"]
        for handle in old[2] if old else ():
            handle.remove()

        @unserializable_hook  # type: ignore[untyped-decorator]
        def weigh(gradient: torch.Tensor) -> torch.Tensor | None:
            step: _Step | None = vars(self)["_step"]
            return None if step is None else step.weigh(gradient)

        trained = [p for p in self.module.parameters() if p.requires_grad]
        return [p.register_hook(weigh) for p in trained]  # type: ignore[no-untyped-call]

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make one call that the other processes make too."""
        shards = self.scatter(args, kwargs, method)
        rows = 1 if shards[0].rows is None else shards[0].total
        step = _Step(self.cluster, rows, self.src_device_obj, self.options.scalars)
        vars(self)["_step"] = step
        if self.training:
            step.start()
        if not rows:
            shards = [_with_borrowed_rows(shards[0])]
        with self._own_random():
            results = self._run_replicas(method, shards, step)
        output = super().gather(results)
        leaves, spec = flatten(output, torch.is_tensor)
        if not rows:
            leaves = [leaf[:0] if torch.is_tensor(leaf) and leaf.dim() else leaf for leaf in leaves]
        if self.training:
            leaves = _pool_scalars(leaves, step)
        return unflatten(spec, leaves)

    def _run_replicas(self, method: str, shards: Sequence[Shard], step: _Step) -> list[Result]:
        """Run the replicas of this process, and let running state be that of all processes."""
        before = {name: (buffer, version_of(buffer)) for name, buffer in self.module.named_buffers()}
        if not self.training or not before:
            return self.parallel_apply(shards, method)
        pooling = Across(step.add_up)
        token = across.set(pooling if self.options.state == "merge" else None)
        try:
            results = self.engine.run(method, shards, self.options.state, self.schedule)
        finally:
            across.reset(token)
        self._pool_buffers(before, pooling, step)
        return results

    def _pool_buffers(
        self, before: dict[str, tuple[torch.Tensor, int]], pooling: Across, step: _Step
    ) -> None:
        """Let float buffers that any process has updated be the mean of all, each weighted by its rows, or those of rank 0."""
        pooled = {id(buffer) for layer in pooling.layers for buffer in layer.buffers(recurse=False)}
        named = [
            (name, buffer)
            for name, buffer in self.module.named_buffers()
            if id(buffer) not in pooled and buffer.is_floating_point() and name in before
        ]
        if not named:
            return
        changed = torch.tensor(
            [
                float(before[name][0] is not buffer or before[name][1] != version_of(buffer))
                for name, buffer in named
            ],
            device=self.src_device_obj,
        )
        step.collective.add_up(changed)
        buffers = [buffer for (_, buffer), many in zip(named, changed.tolist(), strict=True) if many]
        weight = step.weight if self.options.state == "merge" else float(self.cluster.rank == 0)
        with torch.no_grad():
            for buffer in buffers:
                buffer.copy_(
                    step.add_up(buffer * weight) if weight else step.add_up(torch.zeros_like(buffer))
                )

    @contextmanager
    def _own_random(self) -> Generator[None]:
        """Draw other random numbers than the other processes do; rank 0 draws what one process would."""
        if not self.training or not self.cluster.rank:
            yield
            return
        generators = [torch.default_generator]
        if KIND is not None:
            index = self.src_device_obj.index or 0
            generators.append(torch.get_device_module(KIND).default_generators[index])
        theirs = [generator.get_state() for generator in generators]
        own = vars(self)["_random"]
        for generator, state in zip(generators, own or theirs, strict=True):
            if own is None:
                generator.manual_seed(generator.initial_seed() + self.cluster.rank)
            else:
                generator.set_state(state)
        try:
            yield
        finally:
            vars(self)["_random"] = [generator.get_state() for generator in generators]
            for generator, state in zip(generators, theirs, strict=True):
                generator.set_state(state)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "cluster": Cluster(), "_ddp": None, "_step": None, "_random": None}


# torch 2.13 warns of the name that it had before.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


_members: WeakSet[ClusterParallel] = WeakSet()


def _forget() -> None:
    for member in _members:
        vars(member)["_ddp"] = None


class _Inside(nn.Module):
    """What `DistributedDataParallel` wraps: the module's parameters, and one call of all its replicas."""

    def __init__(self, parallel: ClusterParallel) -> None:
        super().__init__()
        self.module = parallel.module
        self.run: Callable[..., Any] = parallel._run  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    def forward(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.run(method, args, kwargs)


class _Step:
    """One call in every process: how many rows each had.

    Args:
        cluster: The processes.
        rows: Of this process.
        place: Where to send numbers from.
        how: Whether losses are means over rows, as `"mean"` has it, or sums.
    """

    def __init__(self, cluster: Cluster, rows: int, place: torch.device, how: str) -> None:
        self.collective: TorchCollective = cluster.collective  # type: ignore[assignment]
        self.size = cluster.size
        self.rows = rows
        self.place = place
        self.how = how
        self.total: Callable[[], torch.Tensor] | None = None
        self.known: float | None = None

    def start(self) -> Callable[[], torch.Tensor]:
        """Tell the others how many rows there are here; what they say is waited for when it is needed."""
        count = torch.tensor(float(self.rows), dtype=torch.float64, device=self.place)
        self.total = self.collective.start_to_add_up(count)
        return self.total

    @property
    def weight(self) -> float:
        """The part of all rows that this process had; 0 where nobody had any."""
        if self.known is None:
            total = self.total or self.start()
            self.known = self.rows / max(float(total()), 1.0)
        return self.known

    @property
    def part(self) -> float:
        """What a loss of this process counts for in that of all."""
        return self.weight if self.how == "mean" else float(self.rows > 0)

    def weigh(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return what this process adds to the mean over all processes; `None` for the gradient as it is."""
        factor = self.part * self.size
        if factor == 1:
            return None
        return gradient * factor if factor else torch.zeros_like(gradient)

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes that had rows."""
        return self.collective.add_up(tensor if self.rows else torch.zeros_like(tensor))


def _with_borrowed_rows(shard: Shard) -> Shard:
    """Return a shard of two rows of zeros for one of none: no operation sees an empty batch, and a normalisation has two values."""
    leaves, spec = flatten((shard.args, shard.kwargs), torch.is_tensor)
    leaves = [
        leaf.new_zeros([size or 2 for size in leaf.shape])
        if torch.is_tensor(leaf) and not leaf.numel()
        else leaf
        for leaf in leaves
    ]
    args, kwargs = unflatten(spec, leaves)
    return Shard(shard.rank, shard.device, range(2), 2, args, kwargs)


def _pool_scalars(leaves: list[Any], step: _Step) -> list[Any]:
    """Reduce 0-d float outputs over all processes, as those of one process's replicas are."""
    places = [
        i
        for i, leaf in enumerate(leaves)
        if torch.is_tensor(leaf) and not leaf.dim() and leaf.is_floating_point()
    ]
    for i in places:
        leaves[i] = _Pooled.apply(leaves[i], step)  # type: ignore[no-untyped-call]
    return leaves


class _Pooled(torch.autograd.Function):
    """A number that each process has part of. What is computed from it is the same in all, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, step: _Step) -> torch.Tensor:  # noqa: ARG004 - torch's signature
        return step.add_up(own * step.part)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # noqa: ARG004
        return grad_outputs[0], None
