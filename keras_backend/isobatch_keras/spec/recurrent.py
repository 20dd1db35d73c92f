"""Rules for recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from isobatch.errors import SpecError
from isobatch_keras.spec.activations import activation
from isobatch_keras.spec.refs import Ref
from isobatch_keras.spec.walk import Emitter, Rule

__all__ = ["RULES"]

L = keras.layers

_CELLS: dict[type, str] = {L.LSTMCell: "lstm", L.GRUCell: "gru", L.SimpleRNNCell: "simple_rnn"}


def _rnn(
    at: Emitter, layer: Any, x: Ref, initial_state: Any = None, mask: Ref | None = None
) -> Ref | list[Ref]:
    states = [] if initial_state is None else keras.tree.flatten(initial_state)
    _refuse_stateful(at, layer)
    if not isinstance(layer.cell, L.StackedRNNCells):
        settings = {
            "go_backwards": layer.go_backwards,
            "return_sequences": layer.return_sequences,
            "return_state": layer.return_state,
            "zero_output_for_mask": bool(layer.zero_output_for_mask),
        }
        return _cell(at, layer.cell, [x, *states], mask, "", settings)
    return _stacked(at, layer, x, states, mask)


def _stacked(at: Emitter, layer: Any, x: Ref, states: Sequence[Ref], mask: Ref | None) -> Ref | list[Ref]:
    """One node for each cell, over the whole sequence."""
    cells, found = layer.cell.cells, list[Ref]()
    if any(type(cell) not in _CELLS for cell in cells):
        msg = f"{at.layer}: StackedRNNCells of {[type(cell).__name__ for cell in cells]}"
        raise SpecError(msg)
    given = iter(states)
    for number, cell in enumerate(cells):
        last = number == len(cells) - 1
        own = [next(given) for _ in keras.tree.flatten(cell.state_size)] if states else []
        settings = {
            "go_backwards": layer.go_backwards and number == 0,
            "return_sequences": layer.return_sequences or not last,
            "return_state": layer.return_state,
            "zero_output_for_mask": bool(layer.zero_output_for_mask) and last,
        }
        out = keras.tree.flatten(_cell(at, cell, [x, *own], mask, f".{cell.name}", settings))
        x, found = out[0], found + out[1:]
        if layer.go_backwards and mask is not None and number == 0:
            mask = at.add("flip", mask, part="_mask_backwards", axes=[1])
    return [x, *found] if layer.return_state else x


def _cell(  # noqa: PLR0917 - one node
    at: Emitter, cell: Any, inputs: Sequence[Ref], mask: Ref | None, part: str, settings: dict[str, Any]
) -> Ref | list[Ref]:
    operation = _CELLS.get(type(cell))
    if operation is None:
        msg = f"{at.layer}: RNN over {type(cell).__module__}.{type(cell).__qualname__}"
        raise SpecError(msg)
    states = len(keras.tree.flatten(cell.state_size))
    own: dict[str, Any] = (
        {"recurrent_activation": _named(at, cell.recurrent_activation)} if states == 2 else {}
    )
    if operation == "gru":
        own = {
            "recurrent_activation": _named(at, cell.recurrent_activation),
            "reset_after": cell.reset_after,
        }
    return at.add_several(
        1 + states * settings["return_state"],
        operation,
        *inputs,
        part=part,
        weights={"kernel": cell.kernel, "recurrent_kernel": cell.recurrent_kernel, "bias": cell.bias},
        keywords={"mask": mask},
        activation=_named(at, cell.activation),
        dropout=cell.dropout,
        recurrent_dropout=cell.recurrent_dropout,
        **own,
        **settings,
    )


def _named(at: Emitter, function: Any) -> list[Any]:
    try:
        return list(activation(function))
    except SpecError as error:
        msg = f"{at.layer}: {error}"
        raise SpecError(msg) from None


def _refuse_stateful(at: Emitter, layer: Any) -> None:
    if layer.stateful:
        msg = f"{at.layer}: a stateful {type(layer).__name__} (return_state=True and initial_state= say the same)"
        raise SpecError(msg)


def _conv_lstm(
    at: Emitter, layer: Any, x: Ref, initial_state: Any = None, mask: Ref | None = None
) -> Ref | list[Ref]:
    _refuse_stateful(at, layer)
    cell = layer.cell
    if cell.data_format == "channels_first":
        msg = f"{at.layer}: {type(layer).__name__} with channels first"
        raise SpecError(msg)
    states = [] if initial_state is None else keras.tree.flatten(initial_state)
    return at.add_several(
        1 + 2 * layer.return_state,
        "conv_lstm",
        x,
        *states,
        weights={"kernel": cell.kernel, "recurrent_kernel": cell.recurrent_kernel, "bias": cell.bias},
        keywords={"mask": mask},
        activation=_named(at, cell.activation),
        recurrent_activation=_named(at, cell.recurrent_activation),
        go_backwards=layer.go_backwards,
        return_sequences=layer.return_sequences,
        return_state=layer.return_state,
        zero_output_for_mask=bool(layer.zero_output_for_mask),
        dropout=cell.dropout,
        recurrent_dropout=cell.recurrent_dropout,
        strides=cell.strides,
        padding=cell.padding,
        dilation=cell.dilation_rate,
    )


def _bidirectional(
    at: Emitter, layer: Any, x: Ref, initial_state: Any = None, mask: Ref | None = None
) -> Ref | list[Ref]:
    states = [] if initial_state is None else keras.tree.flatten(initial_state)
    half = len(states) // 2
    one = _direction(at, layer.forward_layer, x, states[:half], mask)
    two = _direction(at, layer.backward_layer, x, states[half:], mask)
    forward, backward = one[0], two[0]
    if layer.return_sequences:
        backward = at.add("flip", backward, part=".reverse", axes=[1])
    if layer.merge_mode is None:
        merged = [forward, backward]
    elif layer.merge_mode == "concat":
        merged = [at.add("concatenate", forward, backward, part=".merge", axis=-1)]
    else:
        operation = {"sum": "add", "ave": "average", "mul": "multiply"}[layer.merge_mode]
        merged = [at.add(operation, forward, backward, part=".merge")]
    return [*merged, *one[1:], *two[1:]]


def _direction(at: Emitter, layer: Any, x: Ref, states: Sequence[Ref], mask: Ref | None) -> list[Ref]:
    return at.call(layer, x, f".{layer.name}", x.shape, initial_state=list(states) or None, mask=mask)


def _time_distributed(at: Emitter, layer: Any, x: Ref, mask: Ref | None = None) -> Ref:
    folded = at.add("time_fold", x, part=".fold")
    masks = {}
    if mask is not None and layer.layer._call_has_mask_arg:  # noqa: SLF001 - else Keras leaves the mask out
        masks["mask"] = at.add("time_fold", mask, part=".fold_mask")
    y = at.call(layer.layer, folded, f".{layer.layer.name}", [None, *x.shape[2:]], **masks)[0]
    return at.add("time_unfold", y, x, part=".unfold")


RULES: dict[str, Rule] = {
    **dict.fromkeys(("RNN", "LSTM", "GRU", "SimpleRNN"), _rnn),
    **dict.fromkeys(("ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D"), _conv_lstm),
    "Bidirectional": _bidirectional,
    "TimeDistributed": _time_distributed,
}
