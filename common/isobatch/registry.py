"""Which backends there are, and which one a model belongs to, without importing a framework to find out."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from isobatch.errors import BackendError, ModelError

if TYPE_CHECKING:
    from isobatch.backend import Backend

__all__ = ["available_backends", "backend_of", "get_backend"]

_MODULES = {"keras": "isobatch_keras", "torch": "isobatch_torch"}


def available_backends() -> tuple[str, ...]:
    """Return the names of the backends whose framework is installed; imports none of them.

    Returns:
        A part of `("keras", "torch")`.

    >>> set(available_backends()) <= {"keras", "torch"}
    True
    """
    return tuple(name for name in _MODULES if importlib.util.find_spec(name) is not None)


def get_backend(name: str) -> Backend:
    """Return a backend by name, importing its framework on first use.

    Args:
        name: `"keras"` or `"torch"`.

    Returns:
        The one backend object of that name.

    Raises:
        BackendError: The name is unknown, or its framework is not installed.

    >>> get_backend("jax")
    Traceback (most recent call last):
    isobatch.errors.BackendError: Expected a backend out of 'keras', 'torch', got 'jax'.
    """
    if name not in _MODULES:
        msg = f"Expected a backend out of {', '.join(map(repr, _MODULES))}, got {name!r}."
        raise BackendError(msg)
    return _load(name)


@cache
def _load(name: str) -> Backend:
    if importlib.util.find_spec(name) is None:
        msg = f"Expected {name} to be installed, it is not. Cure: pip install 'isobatch[{name}]'."
        raise BackendError(msg)
    backend: Backend = importlib.import_module(f"{_MODULES[name]}.backend").BACKEND
    return backend


def backend_of(model: Any) -> Backend:
    """Return the backend a model belongs to, read from its class.

    Args:
        model: A `keras.Model` or a `torch.nn.Module`.

    Returns:
        Its backend.

    Raises:
        ModelError: It is a model of neither.
    """
    name = _name_of(type(model))
    if name is None:
        roots = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
        msg = f"Expected a keras.Model or a torch.nn.Module, got {type(model).__module__}.{type(model).__qualname__}."
        if "tf_keras" in roots:
            msg += " Models of tf_keras (Keras 2) are not supported: save the weights and load them into the same model built with keras."
        elif "keras" in roots:
            msg += " Put the layer into a keras.Sequential or a functional keras.Model."
        raise ModelError(msg)
    return get_backend(name)


def _name_of(cls: type) -> str | None:
    # Keras first: with KERAS_BACKEND=torch every Keras layer is a torch.nn.Module too.
    keras, torch = sys.modules.get("keras"), sys.modules.get("torch")
    if keras is not None and issubclass(cls, keras.layers.Layer):
        return "keras" if issubclass(cls, keras.Model) else None
    if torch is not None and issubclass(cls, torch.nn.Module):
        return "torch"
    return None
