"""Specs to torch modules and back: `from_spec`, `to_tensors`, `register_layer`, and the layers torch has no exact equal of."""

from isobatch_torch.spec.build import from_spec, load_tensors, spec_of, to_tensors, with_weights
from isobatch_torch.spec.evaluate import TRAINED, evaluate_layers, predict, without_gaps
from isobatch_torch.spec.handwritten import evaluate_paired
from isobatch_torch.spec.modules import register_layer
from isobatch_torch.spec.pairing import copy_state, pair_layers

__all__ = [
    "TRAINED",
    "copy_state",
    "evaluate_layers",
    "evaluate_paired",
    "from_spec",
    "load_tensors",
    "pair_layers",
    "predict",
    "register_layer",
    "spec_of",
    "to_tensors",
    "with_weights",
    "without_gaps",
]
