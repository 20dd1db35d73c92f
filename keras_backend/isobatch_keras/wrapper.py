"""A functional or Sequential model made parallel: a real `keras.Model` that shows itself as the template."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.models.functional import Functional

from isobatch.backend import Options
from isobatch.devices import Device
from isobatch_keras.graph import build_graph
from isobatch_keras.mirror import Mirror
from isobatch_keras.template import functional_of

__all__ = ["Parallel"]


class Parallel(Mirror, Functional):
    """A model that slices each batch, runs one replica per device and joins the results.

    Its own layers are slices, replicas and a merge (`summary()` shows them). To everything that reads or saves a model it is
    the template: the same layers, weights, names and configuration, so what it writes is the template's file.

    Args:
        template: A functional or Sequential model; it keeps the weights.
        devices: One for each replica.
        options: How to split, join and keep state.
        output_device: Where outputs are joined.
    """

    def __init__(self, template: keras.Model, devices: tuple[Device, ...], options: Options, output_device: Device) -> None:
        inputs, outputs = build_graph(template, devices, options, output_device)
        super().__init__(inputs, outputs, name=f"parallel_{template.name}")
        self.output_names = list(functional_of(template).output_names)
        self.mirror(template, devices, options, output_device)

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Print the slices, the replicas and the merge; takes what `keras.Model.summary` takes."""
        keras.Model(self.inputs, self.outputs, name=self.name).summary(*args, **kwargs)
