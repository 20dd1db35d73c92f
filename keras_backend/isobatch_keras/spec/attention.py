"""Rules for attention."""

from __future__ import annotations

from typing import Any

import keras

from isobatch.errors import SpecError
from isobatch_keras.spec.refs import Ref
from isobatch_keras.spec.walk import Emitter, Rule

__all__ = ["RULES"]

L = keras.layers


def _multi_head(
    at: Emitter,
    layer: Any,
    query: Ref,
    value: Ref,
    key: Ref | None = None,
    *,
    query_mask: Ref | None = None,
    value_mask: Ref | None = None,
    key_mask: Ref | None = None,
    attention_mask: Ref | None = None,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
) -> Any:
    grouped = hasattr(layer, "num_key_value_heads")
    _refuse(at, layer, query)
    parts = {
        "query": layer._query_dense,  # noqa: SLF001 - only some versions export them
        "key": layer._key_dense,  # noqa: SLF001
        "value": layer._value_dense,  # noqa: SLF001
        "output": layer._output_dense,  # noqa: SLF001
    }
    if _setting(layer, "use_gate"):
        parts["gate"] = layer._gate_dense  # noqa: SLF001
    kernels = {f"{name}_kernel": part.kernel for name, part in parts.items()}
    biases = {f"{name}_bias": part.bias for name, part in parts.items()}
    return at.add_several(
        1 + return_attention_scores,
        "multi_head_attention",
        query,
        value,
        *([] if key is None else [key]),
        weights={**kernels, **biases},
        keywords={
            "query_mask": query_mask,
            "value_mask": value_mask,
            "key_mask": key_mask,
            "attention_mask": attention_mask,
        },
        heads=layer.num_query_heads if grouped else layer.num_heads,
        key_heads=layer.num_key_value_heads if grouped else layer.num_heads,
        dropout=layer.dropout,
        causal=use_causal_mask,
        window=_setting(layer, "sliding_window") or 0,
        return_scores=return_attention_scores,
    )


def _setting(layer: Any, name: str) -> Any:
    """Newer versions of Keras have it, one of the two layers under a private name."""
    return getattr(layer, name, getattr(layer, f"_{name}", None))


def _refuse(at: Emitter, layer: Any, query: Ref) -> None:
    """What the operation has no attribute for."""
    unknown: list[str] = []
    if len(query.shape) != 3:
        unknown.append("attention over several axes")
    if len(layer._output_dense.kernel.shape) != 3:  # noqa: SLF001
        unknown.append("an output of several axes")
    if unknown:
        msg = f"{at.layer}: {type(layer).__name__} with {', '.join(unknown)}"
        raise SpecError(msg)


def _dot(
    at: Emitter,
    layer: Any,
    inputs: list[Ref],
    mask: Any = None,
    *,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
) -> Any:
    masks = {"query_mask": mask[0], "value_mask": mask[1]} if mask else {}
    outputs = 1 + return_attention_scores
    settings: dict[str, Any] = {
        "keywords": masks,
        "dropout": layer.dropout,
        "causal": use_causal_mask,
        "return_scores": return_attention_scores,
    }
    if isinstance(layer, L.AdditiveAttention):
        return at.add_several(
            outputs, "additive_attention", *inputs, weights={"scale": layer.scale}, **settings
        )
    if layer.score_mode == "concat":
        weights = {"scale": layer.scale, "weight": layer.concat_score_weight}
        return at.add_several(outputs, "additive_attention", *inputs, weights=weights, **settings)
    return at.add_several(outputs, "dot_attention", *inputs, weights={"scale": layer.scale}, **settings)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("MultiHeadAttention", "GroupQueryAttention"), _multi_head),
    **dict.fromkeys(("Attention", "AdditiveAttention"), _dot),
}
