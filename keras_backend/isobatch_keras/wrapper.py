"""The two parallel models: of a functional template, and of one that only has a `call`."""

# pyright: reportUntypedBaseClass=false
from __future__ import annotations

from functools import partial, wraps
from typing import Any

import keras
from keras.src.models.functional import Functional

from isobatch.backend import Options
from isobatch.devices import Device
from isobatch.placement import Placement
from isobatch_keras.calling import Setup, call_parallel
from isobatch_keras.graph import build_graph
from isobatch_keras.mirror import Mirror
from isobatch_keras.placing import Placed
from isobatch_keras.template import functional_of

__all__ = ["Parallel", "ParallelCall"]


class _Replicated(Mirror):
    """A parallel model whose other methods can be the parallel one too."""

    def call_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the template in parallel, as calling the model does.

        Args:
            name: Of a method that takes and returns rows.
            args: Its arguments; arrays are split.
            kwargs: Its keyword arguments.

        Returns:
            What the method would return for the whole batch.
        """
        method = getattr(self.template, name)
        return call_parallel(
            method, args, kwargs, self.__dict__["__setup"], partial(keras.layers.Layer.add_loss, self)
        )


class Parallel(_Replicated, Functional):
    """A model that slices each batch, runs one replica per device and joins the results.

    Its own layers are slices, replicas and a merge (`summary()` shows them). To everything that reads or saves a model it is
    the template: the same layers, weights, names and configuration, so what it writes is the template's file.

    Args:
        template: A functional or Sequential model; it keeps the weights.
        devices: One for each replica.
        options: How to split, join and keep state.
        output_device: Where outputs are joined.
        placements: Where the parts of each replica run, if they run on different devices.
    """

    def __init__(
        self,
        template: keras.Model,
        devices: tuple[Device, ...],
        options: Options,
        output_device: Device,
        placements: tuple[Placement, ...] | None = None,
    ) -> None:
        modules = None if placements is None else _placed(template, placements)
        inputs, outputs = build_graph(template, devices, options, output_device, modules)
        super().__init__(inputs, outputs, name=f"parallel_{template.name}")
        self.output_names = list(functional_of(template).output_names)
        self.mirror(Setup(template, devices, options, output_device, placements))

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Print the slices, the replicas and the merge; takes what `keras.Model.summary` takes."""
        keras.Model(self.inputs, self.outputs, name=self.name).summary(*args, **kwargs)


class ParallelCall(_Replicated, keras.Model):
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


def _placed(template: keras.Model, placements: tuple[Placement, ...]) -> list[keras.Model]:
    """Return the model that each replica runs, one for each group of devices; the weights lie on the first group."""
    models: dict[str, keras.Model] = {}
    for placement in placements:
        if str(placement) not in models:
            models[str(placement)] = Placed(template, placement, placement.devices[0], moving=not models)
    return [models[str(placement)] for placement in placements]
