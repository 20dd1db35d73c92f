"""Keras's optimizers: the same steps as Keras takes, number for number.

torch's own differ in where epsilon stands, in what a learning rate multiplies and in how weights decay. Keras rounds some
settings to float32 on the way to a tensor (`tf.cast` of a Python number) and not others; `rounded` marks those.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import torch

from isobatch_torch.training.optimizer import Gradient, Group, KerasOptimizer, Moment, rounded

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lion",
    "Nadam",
    "RMSprop",
    "optimizer_class",
]


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

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: Moment) -> None:
        """Move one parameter."""
        step = gradient.total() * at.lr
        if not at.momentum:
            p.sub_(step)
            return
        factor = rounded(at.momentum)
        m = state["momentum"].mul_(factor).sub_(step)
        p.add_(m * factor - step if at.nesterov else m)


class RMSprop(KerasOptimizer):
    """RMSprop with epsilon under the root, and momentum on the divided gradient."""

    own: ClassVar = {"rho": 0.9, "momentum": 0.0, "epsilon": 1e-7, "centered": False}

    def slots_of(self, group: Group) -> tuple[str, ...]:
        """Return the names of what is kept for each parameter of a group."""
        chosen = (("momentum", group["momentum"] > 0), ("average_gradient", group["centered"]))
        return ("velocity", *(name for name, wanted in chosen if wanted), *super().slots_of(group))

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: Moment) -> None:
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

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: Moment) -> None:
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
        return rounded(group["initial_accumulator_value"]) if slot == "accumulator" else 0.0

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: Moment) -> None:
        """Move one parameter."""
        accumulator = state["accumulator"].add_(gradient.total(torch.square))
        p.sub_(gradient.total() * at.lr / (accumulator + at.epsilon).sqrt())


class Adadelta(KerasOptimizer):
    """Adadelta."""

    slots: ClassVar = ("accumulated_grad", "accumulated_delta_var")
    own: ClassVar = {"rho": 0.95, "epsilon": 1e-7}

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: Moment) -> None:
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

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: Moment) -> None:
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
    once: ClassVar = ("u_product",)

    def before_update(self, moments: Iterable[Moment]) -> None:
        """Move the product of the momentum schedule on."""
        group = self.param_groups[0]
        moment = next(iter(moments))
        number = moment.number
        factor = number(1.0) - number(0.5) * number(0.96) ** number(moment.step)
        product = number(group["u_product"]) * number(group["beta_1"]) * factor
        for one in self.param_groups:
            one["u_product"] = float(product)

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: Moment) -> None:
        """Move one parameter."""
        one, half = at.number(1), at.number(0.5)
        beta = at.number(rounded(at.beta_1))
        now = beta * (one - half * at.power(0.96, at.step))
        following = beta * (one - half * at.power(0.96, at.step + 1))
        product = at.number(at.u_product)
        m, v, g = state["momentum"], state["velocity"], gradient.total()
        m.add_((g - m) * float(one - beta))
        v.add_((gradient.total(torch.square) - v) * float(one - at.number(rounded(at.beta_2))))
        m_hat = m * float(following) / float(one - product * following) + g * float(one - now) / float(
            one - product
        )
        v_hat = v / float(one - at.power(at.beta_2, at.step))
        p.sub_(m_hat * at.lr / (v_hat.sqrt() + at.epsilon))


class Lion(KerasOptimizer):
    """Lion: the sign of a mixture of momentum and gradient (Chen et al., 2023)."""

    slots: ClassVar = ("momentum",)
    own: ClassVar = {"beta_1": 0.9, "beta_2": 0.99}

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: Moment) -> None:
        """Move one parameter."""
        g, m = gradient.total(), state["momentum"]
        first, second = (at.number(rounded(one)) for one in (at.beta_1, at.beta_2))
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
        return rounded(group["initial_accumulator_value"]) if slot == "accumulator" else 0.0

    def update(self, p: torch.Tensor, gradient: Gradient, state: dict[str, Any], at: Moment) -> None:
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
