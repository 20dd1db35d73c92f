"""How far training has come, in neither framework's form: weights, what the optimizer keeps, and the count of batches."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from isobatch.clusters import write_whole
from isobatch.errors import ModelError, SpecError
from isobatch.registry import backend_of

if TYPE_CHECKING:
    import numpy as np

__all__ = ["TrainingState"]

_VERSION = "1"
_MARK = "isobatch_training"

Arrays = Mapping[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True, slots=True)
class TrainingState:
    """All that a run needs to go on: in Keras or in torch, whichever it was in before.

    The place in a schedule is the count of batches; running statistics are among the weights. Keys are those of the spec, shapes are Keras's.

    Args:
        weights: Weights and running statistics.
        slots: What the optimizer keeps for each weight, by slot and key; empty before the first step.
        iterations: How many batches have been seen.
        once: What the optimizer keeps once for all weights.
        optimizer: Its name, such as `"adam"`.
    """

    weights: Arrays
    slots: Mapping[str, Arrays]
    iterations: int
    once: Mapping[str, float] = field(default_factory=dict[str, float])
    optimizer: str = ""

    @classmethod
    def of(cls, trained: Any) -> TrainingState:
        """Return the state of a compiled Keras model, or of a `TrainingTwin`.

        Args:
            trained: The model, also a parallel one; or what `isobatch.training_twin` returned.

        Raises:
            ModelError: It is neither.

        >>> import keras, torch
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="out")])
        >>> model.compile("adam", "mse")
        >>> sorted(TrainingState.of(model).weights)
        ['out.bias', 'out.kernel']
        """
        state: TrainingState = _side(trained).read_state(trained)
        return state

    def put_into(self, trained: Any) -> None:
        """Let a compiled Keras model, or a `TrainingTwin`, go on from here.

        Args:
            trained: As for `of`.

        Raises:
            ModelError: It is neither.
            SpecError: It has other weights, or another optimizer; nothing is changed then.
        """
        side = _side(trained)
        other = side.read_state(trained)
        state = self._named_as(other)
        state._check(other)  # noqa: SLF001 - of this class
        side.write_state(trained, state)

    def _named_as(self, other: TrainingState) -> TrainingState:
        """Return this state with another one's keys, if both list the same roles and shapes in the same order.

        Keras numbers layers without names anew for each model of a process.
        """
        if self._layout() != other._layout() or set(self.weights) == set(other.weights):
            return self
        names = dict(zip(self.weights, other.weights, strict=True))
        slots = {
            slot: {names[key]: array for key, array in arrays.items() if key in names}
            for slot, arrays in self.slots.items()
        }
        return replace(self, weights={names[key]: array for key, array in self.weights.items()}, slots=slots)

    def _layout(self) -> list[tuple[str, Any]]:
        return [(key.rpartition(".")[2], array.shape) for key, array in self.weights.items()]

    def _check(self, other: TrainingState) -> None:
        """Raise unless this is a state of the same training."""
        shapes = {key: array.shape for key, array in self.weights.items()}
        theirs = {key: array.shape for key, array in other.weights.items()}
        wrong = [
            f"{key} {shapes.get(key, 'absent')}, expected {theirs.get(key, 'none')}"
            for key in sorted({*shapes, *theirs})
            if shapes.get(key) != theirs.get(key)
        ]
        if self.optimizer != other.optimizer:
            wrong.append(f"optimizer {self.optimizer!r}, expected {other.optimizer!r}")
        if self.slots and other.slots and self.slots.keys() != other.slots.keys():
            wrong.append(f"an optimizer that keeps {sorted(self.slots)}, expected {sorted(other.slots)}")
        wrong += [
            f"{slot} of {key} {array.shape}, expected {shapes.get(key, 'none')}"
            for slot, arrays in self.slots.items()
            for key, array in arrays.items()
            if array.shape != shapes.get(key)
        ]
        if wrong:
            msg = f"Expected the state of the same training, got another one's: {'; '.join(wrong)}."
            raise SpecError(msg)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all.

        Args:
            path: The file.
        """
        import json
        from pathlib import Path

        from safetensors.numpy import save_file

        tensors = {f"weights/{key}": array for key, array in self.weights.items()}
        for slot, arrays in self.slots.items():
            tensors.update({f"{slot}/{key}": array for key, array in arrays.items()})
        about = {
            "iterations": self.iterations,
            "once": dict(self.once),
            "optimizer": self.optimizer,
            "weights": list(self.weights),
        }
        metadata = {_MARK: _VERSION, "about": json.dumps(about)}
        write_whole(Path(path), lambda part: save_file(_contiguous(tensors), part, metadata))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> TrainingState:
        """Return the state in a file that `save` wrote. Nothing in a file is run.

        Args:
            path: The file.

        Raises:
            FileNotFoundError: There is no such file.
            SpecError: It is cut off, or something else.
        """
        import json
        from pathlib import Path

        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise FileNotFoundError(2, "No such file or directory", str(path))
        try:
            with safe_open(path, "numpy") as file:
                metadata = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        except SafetensorError as error:
            msg = f"Expected a state of training as safetensors in {Path(path).name!r}, could not read it: {error}."
            raise SpecError(msg) from None
        if metadata.get(_MARK) != _VERSION:
            msg = f"Expected a state of training, version {_VERSION}, in {Path(path).name!r}, got {metadata.get(_MARK, 'another file')!r}."
            raise SpecError(msg)
        groups: dict[str, dict[str, Any]] = {"weights": {}}
        for name, tensor in tensors.items():
            slot, _, key = name.partition("/")
            groups.setdefault(slot, {})[key] = tensor
        try:
            about = json.loads(metadata["about"])
            weights = {key: groups["weights"][key] for key in about["weights"]}
            del groups["weights"]
            return cls(weights, groups, int(about["iterations"]), about["once"], str(about["optimizer"]))
        except (KeyError, TypeError, ValueError) as error:
            msg = (
                f"Expected a whole state of training in {Path(path).name!r}: {type(error).__name__}: {error}."
            )
            raise SpecError(msg) from None


def _contiguous(tensors: Arrays) -> dict[str, Any]:
    import numpy as np

    return {key: np.ascontiguousarray(array) for key, array in tensors.items()}


def _side(trained: Any) -> Any:
    """Return the package that knows what is trained."""
    if type(trained).__module__.partition(".")[0] == "isobatch_torch":
        found = importlib.import_module("isobatch_torch.training")
        if isinstance(trained, found.TrainingTwin):
            return found
    if backend_of(trained).name != "keras" or getattr(trained, "optimizer", None) is None:
        msg = f"Expected a compiled keras.Model or what isobatch.training_twin returned, got {type(trained).__qualname__}."
        raise ModelError(msg)
    return importlib.import_module("isobatch_keras.training")
