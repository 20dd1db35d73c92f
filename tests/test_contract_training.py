"""The contract in training: the same tests for both frameworks."""

import numpy as np
import pytest
from kits import FLOAT64_GAP, numbers, weights

from isobatch import split_sizes
from isobatch.compare import compare


def assert_same(actual, expected):
    verdict = compare(actual, expected, FLOAT64_GAP)
    assert verdict.passed, str(verdict)


def without_noise(gradients):
    """Leave out the bias before the BatchNorm: its gradient is zero but for rounding."""
    return {name: gradient for name, gradient in gradients.items() if name != "hidden.bias"}


def shards_of(x, replicas):
    return [part for part in np.split(x, np.cumsum(split_sizes(len(x), replicas))[:-1]) if len(part)]


# Lines 6 and 10: gradients.


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_line_6_gradients_are_those_of_one_device(backend, replicas):
    model = backend.mlp()
    parallel = backend.parallel(model, replicas)
    for batch in range(1, 3 * replicas + 1):
        x = numbers(batch, 4)
        expected = backend.gradients(model, x)
        assert set(expected) == {"hidden.kernel", "hidden.bias", "out.kernel", "out.bias"}
        assert_same(backend.gradients(parallel, x), expected)


@pytest.mark.parametrize("replicas", [2, 3])
def test_line_7_with_batchnorm_gradients_are_those_of_the_shards(backend, replicas):
    x = numbers(3 * replicas + 1, 4)
    parts = [backend.gradients(backend.mlp(norm=True), part) for part in shards_of(x, replicas)]
    expected = {name: sum(part[name] for part in parts) for name in parts[0]}
    found = backend.gradients(backend.parallel(backend.mlp(norm=True), replicas), x)
    assert_same(without_noise(found), without_noise(expected))


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_line_10_equal_runs_are_bitwise_equal_whatever_ran_before(backend, replicas):
    x = numbers(11, 4)
    parallel = backend.parallel(backend.mlp(), replicas)
    first = backend.gradients(parallel, x)
    for between in (1, 2, 4, 9):
        backend.gradients(parallel, numbers(between, 4))
        again = backend.gradients(parallel, x)
        assert all(np.array_equal(first[name], again[name]) for name in first)


def test_both_frameworks_give_the_same_gradients_and_state(both):
    keras, torch = both
    x = numbers(8, 4)
    ours, theirs = keras.parallel(keras.mlp(norm=True), 3), torch.parallel(torch.mlp(norm=True), 3)
    assert_same(without_noise(torch.gradients(theirs, x)), without_noise(keras.gradients(ours, x)))
    assert_same(torch.state(theirs)[0], keras.state(ours)[0])


# Line 7: running state.


def statistics(backend, rows):
    """Mean and variance of what reaches the BatchNorm, in the framework's own form."""
    kernel, bias = weights()["hidden"]
    hidden = rows @ kernel + bias
    return hidden.mean(0), hidden.var(0, ddof=1 if backend.name == "torch" else 0)


def moved(old, new):
    return [0.9 * before + 0.1 * after for before, after in zip(old, new, strict=True)]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_line_7_merge_pools_all_rows(backend, replicas):
    x = numbers(4 * replicas + 1, 4)
    model = backend.mlp(norm=True)
    expected = moved(backend.state(model), statistics(backend, x))
    backend.gradients(backend.parallel(model, replicas), x)
    assert_same(list(backend.state(model)), expected)


def test_line_7_first_keeps_what_rank_0_saw(backend):
    x = numbers(9, 4)
    model = backend.mlp(norm=True)
    expected = moved(backend.state(model), statistics(backend, shards_of(x, 3)[0]))
    backend.gradients(backend.parallel(model, 3, state="first"), x)
    assert_same(list(backend.state(model)), expected)


def test_line_7_sequential_updates_replica_after_replica(backend):
    x = numbers(9, 4)
    model = backend.mlp(norm=True)
    expected = backend.state(model)
    for part in shards_of(x, 3):
        expected = moved(expected, statistics(backend, part))
    backend.gradients(backend.parallel(model, 3, state="sequential"), x)
    assert_same(list(backend.state(model)), list(expected))


def test_line_7_inference_updates_nothing(backend):
    model = backend.mlp(norm=True)
    before = backend.state(model)
    backend.call(backend.parallel(model, 3), numbers(9, 4))
    assert all(np.array_equal(a, b) for a, b in zip(before, backend.state(model), strict=True))


# Line 8: randomness.


def test_line_8_dropout_is_reproducible_and_differs_between_replicas(backend):
    x = np.ones((8, 64))
    first, again, other = (backend.dropout(seed, 4, x) for seed in (7, 7, 8))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    masks = [part.tobytes() for part in np.split(first, 4)]
    assert len(set(masks)) == 4


def test_line_8_one_replica_draws_what_the_template_draws(backend):
    x = np.ones((8, 64))
    assert np.array_equal(backend.dropout(7, 1, x), backend.dropout(7, None, x))
