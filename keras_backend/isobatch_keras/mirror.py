"""What makes a parallel model look like its template to everything that reads, changes or saves a model."""

# pyright: reportUntypedBaseClass=false
from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

import keras

from isobatch.devices import Device

__all__ = ["Mirror", "Setup", "adopt_compilation"]

_STEPS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")
"""What a class of models may do its own way in `fit`; done its way here too."""

_UNSAVED = {"_operations", "_operations_by_depth", "_replicated", "operations", "template"}
"""Where Keras would find the replicas, or the template a second time, when it looks for what to save."""

_COMPILED = {"optimizer", "_loss_tracker", "_compile_loss", "_compile_metrics"}
"""What `compile` gives a model that has variables of its own."""

if TYPE_CHECKING:
    from keras import Model as _Base
else:
    _Base = object  # the classes that use this one derive from a keras.Model themselves


class Setup(Protocol):
    """What a model was made from: a named tuple of its class's arguments."""

    @property
    def template(self) -> keras.Model:
        """The model that was handed in."""
        ...

    @property
    def devices(self) -> tuple[Device, ...]:
        """Where it runs now."""
        ...

    def _asdict(self) -> dict[str, Any]:
        """Return the arguments by name."""
        ...


class Mirror(_Base):
    """A `keras.Model` that is the template to whoever asks for its class, layers or configuration.

    Keras saves a model by its class, configuration and layers. As those are the template's, every way of saving (`save`,
    `save_weights`, `ModelCheckpoint`, `keras.saving.save_model`) writes the file that the template would have written, with
    the compile settings and the optimizer of the parallel model, and every way of loading weights reads the template's files.
    """

    def mirror(self, setup: Setup) -> None:
        """Start to look like a template.

        Args:
            setup: The template, and how it is run.
        """
        template = setup.template
        self.dtype_policy = template.dtype_policy
        for name in _STEPS:
            own = getattr(type(template), name)
            if own is not getattr(keras.Model, name):
                self.__dict__[name] = MethodType(own, self)
        self.supports_jit = False
        # A named tuple behind Keras's back: as a tracked attribute the template would be saved a second time.
        self.__dict__["__setup"] = setup

    @property
    def template(self) -> keras.Model:
        """The model that was handed in; it owns the weights."""
        return self._mirrored.template

    @property
    def devices(self) -> tuple[Device, ...]:
        """Where it runs: the devices of replicas, in rank order, or of parts."""
        return self._mirrored.devices

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The template's layers."""
        setup = self.__dict__.get("__setup")
        layers: list[keras.layers.Layer] = super().layers if setup is None else setup.template.layers
        return layers

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        setup = self.__dict__.get("__setup")
        return type(self) if setup is None else type(setup.template)

    def __getattr__(self, name: str) -> Any:
        setup = self.__dict__.get("__setup")
        if setup is None or name.startswith("_"):
            msg = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(msg)
        return getattr(setup.template, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.template)} - _UNSAVED)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.template!r} on {', '.join(map(str, self.devices))}>"

    def get_config(self) -> dict[str, Any]:
        """Return the template's configuration."""
        config: dict[str, Any] = self.template.get_config()
        return config

    def get_build_config(self) -> dict[str, Any] | None:
        """Return the template's build configuration."""
        config: dict[str, Any] | None = self.template.get_build_config()
        return config

    def export(self, *args: Any, **kwargs: Any) -> Any:
        """Export the template, which computes the same on one device; takes what `keras.Model.export` takes."""
        return self.template.export(*args, **kwargs)

    def _trackable_children(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Show `tf.train.Checkpoint` the template's parts, and the optimizer and metrics that this model was compiled with."""
        own = super()._trackable_children(*args, **kwargs)
        compiled = {name: part for name, part in own.items() if name in _COMPILED}
        return {**self.template._trackable_children(*args, **kwargs), **compiled}  # noqa: SLF001

    def _obj_type(self) -> str:
        return str(self.template._obj_type())  # noqa: SLF001 - how Keras tells what to save

    @property
    def _mirrored(self) -> Setup:
        setup: Setup = self.__dict__["__setup"]
        return setup

    def __reduce__(self) -> tuple[Any, ...]:
        unpickle, arguments = super().__reduce__()
        made_from = {key: value for key, value in self._mirrored._asdict().items() if value is not None}  # pyright: ignore[reportPrivateUsage] - public in named tuples
        del made_from["template"]
        return _restore, (unpickle, arguments, type(self), made_from)


def adopt_compilation(parallel: keras.Model, model: keras.Model) -> None:
    """Compile a parallel model as another one is compiled, and let it go on with its optimizer.

    Args:
        parallel: What to compile.
        model: A model with the same weights, compiled or not.
    """
    config = keras.saving.deserialize_keras_object(model.get_compile_config())
    if config:
        parallel.compile(**{**config, "optimizer": model.optimizer, "jit_compile": "auto"})


def _restore(unpickle: Any, arguments: tuple[Any, ...], cls: type, made_from: dict[str, Any]) -> Any:
    """Build a pickled parallel model again."""
    model = unpickle(*arguments)
    parallel = cls(model, **made_from)
    adopt_compilation(parallel, model)
    return parallel
