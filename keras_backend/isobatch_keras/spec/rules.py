"""Which rule a layer or operation has, and how users add theirs."""

from __future__ import annotations

from typing import Any

import keras

from isobatch.errors import SpecError
from isobatch_keras.spec import (
    activations,
    attention,
    convolution,
    dense,
    functions,
    norms,
    recurrent,
    shapes,
)
from isobatch_keras.spec.walk import Rule

__all__ = ["find_rule", "register_layer"]

_PARTS = (activations, attention, convolution, dense, norms, recurrent, shapes)
_RULES: dict[type, Rule] = {
    getattr(keras.layers, name): rule
    for part in _PARTS
    for name, rule in part.RULES.items()
    if hasattr(keras.layers, name)  # older versions of Keras have fewer
}
_INTERNAL: dict[str, Rule] = {
    **{f"keras.src.ops.{name}": rule for name, rule in functions.RULES.items()},
    **{f"keras.src.applications.{name}": rule for name, rule in dense.APPLICATIONS.items()},
}
"""Classes that Keras does not export, by the package they are in and their name."""


def find_rule(operation: Any) -> Rule | None:
    """Return the rule for a layer or operation; `None` if it has none.

    A subclass has its parent's rule only as long as it leaves `call` alone.

    Args:
        operation: Of a Keras model's graph.
    """
    cls = type(operation)
    if cls in _RULES:
        return _RULES[cls]
    package = ".".join(cls.__module__.split(".")[:3])
    if f"{package}.{cls.__name__}" in _INTERNAL:
        return _INTERNAL[f"{package}.{cls.__name__}"]
    parent = next((base for base in cls.__mro__ if base in _RULES), None)
    return _RULES[parent] if parent is not None and cls.call is parent.call else None  # type: ignore[attr-defined]


def register_layer(cls: type, rule: Rule) -> None:
    """Say how a layer of one's own is written in a spec.

    Args:
        cls: The layer's class.
        rule: Called with an `Emitter`, the layer and its call's arguments, references in place of arrays; it writes nodes and
            returns the reference to the output.

    Raises:
        SpecError: The class has a rule already, or is no layer.

    >>> class Doubled(keras.layers.Layer):
    ...     def call(self, x):
    ...         return 2 * x
    >>> register_layer(Doubled, lambda at, layer, x: at.add("multiply", x, 2))
    """
    if not issubclass(cls, keras.layers.Layer):
        msg = f"Expected a Keras layer's class, got {cls!r}."
        raise SpecError(msg)
    if cls in _RULES:
        msg = f"Expected a class without a rule, {cls.__qualname__} has one."
        raise SpecError(msg)
    _RULES[cls] = rule
