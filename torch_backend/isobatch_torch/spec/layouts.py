"""Which arrays of a network have positions and channels, so that a twin can take and give them channels first."""

from __future__ import annotations

from isobatch.spec import Node, Spec

__all__ = ["KEEP", "positions"]

_BY_KERNEL = {"conv", "depthwise_conv", "conv_transpose"}
_BY_WINDOW = {
    "max_pool": "window",
    "avg_pool": "window",
    "adaptive_max_pool": "size",
    "adaptive_avg_pool": "size",
    "crop": "widths",
    "upsample": "factors",
    "resize": "size",
}
KEEP = {
    *(
        "batch_norm",
        "layer_norm",
        "group_norm",
        "rms_norm",
        "unit_norm",
        "standardize",
        "rescale",
        "scale",
        "pad",
        "clip",
    ),
    *(
        "relu",
        "clipped_relu",
        "relu6",
        "leaky_relu",
        "prelu",
        "elu",
        "selu",
        "celu",
        "gelu",
        "silu",
        "mish",
        "sigmoid",
    ),
    *(
        "log_sigmoid",
        "sparse_sigmoid",
        "hard_sigmoid",
        "hard_silu",
        "hard_tanh",
        "tanh",
        "tanh_shrink",
        "soft_shrink",
    ),
    *(
        "hard_shrink",
        "threshold",
        "softplus",
        "squareplus",
        "softsign",
        "sparse_plus",
        "softmax",
        "log_softmax",
        "identity",
    ),
    *(
        "dropout",
        "alpha_dropout",
        "gaussian_noise",
        "gaussian_dropout",
        "dense",
        "add",
        "subtract",
        "multiply",
        "divide",
    ),
    *("maximum", "minimum", "average", "concatenate", "masking", "cast", "flip"),
}


def positions(spec: Spec) -> dict[str, int]:
    """Return how many position axes an array has, by reference, for those whose channels can be moved.

    It follows from the convolutions and pools that an array goes through, before or after operations that keep its axes.

    Args:
        spec: The network.

    >>> from isobatch.spec import Input
    >>> pool = Node("p", "max_pool", ("r",), {}, {"window": [2, 2], "strides": [2, 2], "padding": "valid"})
    >>> positions(Spec("n", (Input("x", (4, 4, 3), "float32"),), (Node("r", "relu", ("x",)), pool), "p"))
    {'x': 2, 'r': 2, 'p': 2}
    """
    found: dict[str, int] = {}
    groups: list[set[str]] = []
    for node in spec.nodes:
        given = [one for one in node.inputs if isinstance(one, str)]
        count = _count(node, spec)
        if count is not None:
            found.update(dict.fromkeys([*given, node.name], count))
        if node.operation in KEEP or node.attributes.get("keepdims"):
            groups.append({*given, node.name})
    changed = True
    while changed:
        changed = False
        for group in groups:
            counts = {found[name] for name in group if name in found}
            if len(counts) == 1 and not group <= found.keys():
                found.update(dict.fromkeys(group, counts.pop()))
                changed = True
    names = [*(one.name for one in spec.inputs), *(node.name for node in spec.nodes)]
    return {name: found[name] for name in names if name in found}


def _count(node: Node, spec: Spec) -> int | None:
    if node.operation in _BY_KERNEL:
        return len(spec.tensors[node.weights["kernel"]].shape) - 2
    attribute = _BY_WINDOW.get(node.operation)
    return None if attribute is None else len(node.attributes[attribute])
