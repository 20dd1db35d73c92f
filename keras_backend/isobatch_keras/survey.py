"""What placing by cost has to know of a Keras model: its operations, what depends on what, and what each costs."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import keras
import numpy as np

from isobatch.errors import ModelError
from isobatch.placement import Balance, Part
from isobatch_keras.placing import graph_of, has_inside, inside, walk

__all__ = ["survey"]

_ROWS = 32  # of an example that nobody gave
_RUNS = 3


def survey(model: keras.Model, example: Any, balance: Balance) -> list[Part]:
    """Return the operations of a model, in an order in which they can run.

    Args:
        model: A functional or Sequential model.
        example: Its inputs for a few rows; `None` for random ones.
        balance: Whether the cost is seconds of a forward pass (of several, the fastest) or bytes of weights and outputs.

    Raises:
        ModelError: The model cannot be placed, or its inputs have axes of any length and no example is given.
    """
    functional = graph_of(model)
    inputs = _example(functional) if example is None else example
    surveying = _Surveying(balance)
    flat = [keras.ops.convert_to_tensor(x) for x in keras.tree.flatten(inputs)]
    walk(functional, keras.tree.pack_sequence_as(functional.input, flat), surveying.call)
    return [Part(name, tuple(surveying.after[name]), cost) for name, cost in surveying.costs.items()]


class _Surveying:
    def __init__(self, balance: Balance) -> None:
        self.balance = balance
        self.costs: dict[str, float] = {}
        self.after: dict[str, dict[str, None]] = {}
        self.origins: dict[
            int, tuple[Any, str]
        ] = {}  # of tensors, which are kept so that no other gets their `id`

    def call(
        self, operation: keras.Operation, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if has_inside(operation):
            return inside(operation, name, args, kwargs, self.call)
        seconds, outputs = [], None
        for _ in range(_RUNS if self.balance == "time" else 1):
            start = perf_counter()
            outputs = operation(*args, **kwargs)
            for leaf in keras.tree.flatten(outputs):
                keras.ops.convert_to_numpy(leaf)  # waits for it
            seconds.append(perf_counter() - start)
        tensors = keras.tree.flatten((args, kwargs))
        before = (self.origins[id(x)][1] for x in tensors if id(x) in self.origins)
        self.after.setdefault(name, {}).update(dict.fromkeys(one for one in before if one != name))
        cost = min(seconds) if self.balance == "time" else _bytes(keras.tree.flatten(outputs))
        if name not in self.costs and self.balance == "memory":
            cost += _bytes([variable.value for variable in getattr(operation, "variables", ())])
        self.costs[name] = self.costs.get(name, 0.0) + cost
        self.origins.update((id(leaf), (leaf, name)) for leaf in keras.tree.flatten(outputs))
        return outputs


def _bytes(arrays: list[Any]) -> float:
    return float(sum(int(np.prod(x.shape)) * x.dtype.size for x in arrays))


def _example(functional: Any) -> list[Any]:
    found = []
    for tensor in functional.inputs:
        if any(length is None for length in tensor.shape[1:]):
            msg = (
                f"Expected example=inputs for a few rows, because input {tensor.name!r} of shape {tensor.shape} may have any length; "
                "got none."
            )
            raise ModelError(msg)
        shape = (_ROWS if not tensor.shape or tensor.shape[0] is None else tensor.shape[0], *tensor.shape[1:])
        random = np.random.default_rng(0).random(shape if tensor.shape else ())
        found.append(random.astype(tensor.dtype if "bfloat" not in tensor.dtype else "float32"))
    return found
