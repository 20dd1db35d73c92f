"""For tests of one's own: assert that a torch module is the same network as a Keras model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from isobatch.verdict import Verdict, judge

__all__ = ["assert_parity"]


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
