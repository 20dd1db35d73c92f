"""What only TensorFlow can do: logical devices, and placing a function together with its gradient."""

# pyright: reportUntypedFunctionDecorator=false
from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

__all__ = [
    "check_equal",
    "logical_counts",
    "make_logical_cpus",
    "move",
    "padded",
    "placed",
    "taped",
    "updating_in_place",
]


def logical_counts() -> dict[str, int]:
    """Return how many logical devices of each kind there are or will be; starts nothing and takes no memory."""
    counts: dict[str, int] = {}
    for physical in tf.config.get_visible_devices():
        kind = physical.device_type.lower()
        counts[kind] = counts.get(kind, 0) + len(
            tf.config.get_logical_device_configuration(physical) or (None,)
        )
    return counts


def make_logical_cpus(count: int) -> None:
    """Split the CPU into logical devices.

    Args:
        count: How many.

    Raises:
        RuntimeError: TensorFlow has started.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)


def placed(
    function: Callable[..., Sequence[Any]], arrays: Sequence[Any], device: str, name: str, live: Any
) -> list[Any]:
    """Run a function of tensors on a device, and its gradient too.

    TensorFlow leaves the operations of a gradient unplaced, so that all backward work would land on the first
    accelerator. Here the gradient is taken by a tape of its own, under the same device.

    Args:
        function: From tensors to tensors; it may read variables.
        arrays: What it is called with.
        device: Where, as TensorFlow spells it.
        name: Scope of the operations' names.
        live: A 0-d boolean tensor: gradients are zero where it does not hold, even if they were NaN; `None` for always.

    Returns:
        What the function returned.
    """

    @tf.custom_gradient
    def run(*inputs: Any) -> Any:
        with tf.device(device), tf.name_scope(name), tf.GradientTape(persistent=True) as tape:
            watched = [x for x in inputs if _differentiable(x)]
            tape.watch(watched)
            outputs = list(function(*inputs))

        def gradient(*upstream: Any, variables: Sequence[Any] = ()) -> Any:
            with tf.device(device), tf.name_scope(f"{name}_gradient"):
                pairs = [
                    (y, dy)
                    for y, dy in zip(outputs, upstream, strict=True)
                    if _differentiable(y) and dy is not None
                ]
                sources = [*watched, *variables]
                found = (
                    tape.gradient([y for y, _ in pairs], sources, [dy for _, dy in pairs])
                    if pairs
                    else [None] * len(sources)
                )
                found = [_select(live, g) for g in found]
            rest = iter(found[: len(watched)])
            wanted = [next(rest) if _differentiable(x) else None for x in inputs]
            return (wanted, found[len(watched) :]) if variables else wanted

        return outputs, gradient

    with tf.device(
        device
    ):  # where the identities go that TensorFlow puts around a function with a gradient of its own
        return list(run(*arrays))


def taped(function: Callable[[], Any], variables: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return what a function returns, and the gradients of the last of it, eagerly.

    Args:
        function: Returns tensors.
        variables: Of Keras.
    """
    with tf.GradientTape() as tape:
        found = function()
    return found, tape.gradient(found[-1], variables)


def move(variable: Any, device: str) -> bool:
    """Let a variable of Keras lie on a device, with the value it has; say whether it lay elsewhere.

    Args:
        variable: Its TensorFlow variable is replaced; functions that were traced with the old one go on to use that.
        device: Where to, as TensorFlow spells it.
    """
    full = f"/device:{device.upper()}"
    if variable.value.device.endswith(full):
        return False
    with tf.init_scope(), tf.device(device):
        variable._initialize(tf.identity(variable.value))  # noqa: SLF001 - there is no public way
    return True


@contextmanager
def updating_in_place(optimizer: Any) -> Generator[None]:
    """Let an optimizer compute each weight's update where its gradient is, while a graph is built.

    Operations that nobody placed run where the first of their inputs is that somebody placed; in TensorFlow they would run on the
    first device, so that all gradients would travel there and all updates back. Keras 3.15 also passes all gradients through
    one operation, meant for several replicas, which can only be in one place; here it is left out.

    Args:
        optimizer: A Keras optimizer, or a loss-scaling one around another.
    """
    if tf.executing_eagerly():
        yield
        return
    optimizers = [one for one in (optimizer, getattr(optimizer, "inner_optimizer", None)) if one is not None]
    for one in optimizers:
        one.__dict__["_all_reduce_sum_gradients"] = list
    try:
        with tf.compat.v1.device(_device_of_inputs):
            yield
    finally:
        for one in optimizers:
            del one.__dict__["_all_reduce_sum_gradients"]


def _device_of_inputs(operation: Any) -> str:
    return operation.device or next((x.op.device for x in operation.inputs if x.op.device), "")


def padded(tensor: Any, rows: Any, axis: int) -> Any:
    """Append rows of zeros; for `rows` of 0 TensorFlow copies nothing.

    Args:
        tensor: Any tensor, of strings too.
        rows: How many, a 0-d tensor.
        axis: The axis to make longer.
    """
    paddings = [[0, rows if i == axis else 0] for i in range(tensor.shape.rank)]
    return tf.pad(tensor, tf.stack([tf.stack([tf.cast(n, tf.int64) for n in pair]) for pair in paddings]))


def check_equal(a: Any, b: Any, message: str) -> None:
    """Let the step fail when two tensors of a traced graph differ.

    Args:
        a: A tensor.
        b: Another.
        message: What to say then.
    """
    tf.debugging.assert_equal(a, b, message=message)


def _differentiable(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _select(live: Any, gradient: Any) -> Any:
    if live is None or gradient is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_select(live, gradient.values), gradient.indices, gradient.dense_shape)
    return tf.where(live, gradient, tf.zeros_like(gradient))
