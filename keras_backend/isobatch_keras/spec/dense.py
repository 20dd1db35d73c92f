"""Rules for products with a weight, embeddings, preprocessing and the layers of `keras.applications`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from isobatch.errors import SpecError
from isobatch_keras.spec.activations import activate
from isobatch_keras.spec.convolution import channels_last
from isobatch_keras.spec.refs import Ref
from isobatch_keras.spec.walk import Emitter, Rule

__all__ = ["APPLICATIONS", "RULES"]

L = keras.layers


def _dense(at: Emitter, layer: Any, x: Ref) -> Ref:
    y = at.add("dense", x, weights={"kernel": layer.kernel, "bias": layer.bias})
    return activate(at, layer.activation, y)


def _einsum_dense(at: Emitter, layer: Any, x: Ref) -> Ref:
    weights = {"kernel": layer.kernel, "bias": layer.bias}
    y = at.add("einsum_dense", x, weights=weights, equation=layer.equation)
    return activate(at, layer.activation, y)


def _normalization(at: Emitter, layer: Any, x: Ref) -> Ref:
    if layer.mean is None:
        msg = f"{at.layer}: Normalization that was not adapted"
        raise SpecError(msg)
    weights = {"mean": layer.mean, "variance": layer.variance}
    return at.add("standardize", x, weights=weights, invert=bool(layer.invert))


@channels_last
def _resizing(at: Emitter, layer: Any, x: Ref) -> Ref:
    if layer.crop_to_aspect_ratio or layer.pad_to_aspect_ratio:
        msg = f"{at.layer}: Resizing that keeps the aspect ratio"
        raise SpecError(msg)
    return at.add(
        "resize",
        x,
        size=[layer.height, layer.width],
        interpolation=layer.interpolation,
        antialias=layer.antialias,
    )


def _category(at: Emitter, layer: Any, x: Ref, count_weights: Any = None) -> Ref:
    if count_weights is not None:
        msg = f"{at.layer}: CategoryEncoding with count_weights"
        raise SpecError(msg)
    if layer.output_mode == "one_hot":
        squeezed = (
            at.add("squeeze", x, part="_squeeze", axis=-1) if len(x.shape) > 1 and x.shape[-1] == 1 else x
        )
        return at.add("one_hot", squeezed, classes=layer.num_tokens, axis=-1)
    operation = {"multi_hot": "multi_hot", "count": "count_hot"}[layer.output_mode]
    return at.add(operation, x, classes=layer.num_tokens)


def _discretization(at: Emitter, layer: Any, x: Ref) -> Ref:
    if layer.output_mode != "int" or layer.bin_boundaries is None:
        msg = f"{at.layer}: Discretization without boundaries, or with output_mode {layer.output_mode!r}"
        raise SpecError(msg)
    return at.add("discretize", x, weights={"boundaries": np.asarray(layer.bin_boundaries, "float32")})


def _custom_scale(at: Emitter, layer: Any, inputs: list[Ref]) -> Ref:
    scaled = at.add("multiply", inputs[1], layer.scale, part="_scale")
    return at.add("add", inputs[0], scaled)


RULES: dict[str, Rule] = {
    "Dense": _dense,
    "EinsumDense": _einsum_dense,
    "Embedding": lambda at, layer, x: at.add("embedding", x, weights={"embeddings": layer.embeddings}),
    "Masking": lambda at, layer, x: at.add("masking", x, value=float(layer.mask_value)),
    "Normalization": _normalization,
    "Rescaling": lambda at, layer, x: at.add("rescale", x, scale=layer.scale, offset=layer.offset),
    "Resizing": _resizing,
    "CategoryEncoding": _category,
    "Discretization": _discretization,
}

APPLICATIONS: dict[str, Rule] = {
    "LayerScale": lambda at, layer, x: at.add("scale", x, weights={"gamma": layer.gamma}),
    "CustomScaleLayer": _custom_scale,
}
