"""Different parts of a Keras model on different devices: its graph once more, each operation inside a layer that enters a device."""

# pyright: reportUntypedBaseClass=false
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import keras
from keras.src.models.functional import Functional

from isobatch.backend import Options
from isobatch.devices import Device
from isobatch.errors import BackendError, ModelError
from isobatch.placement import Placement
from isobatch_keras.arrays import set_mask
from isobatch_keras.devices import ON_TENSORFLOW
from isobatch_keras.graph import Names, fresh_input
from isobatch_keras.mirror import Mirror
from isobatch_keras.replica import record
from isobatch_keras.state import Recording, Update
from isobatch_keras.template import check, functional_of

__all__ = ["Placed", "graph_of", "part_names", "walk"]

Call = Callable[[keras.Operation, str, tuple[Any, ...], dict[str, Any]], Any]


def graph_of(model: keras.Model) -> Any:
    """Return the functional model whose operations can be placed.

    Args:
        model: A functional or Sequential model.

    Raises:
        ModelError: It has no graph, is not built or is a wrapper itself.
        BackendError: Keras does not run on TensorFlow.
    """
    if not ON_TENSORFLOW:
        msg = f"Expected Keras to run on tensorflow, it runs on {keras.config.backend()}. Set KERAS_BACKEND=tensorflow."
        raise BackendError(msg)
    if issubclass(type(model), Mirror):  # not isinstance: a parallel model says it is of its template's class
        msg = f"Expected a model that runs on one device yet, got {model!r}; give its `template`."
        raise ModelError(msg)
    functional = functional_of(model)
    if functional is None and not isinstance(model, keras.Sequential):
        msg = (
            f"Expected a functional or Sequential model, got {model.name!r} of class {type(model).__name__}: only a graph shows which "
            "layers there are and what depends on what. Build it with keras.Input and keras.Model(inputs, outputs)."
        )
        raise ModelError(msg)
    check(model, Options())
    return functional


def part_names(functional: Any, prefix: str = "") -> Iterator[str]:
    """Name all operations of a graph, nested models before what is inside of them.

    Args:
        functional: A functional model.
        prefix: What the names begin with.

    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.ReLU(name="relu")])
    >>> list(part_names(functional_of(model)))
    ['relu']
    """
    for operation in functional.operations:
        if isinstance(operation, keras.layers.InputLayer):
            continue
        yield prefix + operation.name
        if (inner := _inner(operation)) is not None:
            yield from part_names(inner, f"{prefix}{operation.name}.")


def walk(functional: Any, inputs: Any, call: Call, prefix: str = "", **context: Any) -> Any:
    """Run through a graph.

    Args:
        functional: A functional model.
        inputs: Its inputs, symbols or arrays.
        call: Makes the calls; gets the operation, its name, its arguments.
        prefix: What names begin with.
        context: Arguments such as `training`, for all operations that take them in place of their own.

    Returns:
        The outputs.
    """

    def operation_fn(operation: keras.Operation) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            given = context if takes_training(operation) else {}
            return call(operation, prefix + operation.name, args, {**kwargs, **given})

        return run

    return functional._run_through_graph(inputs, operation_fn=operation_fn)  # noqa: SLF001 - what a functional model runs itself


def takes_training(operation: keras.Operation) -> bool:
    """Say whether an operation behaves differently in training."""
    return bool(getattr(operation, "_call_has_training_arg", False))


def inside(
    operation: keras.Operation, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call
) -> Any:
    """Run through a nested model's graph in place of calling it.

    Args:
        operation: The nested model.
        name: Its name.
        args: What it is called with.
        kwargs: Likewise.
        call: As in `walk`.

    Raises:
        ModelError: It is called with more than inputs and `training`.
    """
    kwargs = {key: value for key, value in kwargs.items() if value is not None}
    training = kwargs.pop("training", None)
    inputs = args[0] if args else kwargs.pop("inputs")
    if len(args) > 1 or kwargs:
        msg = (
            f"Expected the nested model {name!r} to be called with inputs alone, got {', '.join(kwargs) or 'more'} too. "
            "Place it as a whole."
        )
        raise ModelError(msg)
    context = {} if training is None else {"training": training}
    return walk(_inner(operation), inputs, call, f"{name}.", **context)


def has_inside(operation: keras.Operation) -> bool:
    """Say whether an operation is a model with a graph of its own."""
    return _inner(operation) is not None


def _inner(operation: keras.Operation) -> Any:
    return functional_of(operation) if isinstance(operation, keras.Model) else None


class Place(keras.layers.Layer):
    """Call one operation of the template, forward and backward on its device.

    Args:
        operation: It is shared, not copied.
        device: Where; `None` for wherever Keras runs it.
        fill: From the call's symbols, in order, to its arguments, as `(args, kwargs)`: Keras lets no other values pass with them.
        name: Name of the layer.
    """

    def __init__(
        self,
        operation: keras.Operation,
        device: Device | None,
        fill: Callable[[Sequence[Any]], Any],
        name: str,
    ) -> None:
        policy = operation.dtype_policy if isinstance(operation, keras.layers.Layer) else None
        super().__init__(name=name, autocast=False, dtype=policy)
        self.operation = operation
        self.device = device
        self.fill = fill
        self.supports_jit = False  # an XLA cluster has one device
        self.supports_masking = True
        self.built = True

    def call(self, tensors: Sequence[Any], training: bool | None = None) -> Any:  # noqa: FBT001 - Keras's signature
        """Call the operation, with these tensors among its arguments."""
        args, kwargs = self.fill(tensors)
        if training is not None and takes_training(
            self.operation
        ):  # what a functional model does with its operations
            kwargs = {**kwargs, "training": training}
        if self.device is None:
            return self.operation(*args, **kwargs)
        passing = _Passing()
        scope = "place_" + re.sub(r"[^A-Za-z0-9_.]", "_", self.name)
        try:
            output, masks, losses = record(
                self.operation, args, kwargs, passing, device=self.device, name=scope
            )
        except Exception as error:
            error.add_note(f"in part {self.operation.name!r} on {self.device}")
            raise
        for variable, value in passing.updates:
            variable.assign(value)
        for loss in losses:
            self.add_loss(loss)
        if masks is not None:
            keras.tree.map_structure_up_to(output, set_mask, output, masks)
        return output

    def compute_output_spec(self, tensors: Sequence[Any], **_kwargs: Any) -> Any:
        """Return the operation's outputs, as new symbols."""
        args, kwargs = self.fill(tensors)
        return self.operation.compute_output_spec(*args, **kwargs)

    def compute_mask(self, _inputs: Any, _previous_mask: Any) -> None:
        """Leave the masks that are attached already."""

    def get_config(self) -> dict[str, Any]:
        """Refuse to be cloned: a place belongs to its model.

        Raises:
            ModelError: Always.
        """
        msg = "Expected keras.models.clone_model to get a template, got a placed model; write clone_model(placed.template)."
        raise ModelError(msg)


def _fill(arguments: Any, tensors: Sequence[Any]) -> Any:
    rest = iter(tensors)
    return keras.tree.map_structure(
        lambda x: next(rest) if isinstance(x, keras.KerasTensor) else x, arguments
    )


class _Passing(Recording):
    """A scope that only delays assignments to the end of the call, or passes them to the replica that is running."""

    def __init__(self) -> None:
        super().__init__({})

    def add_update(self, update: Update) -> None:
        """Remember an assignment, or pass it on."""
        if self.original_scope is None:
            super().add_update(update)
        else:
            self.original_scope.add_update(update)


class Staging(NamedTuple):
    """What a placed model was made from."""

    template: keras.Model
    placement: Placement
    output_device: Device

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices in use."""
        return self.placement.devices


class Placed(Mirror, Functional):
    """A model whose parts run on different devices.

    Its own layers are the template's operations, each in a layer that enters its device (`summary()` shows them). To everything
    that reads or saves a model it is the template.

    Args:
        template: A functional or Sequential model; it keeps the weights, each on the device of its part.
        placement: Its parts and their devices.
        output_device: Where operations run whose inputs come from several devices.
        moving: Whether the weights move to their parts' devices.
    """

    def __init__(
        self, template: keras.Model, placement: Placement, output_device: Device, *, moving: bool = True
    ) -> None:
        functional = graph_of(template)
        inputs = [fresh_input(tensor) for tensor in functional.inputs]
        placing = _Placing(placement, output_device, [tensor.name for tensor in inputs])
        structure = keras.tree.pack_sequence_as(functional.input, inputs)
        outputs = walk(functional, structure, placing.call)
        super().__init__(structure, outputs, name=f"placed_{template.name}")
        if moving:
            _move_weights(template, placing.places)
        self.output_names = list(functional.output_names)
        own: list[keras.layers.Layer] = self.__dict__["_layers"]
        self._layers = [
            template,
            *own,
        ]  # what this model finds in it first are the variables in the template's order
        self.mirror(Staging(template, placement, output_device))

    @property
    def placement(self) -> Placement:
        """The parts, and the devices they run on."""
        placement: Placement = self.__dict__["__setup"].placement
        return placement

    def train_step(self, data: Any) -> Any:
        """Train on one batch, each weight updated where it lies."""
        from isobatch_keras._tensorflow import updating_in_place

        with updating_in_place(self.optimizer):
            return super().train_step(data)

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Print the operations with their devices; takes what `keras.Model.summary` takes."""
        keras.Model(self.inputs, self.outputs, name=self.name).summary(*args, **kwargs)


class _Placing:
    """Calls operations inside of layers that place them, and remembers where symbols come from."""

    def __init__(self, placement: Placement, output_device: Device, taken: list[str]) -> None:
        self.placement = placement
        self.output_device = output_device
        self.names = Names(taken)
        self.places: list[Place] = []
        self.origins: dict[
            int, tuple[Any, Device]
        ] = {}  # of symbols, which are kept so that no other gets their `id`

    def call(
        self, operation: keras.Operation, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        device = self.placement.get(name)
        if device is None and any(part.startswith(f"{name}.") for part in self.placement):
            return inside(operation, name, args, kwargs, self.call)
        device = device or self.inherited(args, kwargs)
        label = name if device is None else f"{name}-{device.kind}{device.index}"
        leaves = keras.tree.flatten((args, kwargs))
        symbols = [leaf for leaf in leaves if isinstance(leaf, keras.KerasTensor)]
        place = Place(operation, device, partial(_fill, (args, kwargs)), self.names.new(label))
        outputs = place(tensors=symbols)
        self.places.append(place)
        if device is not None:
            self.origins.update((id(symbol), (symbol, device)) for symbol in keras.tree.flatten(outputs))
        return outputs

    def inherited(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Device | None:
        """Return the device that inputs come from; the output device if there are several, `None` for none at all."""
        found = {self.origins[id(x)][1] for x in keras.tree.flatten((args, kwargs)) if id(x) in self.origins}
        return found.pop() if len(found) == 1 else self.output_device if found else None


def _move_weights(template: keras.Model, places: Sequence[Place]) -> None:
    """Let each weight lie where it is used first, and the template forget what it has compiled with it elsewhere."""
    where: dict[int, tuple[Any, Device]] = {}
    for place in places:
        if place.device is not None:
            for variable in place.variables:
                where.setdefault(id(variable), (variable, place.device))
    from isobatch_keras._tensorflow import move

    moved = [move(variable, str(device)) for variable, device in where.values()]
    if any(moved):
        template.train_function = template.test_function = template.predict_function = None
