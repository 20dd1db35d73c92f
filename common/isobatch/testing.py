"""For tests of one's own: assert that a torch module is the same network as a Keras model, and trains as it does."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from isobatch.operations import find_operation
from isobatch.parallel import over_cpus
from isobatch.trajectory import FLOOR, Trajectory, follow
from isobatch.twins import training_twin
from isobatch.verdict import Verdict, judge

__all__ = ["assert_parity", "assert_training_parity"]


def assert_parity(
    keras_model: Any,
    torch_module: Any,
    batch: Any,
    *,
    replicas: Sequence[int] = (1, 2),
    layout: str = "channels_last",
    factory: Callable[[], Any] | None = None,
) -> Verdict:
    """Raise unless a torch module is the same network as a Keras model, alone and over replicas.

    Args:
        keras_model: A functional or sequential `keras.Model`.
        torch_module: Its twin, or any other module.
        batch: Numpy arrays `(B, ...)` as the Keras model is given them.
        replicas: Numbers of replicas over which both are run too, in float64; `()` for none.
        layout: `"channels_first"` if a module that is no twin takes and gives channels first.
        factory: Builds the Keras model, for one that cannot be rebuilt from its configuration.

    Returns:
        The verdict, a PASS.

    Raises:
        AssertionError: They differ, or no verdict can be given; the message has the worst layer first.

    >>> import isobatch, keras, numpy as np
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    >>> assert_parity(model, isobatch.twin(model), np.ones((5, 4))).word
    'PASS'
    """
    __tracebackhide__ = True
    verdict = judge(keras_model, torch_module, batch, factory=factory, layout=layout, replicas=replicas)
    if not verdict.passed:
        raise AssertionError(str(verdict))
    return verdict


def assert_training_parity(
    keras_model: Any,
    batches: Iterable[tuple[Any, ...]],
    *,
    training: Any = None,
    replicas: int | None = None,
    dropout_seed: int | None = None,
    allowed: float | None = None,
) -> Trajectory:
    """Raise unless torch trains a compiled Keras model's twin through the same losses, gradients and weights.

    Both are trained: the Keras model and the twin are further on afterwards.

    Args:
        keras_model: Compiled, in float64; in the state from which both go on.
        batches: Tuples `(inputs, targets)` or `(inputs, targets, sample_weight)` of numpy arrays, each for one step.
        training: From `isobatch.training_twin`, perhaps changed; a new one if it is `None`.
        replicas: Over how many replicas both are run; `None` for the models by themselves.
        dropout_seed: Lets dropout layers keep the same units on both sides, by this seed.
        allowed: The greatest scaled gap that passes; by default 1e-9, or ten times the floor of the network's coarsest operation, of
            those that Keras computes with float32 constants.

    Returns:
        The verdict, a PASS.

    Raises:
        AssertionError: They part; the message has the first step, and the tensor that is farthest off there.
        ModelError: The model is not compiled.
        SpecError: The model, or what it is trained with, has no words; or layers other than dropout draw random numbers.

    >>> import keras, numpy as np
    >>> model = keras.Sequential([keras.Input((4,), dtype="float64"), keras.layers.Dense(1, dtype="float64")])
    >>> model.compile("sgd", "mse")
    >>> assert_training_parity(model, [(np.ones((5, 4)), np.ones((5, 1)))] * 3).passed
    True
    """
    __tracebackhide__ = True
    training = training_twin(keras_model) if training is None else training
    training.module = over_cpus(training.module, replicas)
    parallel = keras_model
    if replicas is not None:
        parallel = over_cpus(keras_model, replicas)
        importlib.import_module("isobatch_keras.mirror").adopt_compilation(parallel, keras_model)
    nodes = training.network.description.spec.nodes
    floor = max(find_operation(node.operation).floor for node in nodes)
    sides = [importlib.import_module(f"isobatch_{name}.training") for name in ("torch", "keras")]
    try:
        found = follow(
            sides[0].TorchSide(training),
            sides[1].KerasSide(parallel),
            batches,
            allowed=max(FLOOR, 10 * floor) if allowed is None else allowed,
            dropout_seed=dropout_seed,
        )
    finally:
        training.module = training.network
    if not found.passed:
        raise AssertionError(str(found))
    return found
