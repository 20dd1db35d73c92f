"""Which layer of one torch module is which of another: by what they hold and how they are connected.

Names and order are not asked: two ports of one network often have neither in common. Layers are told apart by the names and shapes of
their parameters, then by those of the layers before and after them, step by step; what is still alike by its values, and at last
by the order of the arguments that they feed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from isobatch.spec import Node
from isobatch_torch.spec.build import Twin, module_path
from isobatch_torch.spec.layouts import KEEP

__all__ = ["channels_of_flattened", "copy_state", "pair_layers"]

Label = int


@dataclass(slots=True)
class _Layers:
    """The layers of a module that hold something, and which of them feed which."""

    modules: dict[str, nn.Module]
    before: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    after: dict[str, list[tuple[str, int]]] = field(default_factory=dict[str, list[tuple[str, int]]])


def pair_layers(twin: Twin, other: nn.Module) -> tuple[dict[str, str], list[str], list[str]]:
    """Pair the layers of a twin with those of another module.

    Args:
        twin: From `from_spec`.
        other: Any module.

    Returns:
        Paths in the other module by path in the twin, and the paths on either side that have no partner.
    """
    ours, theirs = _layers(twin), _layers(other)
    pairs: dict[str, str] = {}
    for labels in (_by_neighbours(ordered=False), _by_neighbours(ordered=True), _signature_labels):
        _match(labels(ours), labels(theirs), ours, theirs, pairs)
    return (
        pairs,
        [path for path in ours.modules if path not in pairs],
        [path for path in theirs.modules if path not in pairs.values()],
    )


def copy_state(twin: Twin, other: nn.Module, pairs: Mapping[str, str], *, to_twin: bool, flat: bool) -> None:
    """Copy the state of paired layers.

    A `Linear` behind a flattened image has its inputs in another order in a module of channels first, and the two biases of an
    LSTM or RNN are one in Keras.

    Args:
        twin: From `from_spec`.
        other: Any module.
        pairs: From `pair_layers`.
        to_twin: Whether to the twin, instead of from it.
        flat: Whether both flatten channels last, as twins do.
    """
    flattened = {} if flat else channels_of_flattened(twin)
    with torch.no_grad():
        for ours, theirs in pairs.items():
            ends = twin.get_submodule(ours), other.get_submodule(theirs)
            source, target = ends[::-1] if to_twin else ends
            state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
            channels = flattened.get(ours)
            if channels is not None and "weight" in state:
                state["weight"] = _reordered(state["weight"], channels, to_last=to_twin)
            if to_twin and isinstance(source, nn.LSTM | nn.RNN) and source.bias:
                state["bias_ih_l0"] += state["bias_hh_l0"]
                state["bias_hh_l0"].zero_()
            target.load_state_dict(state, strict=False)


def _layers(module: nn.Module) -> _Layers:
    modules = {
        path: child
        for path, child in module.named_modules()
        if any(True for _ in child.parameters(recurse=False))
        or any(name != "num_batches_tracked" for name, _ in child.named_buffers(recurse=False))
    }
    found = _Layers(modules)
    graph = module.graph if isinstance(module, fx.GraphModule) else _traced(module, modules)
    if graph is not None:
        _connect(found, graph)
    return found


def _traced(module: nn.Module, modules: Mapping[str, nn.Module]) -> fx.Graph | None:
    """The graph, every layer that holds something being one node; `None` if the module cannot be traced."""

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return module_qualified_name in modules or super().is_leaf_module(m, module_qualified_name)

    try:
        return Tracer().trace(module)
    except Exception:  # noqa: BLE001 - control flow that depends on values, and whatever else a user's code does
        return None


def _connect(found: _Layers, graph: fx.Graph) -> None:
    """For each node the nearest layers before it, in the order of its arguments."""
    sources: dict[fx.Node, list[str]] = {}
    for node in graph.nodes:
        given = list(dict.fromkeys(path for one in node.all_input_nodes for path in sources[one]))
        if node.op == "call_module" and node.target in found.modules:
            path = str(node.target)
            found.before.setdefault(path, []).extend(given)
            for place, one in enumerate(given):
                found.after.setdefault(one, []).append((path, place))
            given = [path]
        sources[node] = given


def _signature(module: nn.Module) -> Label:
    shapes = [
        (name, tuple(tensor.shape))
        for name, tensor in module.state_dict().items()
        if name != "num_batches_tracked"
    ]
    return hash(tuple(sorted(shapes)))


def _signature_labels(layers: _Layers) -> dict[str, Label]:
    return {path: _signature(module) for path, module in layers.modules.items()}


def _by_neighbours(*, ordered: bool) -> Callable[[_Layers], dict[str, Label]]:
    def labels(layers: _Layers) -> dict[str, Label]:
        found = _signature_labels(layers)
        for _ in range(min(len(found), 64)):
            found = {
                path: hash(
                    (
                        label,
                        tuple(sorted(found[one] for one in layers.before.get(path, []))),
                        tuple(
                            sorted(
                                (found[one], place if ordered else 0)
                                for one, place in layers.after.get(path, [])
                            )
                        ),
                    )
                )
                for path, label in found.items()
            }
        return found

    return labels


def _match(
    ours: Mapping[str, Label],
    theirs: Mapping[str, Label],
    left: _Layers,
    right: _Layers,
    pairs: dict[str, str],
) -> None:
    """Add the pairs whose label only one layer on each side has, or whose values are the same."""
    taken = set(pairs.values())
    rest = (
        {path: label for path, label in ours.items() if path not in pairs},
        {path: label for path, label in theirs.items() if path not in taken},
    )
    counts = Counter(rest[0].values()), Counter(rest[1].values())
    for path, label in rest[0].items():
        partners = [one for one, other in rest[1].items() if other == label]
        if counts[0][label] != 1 or counts[1][label] != 1:
            partners = [one for one in partners if _same_values(left.modules[path], right.modules[one])]
        if len(partners) == 1 and partners[0] not in pairs.values():
            pairs[path] = partners[0]


def _same_values(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in ours if name in theirs and ours[name].dim())


def channels_of_flattened(twin: Twin) -> dict[str, int]:
    """Return the channels of the image that is flattened before a `Linear`, by the path of the `Linear`.

    Args:
        twin: From `from_spec`.
    """
    spec, shapes = twin.description.spec, twin.description.shapes
    nodes: dict[Any, Node] = {node.name: node for node in spec.nodes}
    found: dict[str, int] = {}
    for node in spec.nodes:
        inner = nodes.get(node.inputs[0]) if node.inputs else None
        while inner is not None and inner.operation in {"dropout", "identity"}:
            inner = nodes.get(inner.inputs[0])
        if node.operation != "dense" or inner is None or inner.operation != "flatten":
            continue
        inner = nodes.get(inner.inputs[0])
        while (
            inner is not None and (inner.operation in KEEP or "pool" in inner.operation) and not inner.weights
        ):
            inner = nodes.get(inner.inputs[0])
        channels = None if inner is None else _channels(inner, shapes)
        if channels is not None:
            found[module_path(node)] = channels
    return found


def _channels(node: Node, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    kernels = {"conv": -1, "conv_transpose": -2, "batch_norm": -1}
    if node.operation == "depthwise_conv":
        kernel = shapes[node.weights["kernel"]]
        return kernel[-1] * kernel[-2]
    role = "moving_mean" if node.operation == "batch_norm" else "kernel"
    return shapes[node.weights[role]][kernels[node.operation]] if node.operation in kernels else None


def _reordered(weight: torch.Tensor, channels: int, *, to_last: bool) -> torch.Tensor:
    """The columns of a kernel in the order of an image flattened channels last, or first."""
    sizes = (channels, -1) if to_last else (-1, channels)
    return weight.reshape(len(weight), *sizes).transpose(1, 2).flatten(1)
