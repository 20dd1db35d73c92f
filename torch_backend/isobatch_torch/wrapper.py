"""What makes a wrapper look like the module it wraps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from isobatch.devices import Device
from isobatch_torch.internals import uncompiled

__all__ = ["Wrapper"]

if TYPE_CHECKING:
    _Base = nn.Module
else:
    _Base = object  # a mixin: the classes that use it derive from a module of torch's


class Wrapper(_Base):
    """To its user it is the module: same parameters under the same names, same attributes and methods, same state."""

    module: nn.Module
    devices: tuple[Device, ...]

    def wrap(self, module: nn.Module, **own: Any) -> None:
        """Start to look like a module; called in place of a constructor.

        Args:
            module: The module.
            own: The wrapper's own attributes, kept behind torch's back.
        """
        training = module.training
        vars(self).update(module=module, **own)
        nn.Module.__init__(self)
        module.training = training
        _share(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass.

        Args:
            *args: As the module takes them.
            **kwargs: Likewise.

        Returns:
            What the module would return.
        """
        if torch.compiler.is_compiling():  # around the wrapper: there is nothing in here to compile
            return _call_uncompiled(self, args, kwargs)
        return self.call_method("__call__", *args, **kwargs)

    def call_method(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run any method of the module as the wrapper runs its forward pass."""
        raise NotImplementedError

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.module.training = mode

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's signature
        """Set training mode on the module."""
        self.module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Apply a function to the module and its parts."""
        self.module.apply(fn)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's signature
        self.module._apply(fn, recurse)  # type: ignore[no-untyped-call] # noqa: SLF001
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own state, under its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load state saved from the module, from this wrapper, or (with `module.` in its names) from `torch.nn.DataParallel`."""
        metadata = getattr(state_dict, "_metadata", None)
        state: Any = OrderedDict(state_dict)
        self._drop_prefix(state, "")
        if metadata is not None:
            state._metadata = OrderedDict((_stripped(f"{key}."), value) for key, value in metadata.items())  # noqa: SLF001
        return self.module.load_state_dict(state, *args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self._drop_prefix(state_dict, prefix)  # inside of a larger module that is being loaded
        self.module._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # noqa: SLF001

    def _drop_prefix(self, state: MutableMapping[str, Any], prefix: str) -> None:
        if "module" not in self._modules:  # else it is a name like any other
            for key in [key for key in state if key.startswith(prefix + "module.")]:
                state[prefix + _stripped(key[len(prefix) :])] = state.pop(key)

    def extra_repr(self) -> str:
        """Name the module's class and the devices."""
        return ", ".join((type(self.module).__name__, *map(str, self.devices)))

    def __getattr__(self, name: str) -> Any:
        if "module" not in vars(self):  # while being unpickled
            msg = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(msg)
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module":
            vars(self).update(module=value)
            self.invalidate()
            _share(self)
        elif name in _OWN:
            vars(self)[name] = value
        else:
            setattr(self.module, name, value)

    def invalidate(self) -> None:
        """Forget what was kept of the module between calls."""
        raise NotImplementedError

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.module)})

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_engine": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _share(self)

    def __bool__(self) -> bool:
        return bool(self.module)

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload]

    def __contains__(self, item: object) -> bool:
        return item in self.module  # type: ignore[operator]

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]  # type: ignore[index]


@uncompiled
def _call_uncompiled(wrapper: Wrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return wrapper.call_method("__call__", *args, **kwargs)


_COLLECTIONS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_OWN = frozenset(vars(nn.Module())) - {"training"}


def _share(wrapper: Wrapper) -> None:
    """Let a wrapper have the very collections of its module, so that every name in them is the module's."""
    vars(wrapper).update((key, getattr(wrapper.module, key)) for key in _COLLECTIONS)


def _stripped(key: str) -> str:
    """Return a name from `torch.nn.DataParallel` as the module has it."""
    while key.startswith("module."):
        key = key.removeprefix("module.")
    return key.removesuffix(".")
