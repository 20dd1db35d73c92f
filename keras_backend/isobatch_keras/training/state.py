"""What a Keras optimizer has kept for each weight."""

from __future__ import annotations

from typing import Any

import numpy as np

from isobatch_keras.training.recipe import variables_of

__all__ = ["iterations", "read_slots"]

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

_SHARED = {"average": "_model_variables_moving_average", "gradient_accumulator": "_accumulated_gradients"}


def iterations(model: Any) -> tuple[int, dict[str, float]]:
    """Return how many batches an optimizer has seen, and what it keeps once for all weights.

    Args:
        model: A compiled model.
    """
    optimizer = _inner(model)
    product = getattr(optimizer, "_u_product", None)  # of Nadam
    once = {} if product is None else {"u_product": float(product.numpy())}
    return int(optimizer._iterations.numpy()), once  # noqa: SLF001 - the public one counts updates


def read_slots(model: Any) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """Return what an optimizer keeps for each weight: by slot, by the weight's key in the spec.

    Args:
        model: A compiled model.

    Returns:
        Arrays of the weights' shapes; nothing for an optimizer that has not started.
    """
    optimizer = _inner(model)
    if not optimizer.built:
        return {}
    names = {**_LISTS[type(optimizer).__name__], **_SHARED}
    found: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for slot, attribute in names.items():
        kept = getattr(optimizer, attribute, None) or []
        for key, variable in variables_of(model).items():
            place = optimizer._trainable_variables_indices.get(optimizer._var_key(variable))  # noqa: SLF001
            if place is not None and place < len(kept):
                found.setdefault(slot, {})[key] = kept[place].numpy()
    return found


def _inner(model: Any) -> Any:
    optimizer = model.optimizer
    return getattr(optimizer, "inner_optimizer", optimizer)
