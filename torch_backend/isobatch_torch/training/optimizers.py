"""Keras's optimizers as `torch.optim.Optimizer`s: the same steps, number for number.

torch's own differ in where epsilon stands, in what a learning rate multiplies and in how weights decay. Keras rounds some
settings to float32 on the way to a tensor (`tf.cast` of a Python number) and not others; `_rounded` marks those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias, overload

import numpy as np
import torch

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Gradient",
    "KerasOptimizer",
    "Lion",
    "Nadam",
    "RMSprop",
    "RepeatedRows",
    "optimizer_class",
]

RepeatedRows: TypeAlias = Literal["keras", "summed"]
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
        repeated_rows: What a row of an embedding counts for that was looked up several times, where its layer gives sparse
            gradients: `"keras"` as Keras has it on TensorFlow, the sum of squares; `"summed"` the square of the sum, which is
            what the gradient's definition gives and what Keras has on torch.
        together: Sets of parameters that are one variable in Keras, for `clipnorm`.
        settings: The optimizer's own.

    Raises:
        ValueError: More than one way of clipping, or a setting out of range.
    """

    slots: ClassVar[tuple[str, ...]] = ()
    """Names of what is kept for each parameter."""

    own: ClassVar[dict[str, Any]] = {}
    """The optimizer's own settings, with Keras's values where nothing is said."""

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
            p: self._read(p.grad, group)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        }
        if found:
            self._apply(found)
            if self.param_groups[0]["use_ema"]:
                self._average()
        self.iterations += 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Forget the gradients."""
        super().zero_grad(set_to_none)

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

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: _Moment) -> None:
        """Move one parameter.

        Args:
            p: The parameter.
            gradient: Its gradient, clipped.
            state: Its slots.
            at: Settings, learning rate and count in the parameter's precision.
        """
        raise NotImplementedError

    def _read(self, gradient: torch.Tensor, group: Group) -> Gradient:
        found = Gradient.of(gradient)
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
        moments: dict[tuple[int, torch.dtype], _Moment] = {}
        for p in found:
            key = (id(groups[p]), p.dtype)
            moments.setdefault(key, _Moment(groups[p], p.dtype))
            decay = groups[p]["weight_decay"]
            if decay is not None:
                p.sub_(p * _rounded(decay) * moments[key].lr)
        self.before_update(moments.values())
        for p, gradient in found.items():
            state = self._state(p, groups[p])
            self.update(p, gradient, state, moments[id(groups[p]), p.dtype])
        for store in stores.values():
            store.zero_()

    def before_update(self, moments: Iterable[_Moment]) -> None:
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


class _Moment:
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
        return self.number(_rounded(base)) ** self.number(exponent)


def _rounded(setting: float) -> float:
    """A setting as Keras hands it to TensorFlow where it casts it: through float32."""
    return float(np.float32(setting))


def _square(gradient: Gradient) -> torch.Tensor:
    return gradient.values.square().sum()


class SGD(KerasOptimizer):
    """Gradient descent with Keras's momentum, whose buffer holds steps and not gradients.

    >>> w = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = SGD([w], lr=0.5)
    >>> w.grad = torch.tensor([1.0])
    >>> optimizer.step()
    >>> w.item()
    0.5
    """

    own: ClassVar = {"momentum": 0.0, "nesterov": False}

    def slots_of(self, group: Group) -> tuple[str, ...]:
        """Return the names of what is kept for each parameter of a group."""
        return (*(("momentum",) if group["momentum"] else ()), *super().slots_of(group))

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: _Moment) -> None:
        """Move one parameter."""
        step = gradient.total() * at.lr
        if not at.momentum:
            p.sub_(step)
            return
        factor = _rounded(at.momentum)
        m = state["momentum"].mul_(factor).sub_(step)
        p.add_(m * factor - step if at.nesterov else m)


class RMSprop(KerasOptimizer):
    """RMSprop with epsilon under the root, and momentum on the divided gradient."""

    own: ClassVar = {"rho": 0.9, "momentum": 0.0, "epsilon": 1e-7, "centered": False}

    def slots_of(self, group: Group) -> tuple[str, ...]:
        """Return the names of what is kept for each parameter of a group."""
        chosen = (("momentum", group["momentum"] > 0), ("average_gradient", group["centered"]))
        return ("velocity", *(name for name, wanted in chosen if wanted), *super().slots_of(group))

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: _Moment) -> None:
        """Move one parameter."""
        g, rho = gradient.total(), at.rho
        denominator = state["velocity"].mul_(rho).add_(gradient.total(torch.square) * (1 - rho))
        if at.centered:
            denominator = denominator - state["average_gradient"].mul_(rho).add_(g * (1 - rho)).square()
        step = g * at.lr / (denominator + at.epsilon).sqrt()
        if at.momentum > 0:
            step = state["momentum"].mul_(at.momentum).add_(step)
        p.sub_(step)


class Adam(KerasOptimizer):
    """Adam with epsilon added to the root of the uncorrected second moment ("epsilon hat" of Kingma and Ba, 2015)."""

    own: ClassVar = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False}

    def slots_of(self, group: Group) -> tuple[str, ...]:
        """Return the names of what is kept for each parameter of a group."""
        hat = ("velocity_hat",) if group["amsgrad"] else ()
        return ("momentum", "velocity", *hat, *super().slots_of(group))

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: _Moment) -> None:
        """Move one parameter."""
        one = at.number(1)
        alpha = (
            at.number(at.lr)
            * np.sqrt(one - at.power(at.beta_2, at.step))
            / (one - at.power(at.beta_1, at.step))
        )
        m, v = state["momentum"], state["velocity"]
        m.add_((gradient.total() - m) * (1 - at.beta_1))
        v.add_((gradient.total(torch.square) - v) * (1 - at.beta_2))
        if at.amsgrad:
            v = torch.maximum(state["velocity_hat"], v, out=state["velocity_hat"])
        p.sub_(m * float(alpha) / (v.sqrt() + at.epsilon))


class AdamW(Adam):
    """Adam with decoupled weight decay, of 0.004 if nothing is said."""

    def __init__(
        self, params: Any, lr: float = 0.001, *, weight_decay: float | None = 0.004, **settings: Any
    ) -> None:
        super().__init__(params, lr, weight_decay=weight_decay, **settings)


class Adagrad(KerasOptimizer):
    """Adagrad whose accumulator starts at 0.1, with epsilon under the root."""

    slots: ClassVar = ("accumulator",)
    own: ClassVar = {"initial_accumulator_value": 0.1, "epsilon": 1e-7}

    def initial(self, slot: str, group: Group) -> float:
        """Return what a slot is filled with at first."""
        return float(group["initial_accumulator_value"]) if slot == "accumulator" else 0.0

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: _Moment) -> None:
        """Move one parameter."""
        accumulator = state["accumulator"].add_(gradient.total(torch.square))
        p.sub_(gradient.total() * at.lr / (accumulator + at.epsilon).sqrt())


class Adadelta(KerasOptimizer):
    """Adadelta."""

    slots: ClassVar = ("accumulated_grad", "accumulated_delta_var")
    own: ClassVar = {"rho": 0.95, "epsilon": 1e-7}

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: _Moment) -> None:
        """Move one parameter."""
        rho, squares = at.rho, gradient.total(torch.square)
        grads, deltas = state["accumulated_grad"], state["accumulated_delta_var"]
        grads.mul_(rho).add_(squares * (1 - rho))
        ratio = (deltas + at.epsilon).sqrt() / (grads + at.epsilon).sqrt()
        deltas.mul_(rho).add_(ratio.square() * squares * (1 - rho))
        p.sub_(ratio * gradient.total() * at.lr)


class Adamax(KerasOptimizer):
    """Adamax with epsilon added to the norm, outside of the maximum."""

    slots: ClassVar = ("momentum", "norm")
    own: ClassVar = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: _Moment) -> None:
        """Move one parameter."""
        m, u = state["momentum"], state["norm"]
        m.add_((gradient.total() - m) * (1 - at.beta_1))
        torch.maximum(u * at.beta_2, gradient.total(torch.abs), out=u)
        correction = float(at.number(1) - at.power(at.beta_1, at.step))
        p.sub_(m * at.lr / ((u + at.epsilon) * correction))


class Nadam(KerasOptimizer):
    """Nadam; the product of its momentum schedule is kept in each group, as `u_product`."""

    slots: ClassVar = ("momentum", "velocity")
    own: ClassVar = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "u_product": 1.0}

    def before_update(self, moments: Iterable[_Moment]) -> None:
        """Move the product of the momentum schedule on."""
        group = self.param_groups[0]
        moment = next(iter(moments))
        number = moment.number
        factor = number(1.0) - number(0.5) * number(0.96) ** number(moment.step)
        product = number(group["u_product"]) * number(group["beta_1"]) * factor
        for one in self.param_groups:
            one["u_product"] = float(product)

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: _Moment) -> None:
        """Move one parameter."""
        one, half = at.number(1), at.number(0.5)
        beta = at.number(_rounded(at.beta_1))
        now = beta * (one - half * at.power(0.96, at.step))
        following = beta * (one - half * at.power(0.96, at.step + 1))
        product = at.number(at.u_product)
        m, v, g = state["momentum"], state["velocity"], gradient.total()
        m.add_((g - m) * float(one - beta))
        v.add_((gradient.total(torch.square) - v) * float(one - at.number(_rounded(at.beta_2))))
        m_hat = m * float(following) / float(one - product * following) + g * float(one - now) / float(
            one - product
        )
        v_hat = v / float(one - at.power(at.beta_2, at.step))
        p.sub_(m_hat * at.lr / (v_hat.sqrt() + at.epsilon))


class Lion(KerasOptimizer):
    """Lion: the sign of a mixture of momentum and gradient (Chen et al., 2023)."""

    slots: ClassVar = ("momentum",)
    own: ClassVar = {"beta_1": 0.9, "beta_2": 0.99}

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: _Moment) -> None:
        """Move one parameter."""
        g, m = gradient.total(), state["momentum"]
        first, second = (at.number(_rounded(one)) for one in (at.beta_1, at.beta_2))
        p.sub_((m * float(first) + g * float(1 - first)).sign() * at.lr)
        m.mul_(float(second)).add_(g * float(1 - second))


class Ftrl(KerasOptimizer):
    """Follow the regularised leader, with shrinkage."""

    slots: ClassVar = ("accumulator", "linear")
    own: ClassVar = {
        "learning_rate_power": -0.5,
        "initial_accumulator_value": 0.1,
        "l1_regularization_strength": 0.0,
        "l2_regularization_strength": 0.0,
        "l2_shrinkage_regularization_strength": 0.0,
        "beta": 0.0,
    }

    def initial(self, slot: str, group: Group) -> float:
        """Return what a slot is filled with at first."""
        return float(group["initial_accumulator_value"]) if slot == "accumulator" else 0.0

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: _Moment) -> None:
        """Move one parameter."""
        power, l1 = -at.learning_rate_power, at.l1_regularization_strength
        l2 = at.l2_regularization_strength + at.beta / (2 * at.lr)
        accumulator, linear = state["accumulator"], state["linear"]
        shrunk = gradient.total() + p * (2 * at.l2_shrinkage_regularization_strength)
        grown = accumulator + gradient.total(torch.square)
        linear.add_(shrunk - (grown**power - accumulator**power) / at.lr * p)
        quadratic = grown**power / at.lr + 2 * l2
        p.copy_((linear.clamp(-l1, l1) - linear) / quadratic)
        accumulator.copy_(grown)


_CLASSES = {
    one.__name__.lower(): one
    for one in (SGD, RMSprop, Adam, AdamW, Adagrad, Adadelta, Adamax, Nadam, Lion, Ftrl)
}


def optimizer_class(name: str) -> type[KerasOptimizer]:
    """Return the class of a word of `isobatch.recipe.OPTIMIZERS`.

    >>> optimizer_class("adamw").__name__
    'AdamW'
    """
    return _CLASSES[name]
