"""Rules for normalisation."""

from __future__ import annotations

from typing import Any

import keras

from isobatch.errors import SpecError
from isobatch_keras.spec.refs import Ref
from isobatch_keras.spec.walk import Emitter, Rule

__all__ = ["RULES"]

L = keras.layers


def _batch(at: Emitter, layer: Any, x: Ref, mask: Ref | None = None) -> Ref:
    if getattr(layer, "renorm", False):
        msg = f"{at.layer}: BatchNormalization with renorm"
        raise SpecError(msg)
    roles = ("gamma", "beta", "moving_mean", "moving_variance")
    return at.add(
        "batch_norm",
        x,
        weights={role: getattr(layer, role) for role in roles},
        keywords={"mask": mask},
        axis=_last(layer.axis, x),
        epsilon=layer.epsilon,
        momentum=layer.momentum,
    )


def _layer(at: Emitter, layer: Any, x: Ref) -> Ref:
    if getattr(layer, "rms_scaling", False):
        msg = f"{at.layer}: LayerNormalization with rms_scaling"
        raise SpecError(msg)
    weights = {"gamma": layer.gamma, "beta": layer.beta}
    return at.add("layer_norm", x, weights=weights, axes=_axes(layer.axis, x), epsilon=layer.epsilon)


def _group(at: Emitter, layer: Any, x: Ref) -> Ref:
    axis = _last(layer.axis, x)
    groups = x.shape[axis] if layer.groups == -1 else layer.groups
    weights = {"gamma": layer.gamma, "beta": layer.beta}
    return at.add("group_norm", x, weights=weights, groups=groups, axis=axis, epsilon=layer.epsilon)


def _rms(at: Emitter, layer: Any, x: Ref) -> Ref:
    return at.add(
        "rms_norm", x, weights={"scale": layer.scale}, axes=_axes(layer.axis, x), epsilon=layer.epsilon
    )


def _last(axis: int, x: Ref) -> int:
    """The axis counted from the end if it is the last one, so that the node also fits where the rank differs."""
    return -1 if axis in {-1, len(x.shape) - 1} else axis


def _axes(axes: Any, x: Ref) -> list[int]:
    return sorted(
        axis - len(x.shape) if axis >= 0 else axis
        for axis in (axes if isinstance(axes, list | tuple) else [axes])
    )


RULES: dict[str, Rule] = {
    "BatchNormalization": _batch,
    "LayerNormalization": _layer,
    "GroupNormalization": _group,
    "RMSNormalization": _rms,
    "UnitNormalization": lambda at, layer, x: at.add("unit_norm", x, axes=_axes(layer.axis, x)),
}
