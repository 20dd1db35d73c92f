"""Compiled Keras models as recipes: what they are trained with, and how far they have come."""

from isobatch_keras.spec.float64 import default_type
from isobatch_keras.training.recipe import template_of, to_recipe
from isobatch_keras.training.side import KerasSide, compiled_digits, predict
from isobatch_keras.training.state import read_state, write_state

__all__ = [
    "KerasSide",
    "compiled_digits",
    "default_type",
    "predict",
    "read_state",
    "template_of",
    "to_recipe",
    "write_state",
]
