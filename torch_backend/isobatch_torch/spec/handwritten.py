"""The layers of a module that someone wrote by hand, each by itself on what a Keras layer was given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]

from isobatch.spec import Node
from isobatch_torch.spec.build import Twin, module_path
from isobatch_torch.spec.pairing import channels_of_flattened, pair_layers
from isobatch_torch.spec.positions import Conv, pad_positions
from isobatch_torch.spec.weights import Array

__all__ = ["evaluate_paired"]

_CHANNELS_FIRST = (_ConvNd, _BatchNorm, nn.GroupNorm, nn.PReLU)
_AS_THEY_ARE = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.LSTM, nn.GRU, nn.RNN)


def evaluate_paired(
    twin: Twin, module: nn.Module, values: Mapping[str, Array], report: Callable[[str, str, Array], None]
) -> None:
    """Run, in float64, those layers of a module that have a partner in the twin and mean the same by themselves.

    Args:
        twin: A twin of the Keras model.
        module: Any module that works on channels first.
        values: The Keras side's arrays, by reference.
        report: Called with the reference, the layer's path in the module, and its output, channels last.
    """
    pairs, _, _ = pair_layers(twin, module)
    flattened = channels_of_flattened(twin)
    for node in twin.description.spec.nodes:
        path = module_path(node)
        known = (
            node.name in values and len(node.inputs) == 1 and node.inputs[0] in values and not node.keywords
        )
        if path not in pairs or not known or path in flattened:
            continue
        layer = copy.deepcopy(module.get_submodule(pairs[path])).eval().double()
        with torch.no_grad():
            found = _run(layer, twin.get_submodule(path), node, torch.tensor(values[str(node.inputs[0])]))
        if found is not None and found.shape == values[node.name].shape:
            report(node.name, pairs[path], found.numpy())


def _run(layer: nn.Module, ours: nn.Module, node: Node, x: torch.Tensor) -> torch.Tensor | None:
    """The layer's output; `None` for a layer that we cannot call by itself."""
    if isinstance(layer, _CHANNELS_FIRST):
        moved = x.movedim(-1, 1) if x.dim() > 2 else x
        padding: Any = getattr(layer, "padding", None)
        if isinstance(ours, Conv) and isinstance(padding, tuple) and not any(padding):
            moved = pad_positions(
                moved, ours.same, zip(ours.kernel_size, ours.stride, ours.dilation, strict=True)
            )
        y = layer(moved)
        return y.movedim(1, -1) if y.dim() > 2 else y
    if not isinstance(layer, _AS_THEY_ARE) or node.attributes.get("go_backwards"):
        return None
    if isinstance(layer, nn.Embedding):
        return layer(x.long())
    if isinstance(layer, nn.LSTM | nn.GRU | nn.RNN):
        outputs = layer(x if layer.batch_first else x.transpose(0, 1))[0]
        outputs = outputs if layer.batch_first else outputs.transpose(0, 1)
        return outputs if node.attributes["return_sequences"] else outputs[:, -1]
    return layer(x)
