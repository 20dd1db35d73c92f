"""Recurrent layers as Keras defines them: masked steps repeat output and state, whatever the activation.

Where torch's own layer computes the same, it is what runs; otherwise a loop over its weights does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from isobatch_torch.spec.activations import activation
from isobatch_torch.spec.positions import conv

__all__ = ["GRU", "LSTM", "RNN", "ConvLSTM", "Loop", "ResetBeforeGRU"]

States = list[torch.Tensor]


class Loop(nn.Module):
    """What all recurrent layers do around one step, over `(B, T, ...)`.

    Subclasses call `follow`, have a `hidden_size` (or an `initial` of their own) and a `step`.
    """

    hidden_size: int
    states = 1
    """How many there are."""

    def follow(self, settings: dict[str, Any]) -> None:
        """Take over the operation's attributes."""
        self.settings = settings
        self.activation = activation(settings["activation"])
        if "recurrent_activation" in settings:
            self.recurrent_activation = activation(settings["recurrent_activation"])

    def initial(self, x: torch.Tensor) -> States:
        """Return the states `(B, units)` before the first step: zeros."""
        return [x.new_zeros(len(x), self.hidden_size) for _ in range(self.states)]

    def step(self, x: torch.Tensor, states: States) -> States:
        """Return the states after one step; the first one is the output."""
        raise NotImplementedError

    def native(self, x: torch.Tensor, states: States) -> tuple[torch.Tensor, States] | None:
        """Return all outputs and the last states as torch's own layer computes them; `None` if it computes something else."""
        del x, states
        return None

    def forward(self, x: torch.Tensor, *states: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        """Return `(B, T, units)` or the last `(B, units)`, and the states if they are asked for."""
        before = list(states) or self.initial(x)
        if self.settings["go_backwards"]:
            x, mask = x.flip(1), None if mask is None else mask.flip(1)
        found = self.native(x, before) if mask is None else None
        outputs, after = found or self._loop(x, before, mask)
        output = outputs if self.settings["return_sequences"] else outputs[:, -1]
        return (output, *after) if self.settings["return_state"] else output

    def _loop(
        self, x: torch.Tensor, states: States, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, States]:
        outputs: list[torch.Tensor] = []
        noise = self._noise(x, states)
        for moment in range(x.shape[1]):
            new = self.step(x[:, moment] * noise[0], [states[0] * noise[1], *states[1:]])
            output = new[0]
            if mask is not None:
                kept = mask[:, moment].reshape(-1, *[1] * (output.dim() - 1))
                repeat = (
                    torch.zeros_like(output)
                    if not outputs or self.settings["zero_output_for_mask"]
                    else outputs[-1]
                )
                output = torch.where(kept, output, repeat)
                new = [torch.where(kept, one, old) for one, old in zip(new, states, strict=True)]
            outputs.append(output)
            states = new
        return torch.stack(outputs, 1), states

    def _noise(self, x: torch.Tensor, states: States) -> tuple[Any, Any]:
        """Dropout of inputs and of the state, the same at every step."""
        rates = self.settings["dropout"], self.settings["recurrent_dropout"]
        arrays = x[:, 0], states[0]
        return tuple(
            F.dropout(torch.ones_like(array), rate) if self.training and rate else 1
            for rate, array in zip(rates, arrays, strict=True)
        )  # type: ignore[return-value] # two of each

    def _products(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """What input and state add to the gates, both biases included, by the weights of one of torch's own layers."""
        weights: Any = self.all_weights
        ih, hh, *biases = weights[0]
        b_ih, b_hh = biases or (None, None)
        return F.linear(x, ih, b_ih) + F.linear(h, hh, b_hh)

    def _is(self, **activations: str) -> bool:
        """Whether torch's own layer has these activations and no noise is drawn."""
        noisy = self.training and (self.settings["dropout"] or self.settings["recurrent_dropout"])
        return not noisy and all(list(self.settings[key]) == [word, {}] for key, word in activations.items())


class LSTM(Loop, nn.LSTM):  # type: ignore[misc] # its forward is a loop's
    """Long short-term memory; `bias_hh_l0` stays zero, for Keras has one bias.

    Args:
        inner: Features of the input.
        units: Features of the output.
        bias: Whether there is one.
        settings: The operation's attributes.
    """

    states = 2

    def __init__(self, inner: int, units: int, *, bias: bool, settings: dict[str, Any]) -> None:
        nn.LSTM.__init__(self, inner, units, bias=bias, batch_first=True)
        self.follow(settings)
        _freeze_second_bias(self)

    def native(self, x: torch.Tensor, states: States) -> tuple[torch.Tensor, States] | None:
        """Return what `nn.LSTM` computes."""
        if not self._is(activation="tanh", recurrent_activation="sigmoid"):
            return None
        outputs, after = nn.LSTM.forward(self, x, (states[0][None], states[1][None]))
        return outputs, [state[0] for state in after]

    def step(self, x: torch.Tensor, states: States) -> States:
        """Return hidden and cell state after one step."""
        h, c = states
        return _lstm_gates(self._products(x, h).chunk(4, -1), c, self.activation, self.recurrent_activation)


class GRU(Loop, nn.GRU):  # type: ignore[misc] # its forward is a loop's
    """Gated recurrent unit that resets after the product.

    Args:
        inner: Features of the input.
        units: Features of the output.
        bias: Whether there are biases.
        settings: The operation's attributes.
    """

    def __init__(self, inner: int, units: int, *, bias: bool, settings: dict[str, Any]) -> None:
        nn.GRU.__init__(self, inner, units, bias=bias, batch_first=True)
        self.follow(settings)

    def native(self, x: torch.Tensor, states: States) -> tuple[torch.Tensor, States] | None:
        """Return what `nn.GRU` computes."""
        if not self._is(activation="tanh", recurrent_activation="sigmoid"):
            return None
        outputs, after = nn.GRU.forward(self, x, states[0][None])
        return outputs, [after[0]]

    def step(self, x: torch.Tensor, states: States) -> States:
        """Return the state after one step."""
        weights: Any = self.all_weights[0]
        biases = weights[2:] or (None, None)
        ours = F.linear(x, weights[0], biases[0]).chunk(3, -1)
        theirs = F.linear(states[0], weights[1], biases[1]).chunk(3, -1)
        reset, update = (self.recurrent_activation(a + b) for a, b in zip(ours[:2], theirs[:2], strict=True))
        new = self.activation(ours[2] + reset * theirs[2])
        return [update * states[0] + (1 - update) * new]


class ResetBeforeGRU(Loop):
    """Gated recurrent unit that resets before the product, which `nn.GRU` cannot; parameters as `nn.GRU` names them.

    Args:
        inner: Features of the input.
        units: Features of the output.
        bias: Whether there is one.
        settings: The operation's attributes.
    """

    def __init__(self, inner: int, units: int, *, bias: bool, settings: dict[str, Any]) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * units, inner))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * units, units))
        self.bias_ih_l0 = nn.Parameter(torch.empty(3 * units)) if bias else None
        self.hidden_size = units
        self.follow(settings)

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"{self.weight_ih_l0.shape[1]}, {self.hidden_size}"

    def step(self, x: torch.Tensor, states: States) -> States:
        """Return the state after one step."""
        h = states[0]
        gates = F.linear(x, self.weight_ih_l0, self.bias_ih_l0).chunk(3, -1)
        to_reset, to_update, to_new = self.weight_hh_l0.chunk(3, 0)
        reset = self.recurrent_activation(gates[0] + F.linear(h, to_reset))
        update = self.recurrent_activation(gates[1] + F.linear(h, to_update))
        new = self.activation(gates[2] + F.linear(reset * h, to_new))
        return [update * h + (1 - update) * new]


class RNN(Loop, nn.RNN):  # type: ignore[misc] # its forward is a loop's
    """Simple recurrence; `bias_hh_l0` stays zero, for Keras has one bias.

    Args:
        inner: Features of the input.
        units: Features of the output.
        bias: Whether there is one.
        settings: The operation's attributes.
    """

    def __init__(self, inner: int, units: int, *, bias: bool, settings: dict[str, Any]) -> None:
        nn.RNN.__init__(self, inner, units, bias=bias, batch_first=True)
        self.follow(settings)
        _freeze_second_bias(self)

    def native(self, x: torch.Tensor, states: States) -> tuple[torch.Tensor, States] | None:
        """Return what `nn.RNN` computes."""
        if not self._is(activation="tanh"):
            return None
        outputs, after = nn.RNN.forward(self, x, states[0][None])
        return outputs, [after[0]]

    def step(self, x: torch.Tensor, states: States) -> States:
        """Return the state after one step."""
        return [self.activation(self._products(x, states[0]))]


class ConvLSTM(Loop):
    """LSTM whose products are convolutions, over `(B, T, *positions, C)`.

    Args:
        kernel: Shape of the kernel, `(*window, in, 4 out)`.
        recurrent_kernel: Shape of the recurrent kernel, `(*window, out, 4 out)`.
        bias: Whether there is one.
        settings: The operation's attributes.
    """

    def __init__(
        self, kernel: Sequence[int], recurrent_kernel: Sequence[int], *, bias: bool, settings: dict[str, Any]
    ) -> None:
        super().__init__()
        ones = [1] * (len(kernel) - 2)
        self.input_conv = conv(
            kernel,
            1,
            bias=bias,
            stride=settings["strides"],
            dilation=settings["dilation"],
            same=settings["padding"],
        )
        self.state_conv = conv(recurrent_kernel, 1, bias=False, stride=ones, dilation=ones, same="same")
        self.units, self.settings = recurrent_kernel[-2], settings
        self.activation = activation(settings["activation"])
        self.recurrent_activation = activation(settings["recurrent_activation"])

    def initial(self, x: torch.Tensor) -> States:
        """Return zeros."""
        shape = self.input_conv(x[:, 0]).shape[:-1]
        return [x.new_zeros(*shape, self.units) for _ in range(2)]

    def step(self, x: torch.Tensor, states: States) -> States:
        """Return hidden and cell state after one step."""
        z = self.input_conv(x) + self.state_conv(states[0])
        return _lstm_gates(z.chunk(4, -1), states[1], self.activation, self.recurrent_activation)


def _lstm_gates(
    gates: Sequence[torch.Tensor], c: torch.Tensor, activation: nn.Module, recurrent: nn.Module
) -> States:
    new = recurrent(gates[1]) * c + recurrent(gates[0]) * activation(gates[2])
    return [recurrent(gates[3]) * activation(new), new]


def _freeze_second_bias(module: nn.LSTM | nn.RNN) -> None:
    if module.bias:
        bias: Any = module.bias_hh_l0
        nn.init.zeros_(bias).requires_grad_(False)  # noqa: FBT003 - torch's own signature
