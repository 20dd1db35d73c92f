"""Rules for merging and for layers that only move elements."""

from __future__ import annotations

from typing import Any

import keras

from isobatch_keras.spec.convolution import channels_last
from isobatch_keras.spec.refs import Ref
from isobatch_keras.spec.walk import Emitter, Rule

__all__ = ["RULES"]

L = keras.layers


def _merge(operation: str) -> Rule:
    def rule(at: Emitter, _layer: Any, inputs: list[Ref]) -> Ref:
        """Two at a time, as the operation takes them; the last node has the layer's name."""
        rank = max(len(one.shape) for one in inputs)
        x, *others = [_aligned(at, one, rank, number) for number, one in enumerate(inputs)]
        for number, other in enumerate(others[:-1], 1):
            x = at.add(operation, x, other, part=f"_{number}")
        return at.add(operation, x, *others[-1:])

    return rule


def _aligned(at: Emitter, x: Ref, rank: int, number: int) -> Ref:
    """Keras gives an input of lower rank new axes after the batch axis."""
    for step in range(rank - len(x.shape)):
        x = at.add("expand_dims", x, part=f"_expand_{number}_{step}", axis=1)
    return x


@channels_last
def _flatten(at: Emitter, _layer: Any, x: Ref) -> Ref:
    return at.add("flatten", x)


def _reshape(at: Emitter, layer: Any, x: Ref) -> Ref:
    return at.add("reshape", x, shape=layer.target_shape)


def _dot(at: Emitter, layer: Any, inputs: list[Ref]) -> Ref:
    axes = [layer.axes, layer.axes] if isinstance(layer.axes, int) else list(layer.axes)
    axes = [axis % len(one.shape) for axis, one in zip(axes, inputs, strict=True)]
    return at.add("dot", *inputs, axes=axes, normalize=layer.normalize)


RULES: dict[str, Rule] = {
    "Add": _merge("add"),
    "Subtract": _merge("subtract"),
    "Multiply": _merge("multiply"),
    "Maximum": _merge("maximum"),
    "Minimum": _merge("minimum"),
    "Average": lambda at, _layer, inputs: at.add("average", *inputs),
    "Concatenate": lambda at, layer, inputs: at.add("concatenate", *inputs, axis=layer.axis),
    "Dot": _dot,
    "Flatten": _flatten,
    "Reshape": _reshape,
    "Permute": lambda at, layer, x: at.add("transpose", x, axes=[0, *layer.dims]),
    "RepeatVector": lambda at, layer, x: at.add("repeat_vector", x, n=layer.n),
}
