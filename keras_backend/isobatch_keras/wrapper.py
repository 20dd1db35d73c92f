"""The two parallel models: of a functional template, and of one that only has a `call`."""

# pyright: reportUntypedBaseClass=false
from __future__ import annotations

from functools import wraps
from typing import Any

import keras
from keras.src.models.functional import Functional

from isobatch.backend import Options
from isobatch.devices import Device
from isobatch_keras.calling import Setup, call_parallel
from isobatch_keras.graph import build_graph
from isobatch_keras.mirror import Mirror
from isobatch_keras.template import functional_of

__all__ = ["Parallel", "ParallelCall"]


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

    def __init__(
        self, template: keras.Model, devices: tuple[Device, ...], options: Options, output_device: Device
    ) -> None:
        inputs, outputs = build_graph(template, devices, options, output_device)
        super().__init__(inputs, outputs, name=f"parallel_{template.name}")
        self.output_names = list(functional_of(template).output_names)
        self.mirror(Setup(template, devices, options, output_device))

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Print the slices, the replicas and the merge; takes what `keras.Model.summary` takes."""
        keras.Model(self.inputs, self.outputs, name=self.name).summary(*args, **kwargs)


class ParallelCall(Mirror, keras.Model):
    """A parallel model of a subclassed template, which has no graph to rebuild: it slices, runs and joins in its `call`.

    Args:
        template: A subclassed model that is built; it keeps the weights.
        devices: One for each replica.
        options: How to split, join and keep state.
        output_device: Where outputs are joined.
    """

    def __init__(
        self, template: keras.Model, devices: tuple[Device, ...], options: Options, output_device: Device
    ) -> None:
        setup = Setup(template, devices, options, output_device)

        @wraps(template.call)  # Keras reads from the signature whether there are `training` and `mask`
        def call(*args: Any, **kwargs: Any) -> Any:
            return call_parallel(template, args, kwargs, setup, self.add_loss)

        object.__setattr__(self, "call", call)
        super().__init__(name=f"parallel_{template.name}")
        self._replicated = [template]
        self.built = True
        self.mirror(setup)

    def __getattr__(self, name: str) -> Any:
        setup = self.__dict__.get("__setup")
        # Where the layers of a subclassed model are, Keras looks for them, under private names too.
        if setup is not None and name.startswith("_") and name in vars(setup.template):
            return vars(setup.template)[name]
        return super().__getattr__(name)
