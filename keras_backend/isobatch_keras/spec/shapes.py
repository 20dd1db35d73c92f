"""Rules for merging and for layers that only move elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import keras

from isobatch_keras.spec.convolution import channels_last
from isobatch_keras.spec.refs import Ref
from isobatch_keras.spec.walk import Emitter, Rule

__all__ = ["RULES"]

L = keras.layers

Masks: TypeAlias = "list[Ref | None] | None"
"""The masks `(B, T)` of several inputs."""


def _merge(operation: str) -> Callable[[Emitter, Any, list[Ref]], Ref]:
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


def _multiply(at: Emitter, layer: Any, inputs: list[Ref], mask: Masks = None) -> Ref:
    """What is masked counts as one, and as zero where it is masked in every input."""
    masks = _columns(at, inputs, mask)
    if not any(masks):
        return _merge("multiply")(at, layer, inputs)
    factors = [
        x if kept is None else Ref(at.add("where", kept, x, 1, part=f"_factor_{number}"), x.shape)
        for number, (x, kept) in enumerate(zip(inputs, masks, strict=True))
    ]
    every = [kept for kept in masks if kept is not None]
    if len(every) < len(inputs):
        return _merge("multiply")(at, layer, factors)
    product, kept = factors[0], every[0]
    for number, (factor, other) in enumerate(zip(factors[1:], every[1:], strict=True), 1):
        product = at.add("multiply", product, factor, part=f"_product_{number}")
        kept = at.add("logical_or", kept, other, part=f"_kept_{number}")
    return at.add("where", kept, product, 0)


def _extreme(operation: str) -> Rule:
    def rule(at: Emitter, layer: Any, inputs: list[Ref], mask: Masks = None) -> Ref:
        """Of two elements, the one that is not masked counts."""
        (x, *others), (kept, *masks) = inputs, _columns(at, inputs, mask)
        if kept is None and not any(masks):
            return _merge(operation)(at, layer, inputs)
        for number, (other, other_kept) in enumerate(zip(others, masks, strict=True), 1):
            y = (
                other
                if other_kept is None
                else at.add("where", other_kept, other, x, part=f"_right_{number}")
            )
            if kept is not None:
                x = at.add("where", kept, x, y, part=f"_left_{number}")
                if other_kept is not None and number < len(others):
                    other_kept = at.add("logical_or", kept, other_kept, part=f"_kept_{number}")  # noqa: PLW2901
            kept = None if kept is None else other_kept
            x = at.add(operation, x, y, part="" if number == len(others) else f"_{number}")
        return x

    return rule


def _columns(at: Emitter, inputs: list[Ref], mask: Masks) -> list[Ref | None]:
    """The masks `(B, T, 1)`; Keras loses those of inputs of several ranks when it gives them new axes."""
    if mask is None or len({len(one.shape) for one in inputs}) > 1:
        return [None] * len(inputs)
    return [
        None if one is None else at.add("expand_dims", one, part=f"_mask_{number}", axis=-1)
        for number, one in enumerate(mask)
    ]


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
    "Multiply": _multiply,
    "Maximum": _extreme("maximum"),
    "Minimum": _extreme("minimum"),
    "Average": lambda at, _layer, inputs: at.add("average", *inputs),
    "Concatenate": lambda at, layer, inputs: at.add("concatenate", *inputs, axis=layer.axis),
    "Dot": _dot,
    "Flatten": _flatten,
    "Reshape": _reshape,
    "Permute": lambda at, layer, x: at.add("transpose", x, axes=[0, *layer.dims]),
    "RepeatVector": lambda at, layer, x: at.add("repeat_vector", x, n=layer.n),
}
