"""Batch normalisation over shards: the statistics that all replicas' rows have together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias

import keras

from isobatch.errors import ModelError
from isobatch_keras.arrays import counted

__all__ = ["Norm", "counting", "in_step", "norms_of", "pool"]

Norm: TypeAlias = keras.layers.BatchNormalization
Pool: TypeAlias = Generator[list[Any], Any, tuple[Any, Any]]

_lock = threading.Lock()
_users: dict[Norm, int] = {}  # how many replicas count the calls of a layer just now
_count: ContextVar[Any] = ContextVar("count")


def norms_of(model: keras.Model) -> list[Norm]:
    """Return the batch normalisations of a model whose statistics go by their momentum alone; renormalising ones do not."""
    layers = model._flatten_layers()  # noqa: SLF001 - `layers` leaves out what custom layers hold
    return [
        one
        for one in layers
        if isinstance(one, keras.layers.BatchNormalization) and not getattr(one, "renorm", False)
    ]


@contextmanager
def counting(norms: Iterable[Norm], count: Callable[[Norm, Any], None]) -> Generator[None]:
    """Tell of each call of a layer, after it was made.

    Keras has no hook for it, so the layers' `call` is replaced while a replica runs.

    Args:
        norms: The layers.
        count: Called with a layer and a function that returns how many positions of its input were not masked, `(C,)`, or `None` if
            there was no mask.
    """
    layers = list(norms)
    token = _count.set(count)
    with _lock:
        for layer in layers:
            _users[layer] = _users.get(layer, 0) + 1
            if _users[layer] == 1:
                layer.__dict__["call"] = partial(_call, layer, layer.__dict__.get("call"))
    try:
        yield
    finally:
        with _lock:
            for layer in layers:
                _users[layer] -= 1
                if not _users[layer]:
                    _restore(layer)
        _count.reset(token)


def _restore(layer: Norm) -> None:
    del _users[layer]
    _, own = layer.__dict__.pop("call").args
    if own is not None:  # an instance's own `call`, which somebody gave it
        layer.__dict__["call"] = own


def _call(layer: Norm, own: Callable[..., Any] | None, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = (own or partial(type(layer).call, layer))(inputs, *args, **kwargs)
    count = _count.get(None)
    if count is not None:
        count(layer, partial(_positions, layer, inputs, kwargs.get("mask")))
    return outputs


def _positions(layer: Norm, inputs: Any, mask: Any) -> Any:
    if mask is None:
        return None
    seen = keras.ops.broadcast_to(keras.ops.expand_dims(mask, -1), keras.ops.shape(inputs))
    rank = len(inputs.shape)
    return keras.ops.sum(
        keras.ops.cast(seen, "int32"), axis=[axis for axis in range(rank) if axis != layer.axis % rank]
    )


def pool(
    layer: Norm,
    calls: Sequence[Sequence[tuple[Any, Any, Any]]],
    sizes: Sequence[Any],
) -> Pool:
    """Return the running mean and variance after the calls of all replicas, as if their rows had been one batch.

    Keras divides sums over `n` positions by `n`, and under a mask by `n` and a small constant. With a replica's mean `m`, its
    variance `v` and `w = n + constant`, the sums over its positions are `m w`, and `v w + n (m - M)^2 + 2 constant m (m - M)` for the
    squared distances from the mean `M` of all.

    Args:
        layer: The layer.
        calls: For each replica, for each call: the positions that were not masked (`None` for no mask), and the running mean and
            variance it left, `(C,)`.
        sizes: Rows of each replica.

    Yields:
        Sums over the replicas; it wants to be sent sums over all there are, those of other processes too.

    Raises:
        ModelError: The replicas called the layer differently often.
    """
    if len({len(made) for made in calls}) != 1:
        msg = (
            f"Expected every replica to call {layer.name!r} as often, got {[len(made) for made in calls]} calls. "
            "Use state='first' or 'sequential' for a model whose calls depend on the rows."
        )
        raise ModelError(msg)
    keep = layer.momentum
    mean, variance = layer.moving_mean.value, layer.moving_variance.value
    before = [(mean, variance)] * len(calls)
    for made in zip(*calls, strict=True) if keep != 1 else ():
        masked = made[0][0] is not None
        constant = keras.config.epsilon() if masked else 0.0
        counts = [
            keras.ops.cast(counted(count if masked else size, size), mean.dtype)
            for (count, _, _), size in zip(made, sizes, strict=True)
        ]
        # An update is `keep * before + (1 - keep) * statistic`, so the statistic times `1 - keep` can be read off it.
        shares = [
            (new_mean - keep * old_mean, new_variance - keep * old_variance)
            for (_, new_mean, new_variance), (old_mean, old_variance) in zip(made, before, strict=True)
        ]
        total, centre = yield [
            _sum(counts),
            _sum(
                counted(m * (n + constant), size)
                for (m, _), n, size in zip(shares, counts, sizes, strict=True)
            ),
        ]
        total = total + constant
        centre = centre / total
        (spread,) = yield [
            _sum(
                counted(
                    v * (n + constant)
                    + (n * keras.ops.square(m - centre) + 2 * constant * m * (m - centre)) / (1 - keep),
                    size,
                )
                for (m, v), n, size in zip(shares, counts, sizes, strict=True)
            )
        ]
        spread = spread / total
        mean, variance = keep * mean + centre, keep * variance + spread
        before = [(new_mean, new_variance) for _, new_mean, new_variance in made]
    return mean, variance


def in_step(
    pools: Sequence[Pool], add_up: Callable[[Sequence[Any]], Sequence[Any]] | None
) -> list[tuple[Any, Any]]:
    """Run pools side by side, so that what they want to have added up goes in one message.

    Args:
        pools: Of several layers.
        add_up: Returns sums over all processes; `None` where there are no others.

    Returns:
        The running mean and variance of each.
    """
    results: list[Any] = [None] * len(pools)
    answers: dict[int, Any] = dict.fromkeys(range(len(pools)))
    while answers:
        wanted: dict[int, list[Any]] = {}
        for i, answer in answers.items():
            try:
                wanted[i] = pools[i].send(answer)
            except StopIteration as end:
                results[i] = end.value
        sums = iter(
            [x for some in wanted.values() for x in some]
            if add_up is None or not wanted
            else add_up([x for some in wanted.values() for x in some])
        )
        answers = {i: [next(sums) for _ in some] for i, some in wanted.items()}
    return results


def _sum(values: Iterable[Any]) -> Any:
    first, *rest = values
    return sum(rest, first)
