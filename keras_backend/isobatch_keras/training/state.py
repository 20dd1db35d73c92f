"""How far a Keras model's training has come, read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from isobatch.errors import SpecError
from isobatch.training_state import TrainingState
from isobatch_keras.training.recipe import variables_of

__all__ = ["read_state", "write_state"]

_LISTS = {
    "SGD": {"momentum": "momentums"},
    "RMSprop": {
        "velocity": "_velocities",
        "momentum": "_momentums",
        "average_gradient": "_average_gradients",
    },
    "Adam": {"momentum": "_momentums", "velocity": "_velocities", "velocity_hat": "_velocity_hats"},
    "AdamW": {"momentum": "_momentums", "velocity": "_velocities", "velocity_hat": "_velocity_hats"},
    "Adagrad": {"accumulator": "_accumulators"},
    "Adadelta": {
        "accumulated_grad": "_accumulated_grads",
        "accumulated_delta_var": "_accumulated_delta_vars",
    },
    "Adamax": {"momentum": "_m", "norm": "_u"},
    "Nadam": {"momentum": "_momentums", "velocity": "_velocities"},
    "Lion": {"momentum": "_momentums"},
    "Ftrl": {"accumulator": "_accumulators", "linear": "_linears"},
}
"""Where each optimizer keeps what torch's side calls so; Keras has no public names for it."""

_SCALING = ("dynamic_scale", "step_counter")
"""What an optimizer that scales losses dynamically keeps."""

_SHARED = {"average": "_model_variables_moving_average", "gradient_accumulator": "_accumulated_gradients"}


def read_state(model: Any) -> TrainingState:
    """Return how far a model's training has come.

    Args:
        model: A compiled model; one whose optimizer has not started has no slots.
    """
    optimizer = _inner(model)
    product = getattr(optimizer, "_u_product", None)  # of Nadam
    once = {} if product is None or not optimizer.built else {"u_product": float(product.numpy())}
    if optimizer is not model.optimizer and model.optimizer.built:
        once |= {name: float(getattr(model.optimizer, name).numpy()) for name in _SCALING}
    variables = variables_of(model)
    return TrainingState(
        {key: np.asarray(variable.numpy()) for key, variable in variables.items()},
        _slots(optimizer, variables, lambda kept: np.asarray(kept.numpy())),
        int(optimizer._iterations.numpy()),  # noqa: SLF001 - the public one counts updates
        once,
        type(optimizer).__name__.lower(),
    )


def write_state(model: Any, state: TrainingState) -> None:
    """Let a model's training go on from a state.

    Args:
        model: A compiled model of the same weights and optimizer.
        state: Where to go on.

    Raises:
        SpecError: The state is from before training, and the model's optimizer has started; nothing is changed then.
    """
    variables, optimizer = variables_of(model), _inner(model)
    if not state.slots and _slots(optimizer, variables, lambda kept: kept):
        msg = "Expected a state from the middle of training for a model that has been trained, got one from before it; compile anew first."
        raise SpecError(msg)
    for key, variable in variables.items():
        variable.assign(state.weights[key])
    if state.slots and not optimizer.built:
        model.optimizer.build(model.trainable_variables)
    for slot, kept in _slots(optimizer, variables, lambda variable: variable).items():
        for key, variable in kept.items():
            if key in state.slots.get(slot, {}):
                variable.assign(state.slots[slot][key])
    if "u_product" in state.once:
        optimizer._u_product.assign(state.once["u_product"])  # noqa: SLF001
    for name in _SCALING:
        if name in state.once and model.optimizer.built:
            getattr(model.optimizer, name).assign(state.once[name])
    optimizer._iterations.assign(state.iterations)  # noqa: SLF001


def _slots(
    optimizer: Any, variables: Mapping[str, keras.Variable], read: Callable[[Any], Any]
) -> dict[str, dict[str, Any]]:
    """Return what an optimizer keeps for each weight, by slot and key; nothing for one that has not started."""
    found: dict[str, dict[str, Any]] = {}
    if not optimizer.built:
        return found
    for slot, attribute in {**_LISTS[type(optimizer).__name__], **_SHARED}.items():
        kept = getattr(optimizer, attribute, None) or []
        for key, variable in variables.items():
            place = optimizer._trainable_variables_indices.get(optimizer._var_key(variable))  # noqa: SLF001
            if place is not None and place < len(kept):
                found.setdefault(slot, {})[key] = read(kept[place])
    return found


def _inner(model: Any) -> Any:
    optimizer = model.optimizer
    return getattr(optimizer, "inner_optimizer", optimizer)
