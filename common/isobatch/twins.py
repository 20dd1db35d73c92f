"""The same network in the other framework, and its weights both ways."""

from __future__ import annotations

import importlib
from typing import Any, Literal

from isobatch.errors import ModelError, SpecError
from isobatch.registry import backend_of, get_backend

__all__ = ["copy_weights", "training_twin", "twin"]


def twin(model: Any, *, layout: str = "channels_last") -> Any:
    """Return a Keras model as a torch module with the same weights.

    Args:
        model: A functional or sequential `keras.Model`, built.
        layout: Of images and other arrays with positions. `"channels_last"`: the twin takes and gives the same arrays as the
            model; `"channels_first"`: `(B, C, *positions)`, as torch networks usually have it.

    Returns:
        A `torch.nn.Module` in eval mode whose children have the names of the Keras layers.

    Raises:
        BackendError: Keras or torch is not installed.
        ModelError: The model is no Keras model, or has no graph.
        SpecError: Layers have no word in a spec; the message lists all of them.

    >>> import keras, torch
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="out")])
    >>> twin(model).out
    Linear(in_features=3, out_features=2, bias=True)
    """
    if backend_of(model).name != "keras":
        msg = f"Expected a keras.Model, got {type(model).__qualname__}."
        raise ModelError(msg)
    return _side("torch").from_spec(_side("keras").to_spec(model), layout=layout)


def training_twin(model: Any, *, repeated_rows: Literal["keras", "summed"] = "keras") -> Any:
    """Return the torch side of a compiled Keras model: the network, and what trains it as Keras does.

    Args:
        model: A compiled functional or sequential `keras.Model`, or a parallel one. What its optimizer has kept so far goes along.
        repeated_rows: What a row of an embedding counts for in an optimizer's squares that a batch looks up several times: `"keras"`
            as Keras has it on TensorFlow, the sum of the squares; `"summed"`, the square of the sum, which is the gradient's.

    Returns:
        An `isobatch_torch.training.TrainingTwin`: `module`, `optimizer`, `loss`, `metrics` and `schedule` for a loop of one's own,
        and `train_on_batch` and `fit` for a comparison. Of a model whose outputs carry masks the module returns `(outputs, masks)`.

    Raises:
        BackendError: Keras or torch is not installed.
        ModelError: The model is not compiled.
        SpecError: Layers, or what the model is trained with, have no words; the message lists all of them.

    >>> import keras, torch, numpy as np
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    >>> model.compile(keras.optimizers.SGD(0.5), "mse")
    >>> training = training_twin(model)
    >>> training.train_on_batch(np.array([[1.0, 1.0]]), np.array([[0.0]])), model.train_on_batch(np.array([[1.0, 1.0]]), np.array([[0.0]]))
    (4.0, 4.0)
    """
    if backend_of(model).name != "keras":
        msg = f"Expected a compiled keras.Model, got {type(model).__qualname__}."
        raise ModelError(msg)
    get_backend("torch")
    keras_side = importlib.import_module("isobatch_keras.training")
    torch_side = importlib.import_module("isobatch_torch.training")
    recipe = keras_side.to_recipe(model)
    spec = _side("keras").to_spec(keras_side.template_of(model), masks=bool(recipe.masks))
    module = _side("torch").from_spec(spec)
    training = torch_side.from_recipe(recipe, module, repeated_rows=repeated_rows)
    torch_side.write_state(training, keras_side.read_state(model))
    return training


def copy_weights(source: Any, target: Any) -> dict[str, str]:
    """Give a model the weights of the same network in the other framework, or in the same one.

    Layers are paired by what they hold and how they are connected, never by name or order.

    Args:
        source: A Keras model; or a torch module, a twin or one written by hand.
        target: Likewise; at least one of both is a Keras model or a twin.

    Returns:
        Paths of the source's layers, with the paths of the target's that got their weights.

    Raises:
        ModelError: Neither side is a Keras model or a twin.
        SpecError: Layers could not be paired, in which case nothing is changed; the message lists them.

    >>> import keras, torch
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="a"), keras.layers.Dense(2, name="b")])
    >>> module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    >>> copy_weights(model, module)
    {'a': '0', 'b': '1'}
    """
    torch_side = _side("torch")
    ours, theirs = _as_twin(source), _as_twin(target)
    if ours is None and theirs is None:
        msg = "Expected a Keras model or a twin on one side at least, got two modules without a graph of their own."
        raise ModelError(msg)
    twin_first = ours is not None
    net, other = (ours, theirs if theirs is not None else target) if twin_first else (theirs, source)
    pairs, left, right = torch_side.pair_layers(net, other)
    if left or right:
        sides = (left, right) if twin_first else (right, left)
        msg = f"Expected each layer to have one partner; without one: {sides[0]} of the source, {sides[1]} of the target."
        raise SpecError(msg)
    both = ours is not None and theirs is not None
    torch_side.copy_state(net, other, pairs, to_twin=not twin_first, flat=both)
    if theirs is not None and theirs is not target:
        _side("keras").load_tensors(target, torch_side.to_tensors(theirs))
    return pairs if twin_first else {theirs_: ours_ for ours_, theirs_ in pairs.items()}


def _as_twin(model: Any) -> Any:
    """The model itself if it is a twin, a new twin of a Keras model, and `None` for another module."""
    if backend_of(model).name == "keras":
        return twin(model)
    return model if _side("torch").spec_of(model) is not None else None


def _side(name: str) -> Any:
    get_backend(name)
    return importlib.import_module(f"isobatch_{name}.spec")
