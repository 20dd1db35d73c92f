"""Keras models to specs and back: `to_spec`, `load_tensors`, `register_layer`, and the float64 record a verdict is held against."""

from isobatch_keras.spec.float64 import Record, Refusal, in_float64, predict, record
from isobatch_keras.spec.rules import register_layer
from isobatch_keras.spec.sources import application, images, open_model
from isobatch_keras.spec.weights import load_tensors, to_spec

__all__ = [
    "Record",
    "Refusal",
    "application",
    "images",
    "in_float64",
    "load_tensors",
    "open_model",
    "predict",
    "record",
    "register_layer",
    "to_spec",
]
