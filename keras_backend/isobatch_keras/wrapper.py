"""A functional or Sequential model made parallel: a real `keras.Model` that shows itself as the template."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
from keras.src.models.functional import Functional

from isobatch.backend import Options
from isobatch.devices import Device
from isobatch_keras.layers import Merge, Replica, count_rows, no_mask, slice_rows
from isobatch_keras.template import functional_of

__all__ = ["Parallel", "parallelize"]


def parallelize(
    model: keras.Model, devices: tuple[Device, ...], options: Options, output_device: Device
) -> keras.Model:
    """Return a model that runs one replica of another on each device.

    Args:
        model: The template.
        devices: One for each replica.
        options: How to split, join and keep state.
        output_device: Where outputs are joined.
    """
    return Parallel(model, devices, options.check(len(devices)), output_device)


class Parallel(Functional):
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
        inputs, outputs = _graph(template, devices, options, output_device)
        super().__init__(inputs, outputs, name=f"parallel_{template.name}")
        self.output_names = list(functional_of(template).output_names)
        self.dtype_policy = template.dtype_policy
        self.supports_jit = False
        object.__setattr__(self, "_setup", (template, devices, options))  # unseen by Keras, which would save the template twice

    @property
    def template(self) -> keras.Model:
        """The model that was made parallel."""
        template: keras.Model = self._setup[0]
        return template

    @property
    def devices(self) -> tuple[Device, ...]:
        """Where the replicas run, in rank order."""
        devices: tuple[Device, ...] = self._setup[1]
        return devices


def _graph(template: keras.Model, devices: tuple[Device, ...], options: Options, output_device: Device) -> tuple[Any, Any]:
    """Build slices, replicas and merge; return the inputs and outputs."""
    inputs = [_fresh_input(tensor) for tensor in template.inputs]
    structure = functional_of(template).input
    names = _Names([tensor.name for tensor in inputs])
    axes = _split_axes(template, options)
    split = [(x, axis) for x, axis in zip(inputs, axes, strict=True) if axis is not None]
    rows = keras.layers.Lambda(
        count_rows,
        output_shape=_no_shape,
        mask=no_mask,
        arguments={"names": [x.name for x, _ in split], "axes": [axis for _, axis in split]},
        autocast=False,
        name=names.new("rows"),
    )([x for x, _ in split])
    outcomes: list[Any] = []
    for rank, device in enumerate(devices):
        rules = {"rank": rank, "replicas": len(devices), "policy": options.policy, "min_rows": options.min_rows}
        shard = [
            x
            if axis is None
            else keras.layers.Lambda(
                slice_rows,
                output_shape=_any_rows,
                mask=no_mask,
                arguments={**rules, "axis": axis},
                autocast=False,
                name=names.new(f"slice_{x.name}_{rank}"),
            )(x)
            for x, axis in zip(inputs, axes, strict=True)
        ]
        replica = Replica(template, rank, device, len(devices), options, name=names.new(f"replica_{rank}"))
        outcomes.append(
            replica(keras.tree.pack_sequence_as(structure, shard), rows=rows, previous=outcomes[-1] if outcomes else None)
        )
    merge = Merge(template, output_device, options, name=names.new("merge"))
    return keras.tree.pack_sequence_as(structure, inputs), merge(outcomes=outcomes)  # keyword, because Keras takes only tensors by position


class _Names:
    """Names not yet taken, because a functional model wants each once."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)

    def new(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


def _fresh_input(tensor: Any) -> Any:
    """Return an input like the template's; with its own one each wrapping would hang on the template for ever."""
    layer, _, _ = tensor._keras_history  # noqa: SLF001 - there is no public way from a tensor to its layer
    return keras.layers.InputLayer.from_config(layer.get_config()).output


def _split_axes(template: keras.Model, options: Options) -> list[int | None]:
    """Return the batch axis of each input, `None` for one that all replicas get whole."""
    axes: list[int | None] = []
    for position, (path, tensor) in enumerate(keras.tree.flatten_with_path(functional_of(template).input)):
        words = {position, tensor.name, *path}
        axis = options.axis
        if not isinstance(axis, int):
            axis = next((axis[word] for word in words if word in axis), 0)
        axes.append(None if not words.isdisjoint(options.broadcast) or not tensor.shape else axis % len(tensor.shape))
    return axes


@keras.saving.register_keras_serializable("isobatch")
def _any_rows(shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
    return tuple(shape)


@keras.saving.register_keras_serializable("isobatch")
def _no_shape(_shapes: Any) -> tuple[()]:
    return ()
