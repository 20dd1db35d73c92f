"""What a Keras model computes in float64, layer by layer.

Each layer is rebuilt from its configuration with every float type in it rewritten, and given the layer's weights; then every
float variable and output is checked. `keras.models.clone_model` would leave nested models and cells in float32 without a word.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from isobatch.errors import IsobatchError
from isobatch.spec import Spec
from isobatch_keras.spec.refs import Call, Ref
from isobatch_keras.spec.rules import find_rule
from isobatch_keras.spec.walk import walk

__all__ = ["Record", "Refusal", "default_type", "in_float64", "predict", "record"]


_NO_KERNEL = re.compile(
    r"of double is not in the list of allowed values|Could not find device for node.*DT_DOUBLE"
)
"""In TensorFlow's message, for instance about three-dimensional pooling on the CPU."""


class Refusal(IsobatchError, ValueError):  # noqa: N818 - it is an answer, not a mistake
    """A layer cannot be run in float64; the message names it."""


@dataclass(frozen=True, slots=True)
class Record:
    """A float64 run.

    Args:
        spec: The model's spec.
        values: What each reference stood for.
        trained: The moving mean and variance of each BatchNormalization after one step of training on the same input, by reference.
        coarse: References to what was computed in float32, for TensorFlow has no float64 kernel for it.
    """

    spec: Spec
    values: Mapping[str, np.ndarray[Any, Any]]
    trained: Mapping[str, list[np.ndarray[Any, Any]]]
    coarse: frozenset[str]


def record(model: Any, batch: Any, factory: Callable[[], Any] | None = None) -> Record:
    """Run a Keras model in float64 and keep what each of its layers returns.

    Args:
        model: A functional or sequential model.
        batch: Numpy arrays as the model is given them; floats of any precision.
        factory: Builds the model, for one with layers that cannot be rebuilt from their configuration: it is called while
            Keras's default type is float64, and given the model's weights.

    Returns:
        The spec, and the arrays by reference.

    Raises:
        Refusal: A layer cannot be rebuilt in float64.
    """
    found, spec = walk(model, find_rule)
    copies: dict[int, Any] = {}
    values = _inputs(spec, batch)
    coarse: set[str] = set()
    trained: dict[str, list[np.ndarray[Any, Any]]] = {}
    with default_type(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of Keras about the model, which its user has seen
        calls = found.calls if factory is None else _from_factory(factory, model, spec)
        for call in calls:
            if factory is not None:
                copies[id(call.operation)] = call.operation
            _repeat(call, values, copies, coarse)
            if isinstance(call.operation, keras.layers.BatchNormalization) and call.outputs[0] in values:
                trained[str(call.outputs[0])] = _train_step(call, copies[id(call.operation)], values)
    arrays = {ref: np.asarray(keras.ops.convert_to_numpy(value)) for ref, value in values.items()}
    return Record(spec, arrays, trained, frozenset(coarse))


def in_float64(model: Any, factory: Callable[[], Any] | None = None) -> Any:
    """Return a copy of a whole Keras model in float64, with the same weights.

    Args:
        model: A functional or sequential model.
        factory: As for `record`.

    Raises:
        Refusal: It cannot be rebuilt.
    """
    call = Call(model.name, model, (), {}, ())
    with default_type():
        if factory is None:
            return _copy(call)
        copy = factory()
        _load(call, copy)
        return copy


def predict(model: Any, batch: Any) -> Any:
    """Return what a Keras model computes in inference, as numpy arrays in the nest that it returns.

    Args:
        model: Any model.
        batch: Numpy arrays as the model is given them.
    """
    return keras.tree.map_structure(keras.ops.convert_to_numpy, model(batch, training=False))


def _inputs(spec: Spec, batch: Any) -> dict[str, Any]:
    arrays = spec.bind(batch)
    dtypes = {one.name: "float64" if "float" in one.dtype else one.dtype for one in spec.inputs}
    return {name: keras.ops.convert_to_tensor(arrays[name], dtype) for name, dtype in dtypes.items()}


def _repeat(call: Call, values: dict[str, Any], copies: dict[int, Any], coarse: set[str]) -> None:
    """Run one layer in float64 on what the layers before it returned."""
    given = keras.tree.flatten((call.args, dict(call.kwargs)))
    if any(isinstance(one, Ref) and one not in values for one in given):
        return  # inside a layer that is run as a whole
    args, kwargs = _filled((call.args, dict(call.kwargs)), values)
    try:
        if id(call.operation) not in copies:
            copies[id(call.operation)] = _copy(call)
        operation = copies[id(call.operation)]
        outputs = keras.tree.flatten(operation(*args, **kwargs))
        _match_weights(call, operation)
    except Refusal:
        raise
    except Exception as error:
        if not _NO_KERNEL.search(str(error)):
            msg = f"{call.path}: {type(call.operation).__name__} does not run in float64: {_reason(error)}"
            raise Refusal(msg) from error
        outputs = _in_float32(call, args, kwargs)
        coarse.update(call.outputs)
    for ref, output in zip(call.outputs, outputs, strict=True):
        if "float" in keras.backend.standardize_dtype(output.dtype) and "float" in ref.dtype:
            _expect_float64(call, output.dtype, "returns")
        values[ref] = output


def _train_step(call: Call, layer: Any, values: Mapping[str, Any]) -> list[np.ndarray[Any, Any]]:
    """The running statistics after one step; the layer keeps those it had."""
    running = layer.moving_mean, layer.moving_variance
    before = [variable.numpy() for variable in running]
    args, kwargs = _filled((call.args, dict(call.kwargs)), values)
    layer(*args, **{**kwargs, "training": True})
    after = [variable.numpy() for variable in running]
    for variable, array in zip(running, before, strict=True):
        variable.assign(array)
    return after


def _in_float32(call: Call, args: Any, kwargs: Any) -> list[Any]:
    def cast(one: Any, dtype: str) -> Any:
        return keras.ops.cast(one, dtype) if keras.ops.is_tensor(one) and "float" in one.dtype.name else one

    lowered = keras.tree.map_structure(lambda one: cast(one, "float32"), (args, kwargs))
    outputs = keras.tree.flatten(call.operation(*lowered[0], **lowered[1]))
    return [cast(one, "float64") for one in outputs]


def _reason(error: Exception) -> str:
    """What a framework says, on one line and without colours."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()]
    return next(
        (line for line in lines if line and not line.startswith("Exception encountered")),
        type(error).__name__,
    )


def _filled(nest: Any, values: Mapping[str, Any]) -> Any:
    return keras.tree.map_structure(lambda one: values[one] if isinstance(one, Ref) else one, nest)


def _copy(call: Call) -> Any:
    """A layer or operation of float64 with the same weights."""
    try:
        config = keras.saving.serialize_keras_object(call.operation)
        copy = keras.saving.deserialize_keras_object(_rewritten(config))
    except Exception as error:
        msg = f"{call.path}: {type(call.operation).__name__} cannot be rebuilt from its configuration: {_reason(error)}"
        raise Refusal(msg) from error
    if isinstance(copy, keras.layers.Layer) and not copy.built and call.operation.weights:
        shapes = call.operation.get_build_config() or {}
        copy.build_from_config(shapes)
    if isinstance(copy, keras.layers.Layer) and copy.built:
        _load(call, copy)
    return copy


def _load(call: Call, copy: Any) -> None:
    source = call.operation.variables
    if len(source) != len(copy.variables):
        msg = f"{call.path}: {type(copy).__name__} has {len(copy.variables)} variables when rebuilt, and {len(source)} before"
        raise Refusal(msg)
    for old, new in zip(source, copy.variables, strict=True):
        new.assign(keras.ops.cast(old, new.dtype))
        if "float" in new.dtype:
            _expect_float64(call, new.dtype, f"keeps {new.name!r} as")


def _match_weights(call: Call, copy: Any) -> None:
    """A copy that made its weights only when it ran has the wrong ones."""
    if isinstance(copy, keras.layers.Layer):
        for old, new in zip(call.operation.variables, copy.variables, strict=True):
            if "float" in new.dtype and not np.array_equal(old.numpy().astype("float64"), new.numpy()):
                msg = f"{call.path}: {type(copy).__name__} made {new.name!r} anew when it ran"
                raise Refusal(msg)


def _expect_float64(call: Call, dtype: Any, verb: str) -> None:
    if keras.backend.standardize_dtype(dtype) != "float64":
        msg = f"{call.path}: {type(call.operation).__name__} {verb} {keras.backend.standardize_dtype(dtype)} when rebuilt in float64"
        raise Refusal(msg)


def _rewritten(config: Any) -> Any:
    """A configuration with every float type and type policy in it made float64."""
    if isinstance(config, Mapping):
        if config.get("class_name") in {"DTypePolicy", "FloatDTypePolicy"}:
            name = str(config.get("config", {}).get("name", "float64"))
            return {**config, "config": {"name": "float64" if "float" in name else name}}
        return {
            key: "float64" if _is_float_type(key, value) else _rewritten(value)
            for key, value in config.items()
        }
    return [_rewritten(value) for value in config] if isinstance(config, list | tuple) else config


def _is_float_type(key: str, value: Any) -> bool:
    return "dtype" in key and isinstance(value, str) and "float" in value


@contextlib.contextmanager
def default_type(dtype: str = "float64") -> Generator[None, None, None]:
    """Make a type Keras's default for the length of a block.

    Args:
        dtype: Which.
    """
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


def _from_factory(factory: Callable[[], Any], model: Any, spec: Spec) -> list[Call]:
    copy = factory()
    found, other = walk(copy, find_rule)
    if [node.operation for node in other.nodes] != [node.operation for node in spec.nodes]:
        msg = f"{model.name}: the factory builds another network"
        raise Refusal(msg)
    for old, new in zip(model.variables, copy.variables, strict=True):
        new.assign(keras.ops.cast(old, new.dtype))
    renamed = {str(a): str(b) for a, b in zip(_names(other), _names(spec), strict=True)}
    return [_renamed(call, renamed) for call in found.calls]


def _names(spec: Spec) -> list[str]:
    return [*(one.name for one in spec.inputs), *(node.name for node in spec.nodes)]


def _renamed(call: Call, names: Mapping[str, str]) -> Call:
    def new(ref: Any) -> Any:
        if not isinstance(ref, Ref):
            return ref
        name, colon, output = ref.partition(":")
        return Ref(f"{names.get(name, name)}{colon}{output}", ref.shape, ref.dtype)

    args, kwargs, outputs = keras.tree.map_structure(new, (call.args, dict(call.kwargs), list(call.outputs)))
    return Call(call.path, call.operation, args, kwargs, tuple(outputs))
