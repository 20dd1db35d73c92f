"""What processes tell each other from inside a TensorFlow graph, and how a dataset is made as long as the others'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from isobatch.clusters import Collective

__all__ = ["add_up", "weighted", "with_empty_steps"]


def add_up(collective: Collective, tensors: Sequence[Any]) -> list[Any]:
    """Return the sums over all processes of tensors of float; one message for each type of number.

    TensorFlow runs what has an effect outside of a graph in the order in which it was written, so in the same one in every process.

    Args:
        collective: Reaches the other processes.
        tensors: Of known shapes, the same in every process. Gradients of rows of a table stay that: those of all processes, one after
            another. Optimizers treat rows that no batch has touched, or several have, in their own way.
    """
    dense = iter(
        _sums(collective, [tf.convert_to_tensor(x) for x in tensors if not isinstance(x, tf.IndexedSlices)])
    )
    return [_rows(collective, x) if isinstance(x, tf.IndexedSlices) else next(dense) for x in tensors]


def weighted(gradient: Any, weight: Any) -> Any:
    """Return a gradient times a weight; nothing of it for a weight of 0, were it NaN.

    Args:
        gradient: A tensor, or rows of one.
        weight: 0-d.
    """
    if isinstance(gradient, tf.IndexedSlices):
        rows = tf.where(weight > 0, tf.shape(gradient.indices)[0], 0)
        values = gradient.values[:rows] * tf.cast(weight, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices[:rows], gradient.dense_shape)
    return tf.where(weight > 0, gradient * tf.cast(weight, gradient.dtype), tf.zeros_like(gradient))


def _sums(collective: Collective, tensors: Sequence[Any]) -> list[Any]:
    sums: list[Any] = [None] * len(tensors)
    for kind in dict.fromkeys(tensor.dtype for tensor in tensors):
        which = [i for i, tensor in enumerate(tensors) if tensor.dtype == kind]
        sent = tf.float32 if kind == tf.bfloat16 else kind  # numpy has no such numbers
        flat = tf.concat([tf.reshape(tf.cast(tensors[i], sent), [-1]) for i in which], 0)
        total = tf.cast(tf.numpy_function(collective.sum, [flat], sent), kind)
        parts = tf.split(total, [int(np.prod(tensors[i].shape)) for i in which])
        for i, part in zip(which, parts, strict=True):
            sums[i] = tf.reshape(part, tensors[i].shape)
    return sums


def _rows(collective: Collective, own: Any) -> Any:
    kind = own.values.dtype
    sent = tf.float32 if kind == tf.bfloat16 else kind
    indices = tf.numpy_function(collective.concatenate, [own.indices], own.indices.dtype)
    values = tf.numpy_function(collective.concatenate, [tf.cast(own.values, sent)], sent)
    indices.set_shape([None])
    values.set_shape([None, *own.values.shape[1:]])
    return tf.IndexedSlices(tf.cast(values, kind), indices, own.dense_shape)


def with_empty_steps(dataset: Any, steps: int, own: int) -> Any:
    """Return a dataset of `own` batches with empty ones after them, `steps` in all."""
    empty = dataset.take(1).map(_emptied)
    return dataset.concatenate(empty.repeat(steps - own)).apply(
        tf.data.experimental.assert_cardinality(steps)
    )


def _emptied(*batch: Any) -> Any:
    rest: Any = tf.nest.map_structure(lambda x: x[:0], batch)
    return rest if len(batch) > 1 else rest[0]
