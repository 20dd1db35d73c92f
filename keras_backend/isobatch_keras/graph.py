"""The graph of a parallel functional model: slices, replicas, merge."""

# pyright: reportUntypedFunctionDecorator=false
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras

from isobatch.backend import Options
from isobatch.devices import Device
from isobatch.trees import path_text
from isobatch_keras.layers import Merge, Replica, count_rows, no_mask, slice_rows
from isobatch_keras.template import functional_of, split_axes

__all__ = ["Names", "build_graph", "fresh_input"]


def build_graph(
    template: keras.Model,
    devices: tuple[Device, ...],
    options: Options,
    output_device: Device,
    modules: Sequence[keras.Model] | None = None,
) -> tuple[Any, Any]:
    """Build slices, replicas and merge; return the inputs and outputs.

    Args:
        template: The model.
        devices: One for each replica.
        options: How to split, join and keep state.
        output_device: Where outputs are joined.
        modules: What each replica runs, if it is not the template itself.
    """
    inputs = [fresh_input(tensor) for tensor in template.inputs]
    structure = functional_of(template).input
    names = Names([tensor.name for tensor in inputs])
    axes = split_axes(functional_of(template), options)
    paths = [path_text(path, "inputs") for path, _ in keras.tree.flatten_with_path(structure)]
    split = [(x, path, axis) for x, path, axis in zip(inputs, paths, axes, strict=True) if axis is not None]
    rows = keras.layers.Lambda(
        count_rows,
        output_shape=_no_shape,
        mask=no_mask,
        arguments={"names": [path for _, path, _ in split], "axes": [axis for _, _, axis in split]},
        autocast=False,
        name=names.new("rows"),
    )([x for x, _, _ in split])
    outcomes: list[Any] = []
    for rank, device in enumerate(devices):
        rules = {
            "rank": rank,
            "replicas": len(devices),
            "policy": options.policy,
            "min_rows": options.min_rows,
        }
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
        replica = Replica(
            template if modules is None else modules[rank],
            rank,
            device,
            replicas=len(devices),
            options=options,
            name=names.new(f"replica_{rank}"),
        )
        outcomes.append(
            replica(
                keras.tree.pack_sequence_as(structure, shard),
                rows=rows,
                previous=outcomes[-1] if outcomes else None,
            )
        )
    merge = Merge(template, output_device, options, name=names.new("merge"))
    return keras.tree.pack_sequence_as(structure, inputs), merge(
        outcomes=outcomes
    )  # keyword, because Keras takes only tensors by position


class Names:
    """Names not yet taken, because a functional model wants each once."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)

    def new(self, name: str) -> str:
        """Return a name like this one that is not taken, and take it."""
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


def fresh_input(tensor: Any) -> Any:
    """Return an input like the template's; with its own one each wrapping would hang on the template for ever."""
    layer, _, _ = tensor._keras_history  # noqa: SLF001 - there is no public way from a tensor to its layer
    return keras.layers.InputLayer.from_config(layer.get_config()).output


@keras.saving.register_keras_serializable("isobatch")
def _any_rows(shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
    return tuple(shape)


@keras.saving.register_keras_serializable("isobatch")
def _no_shape(_shapes: Any) -> tuple[()]:
    return ()
