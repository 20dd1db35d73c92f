"""What Keras's optimizers share, as a `torch.optim.Optimizer`: decay, clipping, averages, accumulation, and the count of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar, Literal, TypeAlias, overload

import numpy as np
import torch
from torch import nn

from isobatch.backend import current_replica

__all__ = ["Gradient", "Group", "KerasOptimizer", "Moment", "RepeatedRows", "rounded"]

RepeatedRows: TypeAlias = Literal["keras", "summed"]
_Lookup: TypeAlias = tuple[int, torch.Tensor, torch.Tensor]
"""The rank of a replica, gradients `(n, ...)`, and the rows `(n,)` they are for."""
Group: TypeAlias = "dict[str, Any]"


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient, dense or by rows.

    Args:
        values: The gradient; of one by rows a value for each time a row was looked up, `(n, ...)`.
        rows: Which rows, `(n,)`, the same one perhaps several times; `None` for a dense gradient.
        shape: Of the parameter.
    """

    values: torch.Tensor
    rows: torch.Tensor | None
    shape: torch.Size

    @staticmethod
    def of(gradient: torch.Tensor) -> Gradient:
        """Return a tensor's gradient as it is; a sparse one by rows."""
        if gradient.layout == torch.strided:
            return Gradient(gradient, None, gradient.shape)
        return Gradient(gradient._values(), gradient._indices()[0], gradient.shape)  # noqa: SLF001 - public ones coalesce

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Gradient:
        """Return the gradient with a function applied to its values."""
        return replace(self, values=function(self.values))

    def total(self, function: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        """Return the values, or a function of each, summed by row into a dense tensor."""
        values = self.values if function is None else function(self.values)
        if self.rows is None:
            return values
        return values.new_zeros(self.shape).index_add_(0, self.rows, values)

    def summed(self) -> Gradient:
        """Return the dense gradient."""
        return Gradient(self.total(), None, self.shape)


class KerasOptimizer(torch.optim.Optimizer):
    """What all of them share: decay, clipping, moving averages, accumulation and the count of steps.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        weight_decay: Decoupled: each step first takes `lr * weight_decay` of the weights away. A group's own `None` exempts it.
        clipnorm: Greatest norm of the gradient of one variable.
        clipvalue: Greatest absolute value of a gradient's element.
        global_clipnorm: Greatest norm of all gradients together.
        use_ema: Whether a moving average of the weights is kept, in `state[p]["average"]`.
        ema_momentum: What it keeps of itself in one step.
        ema_overwrite_frequency: Every how many steps the weights are replaced by it.
        gradient_accumulation_steps: How many batches make one update, by the mean of their gradients.
        loss_scale_factor: What gradients are divided by, for a loss that was multiplied by it.
        repeated_rows: What a row of an embedding counts for that was looked up several times, where its layer is watched:
            `"keras"` as Keras has it on TensorFlow, the sum of squares; `"summed"` the square of the sum, which is what the
            gradient's definition gives and what Keras has on torch.
        together: Sets of parameters that are one variable in Keras, for `clipnorm`.
        settings: The optimizer's own.

    Raises:
        ValueError: More than one way of clipping, or a setting out of range.
    """

    slots: ClassVar[tuple[str, ...]] = ()
    """Names of what is kept for each parameter."""

    own: ClassVar[dict[str, Any]] = {}
    """The optimizer's own settings, with Keras's values where nothing is said."""

    once: ClassVar[tuple[str, ...]] = ()
    """Names of settings that are kept once for all parameters and change."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        *,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        gradient_accumulation_steps: int | None = None,
        loss_scale_factor: float | None = None,
        repeated_rows: RepeatedRows = "keras",
        together: Sequence[Sequence[torch.nn.Parameter]] = (),
        **settings: Any,
    ) -> None:
        unknown = set(settings) - set(self.own)
        if unknown:
            msg = f"Expected settings out of {sorted(self.own)} for {type(self).__name__}, got {sorted(unknown)}."
            raise ValueError(msg)
        if sum(one is not None for one in (clipnorm, clipvalue, global_clipnorm)) > 1:
            msg = f"Expected one of clipnorm={clipnorm!r}, clipvalue={clipvalue!r} and global_clipnorm={global_clipnorm!r} at most."
            raise ValueError(msg)
        if gradient_accumulation_steps is not None and gradient_accumulation_steps < 2:
            msg = f"Expected gradient_accumulation_steps of 2 or more, or None, got {gradient_accumulation_steps!r}."
            raise ValueError(msg)
        if repeated_rows not in {"keras", "summed"}:
            msg = f"Expected repeated_rows to be 'keras' or 'summed', got {repeated_rows!r}."
            raise ValueError(msg)
        shared = {
            "lr": lr,
            "weight_decay": weight_decay,
            "clipnorm": clipnorm,
            "clipvalue": clipvalue,
            "global_clipnorm": global_clipnorm,
            "use_ema": use_ema,
            "ema_momentum": ema_momentum,
            "ema_overwrite_frequency": ema_overwrite_frequency,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "loss_scale_factor": loss_scale_factor,
            "repeated_rows": repeated_rows,
            "iterations": 0,
        }
        self._together = [tuple(one) for one in together]
        self._lookups: dict[torch.Tensor, list[_Lookup]] = {}
        super().__init__(params, {**shared, **self.own, **settings})

    @property
    def iterations(self) -> int:
        """How many batches have been seen."""
        return int(self.param_groups[0]["iterations"])

    @iterations.setter
    def iterations(self, count: int) -> None:
        for group in self.param_groups:
            group["iterations"] = count

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        Args:
            closure: Computes the loss and its gradients anew; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = {
            p: self._read(p, p.grad, group)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        }
        if found:
            self._apply(found)
            if self.param_groups[0]["use_ema"]:
                self._average()
        self._lookups.clear()
        self.iterations += 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Forget the gradients."""
        super().zero_grad(set_to_none)
        self._lookups.clear()

    def watch(self, embedding: nn.Embedding) -> None:
        """Take the gradient of an embedding by rows, a value for each time a row was looked up.

        Sparse gradients would not do: torch 2.13 merges some equal rows when it adds those of several replicas.

        Args:
            embedding: Its own gradient stays as it is.
        """
        embedding.register_forward_hook(partial(self._look_up, embedding.weight))

    def _look_up(
        self, weight: torch.Tensor, _: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> None:
        if not output.requires_grad:
            return
        shard = current_replica()
        rows, rank = args[0].detach().reshape(-1).long(), 0 if shard is None else shard.rank

        def note(gradient: torch.Tensor) -> None:
            values = gradient.reshape(len(rows), -1)
            self._lookups.setdefault(weight, []).append(
                (rank, values.to(weight.device), rows.to(weight.device))
            )

        output.register_hook(note)  # type: ignore[no-untyped-call]

    def use_averages(self) -> None:
        """Replace the weights by their moving averages, as Keras does when `fit` ends; without averages nothing happens."""
        with torch.no_grad():
            for p, state in self.state.items():
                if "average" in state:
                    p.copy_(state["average"])

    def prepare(self) -> None:
        """Make the state of all parameters now, instead of at the first step."""
        for group in self.param_groups:
            for p in group["params"]:
                self._state(p, group)

    def initial(self, slot: str, group: Group) -> float:  # noqa: ARG002 - others read them
        """Return what a slot is filled with at first.

        Args:
            slot: Its name.
            group: Settings.
        """
        return 0.0

    def slots_of(self, group: Group) -> tuple[str, ...]:
        """Return the names of what is kept for each parameter of a group.

        Args:
            group: Settings.
        """
        shared = [
            ("average", group["use_ema"]),
            ("gradient_accumulator", group["gradient_accumulation_steps"]),
        ]
        return (*self.slots, *(name for name, wanted in shared if wanted))

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: Moment) -> None:
        """Move one parameter.

        Args:
            p: The parameter.
            gradient: Its gradient, clipped.
            state: Its slots.
            at: Settings, learning rate and count in the parameter's precision.
        """
        raise NotImplementedError

    def _read(self, p: torch.Tensor, gradient: torch.Tensor, group: Group) -> Gradient:
        found = Gradient.of(gradient)
        if lookups := sorted(self._lookups.get(p, ()), key=itemgetter(0)):
            values, rows = [one[1] for one in lookups], [one[2] for one in lookups]
            found = Gradient(torch.cat(values), torch.cat(rows), p.shape)
        if group["repeated_rows"] == "summed":
            found = found.summed()
        scale = group["loss_scale_factor"]
        return found if scale is None else found.map(lambda values: values / scale)

    def _state(self, p: torch.Tensor, group: Group) -> dict[str, Any]:
        state = self.state[p]
        for slot in self.slots_of(group):
            if slot not in state:
                state[slot] = torch.full_like(
                    p, self.initial(slot, group), memory_format=torch.preserve_format
                )
        return state

    def _apply(self, found: dict[torch.Tensor, Gradient]) -> None:
        steps = self.param_groups[0]["gradient_accumulation_steps"]
        groups = {p: group for group in self.param_groups for p in group["params"]}
        stores: dict[torch.Tensor, torch.Tensor] = {}
        if steps:
            stores = {p: self._state(p, groups[p])["gradient_accumulator"] for p in found}
            for p, gradient in found.items():
                stores[p].add_(gradient.total())
            if (self.iterations + 1) % steps:
                return
            found = {p: Gradient(store / steps, None, p.shape) for p, store in stores.items()}
        found = self._clipped(found)
        moments: dict[tuple[int, torch.dtype], Moment] = {}
        for p in found:
            key = (id(groups[p]), p.dtype)
            moments.setdefault(key, Moment(groups[p], p.dtype))
            decay = groups[p]["weight_decay"]
            if decay is not None:
                p.sub_(p * rounded(decay) * moments[key].lr)
        self.before_update(moments.values())
        for p, gradient in found.items():
            state = self._state(p, groups[p])
            self.update(p, gradient, state, moments[id(groups[p]), p.dtype])
        for store in stores.values():
            store.zero_()

    def before_update(self, moments: Iterable[Moment]) -> None:
        """Change what is kept once for all parameters."""

    def _clipped(self, found: dict[torch.Tensor, Gradient]) -> dict[torch.Tensor, Gradient]:
        """Gradients after the clipping that was chosen; the norm of one by rows is that of its values, as in Keras."""
        settings = self.param_groups[0]
        if settings["clipnorm"]:
            limit = settings["clipnorm"]
            return {
                p: replace(gradient, values=gradient.values * limit / norm.clamp_min(limit))
                for p, (gradient, norm) in self._norms(found).items()
            }
        if settings["global_clipnorm"]:
            limit = settings["global_clipnorm"]
            norm = torch.stack([_square(one) for one in found.values()]).sum().sqrt()
            factor = limit * torch.minimum(1 / norm, torch.full_like(norm, 1 / limit)) + (
                norm - norm
            )  # NaN for no number
            return {p: gradient.map(lambda v: v * factor) for p, gradient in found.items()}
        limit = settings["clipvalue"]
        if limit:
            return {p: one.map(lambda v: v.clamp(-limit, limit)) for p, one in found.items()}
        return found

    def _norms(
        self, found: dict[torch.Tensor, Gradient]
    ) -> dict[torch.Tensor, tuple[Gradient, torch.Tensor]]:
        squares = {p: _square(gradient) for p, gradient in found.items()}
        for several in self._together:
            total = sum(squares[p] for p in several if p in squares)
            squares.update({p: torch.as_tensor(total) for p in several if p in squares})
        return {p: (gradient, squares[p].sqrt()) for p, gradient in found.items()}

    def _average(self) -> None:
        for group in self.param_groups:
            momentum = group["ema_momentum"] if group["iterations"] else 0.0
            every = group["ema_overwrite_frequency"]
            for p in group["params"]:
                average = self._state(p, group)["average"]
                average.mul_(momentum).add_(p * (1 - momentum))
                if every and (group["iterations"] + 1) % every == 0:
                    p.copy_(average)


class Moment:
    """Settings, learning rate and count of steps for one step, as numbers in a parameter's precision.

    Args:
        group: The parameter's group.
        dtype: The parameter's type.
    """

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        self.group = group
        self.number: Callable[[float], Any] = np.float64 if dtype == torch.float64 else np.float32
        self.lr = float(self.number(group["lr"]))
        self.step = group["iterations"] // (group["gradient_accumulation_steps"] or 1) + 1  # of updates

    def __getattr__(self, name: str) -> Any:
        return self.group[name]

    def power(self, base: float, exponent: int) -> Any:
        """Return a float32-rounded setting to a power."""
        return self.number(rounded(base)) ** self.number(exponent)


def rounded(setting: float) -> float:
    """A setting as Keras hands it to TensorFlow where it casts it: through float32."""
    return float(np.float32(setting))


def _square(gradient: Gradient) -> torch.Tensor:
    return gradient.values.square().sum()
