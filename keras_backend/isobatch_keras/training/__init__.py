"""Compiled Keras models as recipes: what they are trained with, and how far they have come."""

from isobatch_keras.training.recipe import template_of, to_recipe
from isobatch_keras.training.state import iterations, read_slots

__all__ = ["iterations", "read_slots", "template_of", "to_recipe"]
