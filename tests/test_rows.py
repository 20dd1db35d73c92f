import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch import BatchSizeError, split_sizes
from isobatch.rows import row_stop

counts = st.integers(0, 10_000)
replicas = st.integers(1, 70)


@given(counts, replicas)
def test_balanced_sizes_add_up_and_differ_by_at_most_one_larger_first(batch, n):
    sizes = split_sizes(batch, n)
    assert len(sizes) == n
    assert sum(sizes) == batch
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(counts, replicas)
def test_keras_policy_is_the_floor_and_the_last_takes_the_rest(batch, n):
    assert split_sizes(batch, n, "keras") == (batch // n,) * (n - 1) + (batch - batch // n * (n - 1),)


@given(counts, replicas)
def test_torch_policy_is_torch_chunk(batch, n):
    chunk = -(-batch // n) or 1
    expected = [min(chunk, batch - start) for start in range(0, batch, chunk)]
    assert split_sizes(batch, n, "torch") == (*expected, *[0] * (n - len(expected)))


@pytest.mark.parametrize(
    ("batch", "n", "keras", "torch"),  # the documented splits of the two predecessors
    [
        (7, 2, (3, 4), (4, 3)),
        (5, 4, (1, 1, 1, 2), (2, 2, 1, 0)),
        (9, 8, (1,) * 7 + (2,), (2, 2, 2, 2, 1, 0, 0, 0)),
        (1, 2, (0, 1), (1, 0)),
    ],
)
def test_the_splits_the_predecessors_made(batch, n, keras, torch):
    assert split_sizes(batch, n, "keras") == keras
    assert split_sizes(batch, n, "torch") == torch


@given(counts, st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_weights_are_followed_to_within_a_row_on_each_side(batch, weights):
    sizes = split_sizes(batch, len(weights), weights)
    assert sum(sizes) == batch
    assert min(sizes) >= 0
    for size, weight in zip(sizes, weights, strict=True):
        assert abs(size - batch * weight / sum(weights)) <= 1.0 + batch * 2e-6


def test_simple_weights_are_exact():
    assert split_sizes(3, 2, (2, 1)) == (2, 1)
    assert split_sizes(10, 3, [3, 1, 1]) == (6, 2, 2)
    assert split_sizes(7, 4, (1, 1, 1, 1)) == (2, 2, 1, 2)


@given(counts, replicas, st.integers(1, 9))
def test_min_rows_uses_fewer_replicas(batch, n, least):
    sizes = split_sizes(batch, n, min_rows=least)
    assert sum(sizes) == batch
    used = [size for size in sizes if size]
    assert len(used) <= 1 or min(used) >= least
    assert len(used) == min(n, max(1, batch // least)) or batch == 0
    assert not any(sizes[len(used) :])


@pytest.mark.parametrize("policy", ["balanced", "keras", "torch", (1, 2, 3, 4)])
def test_tensors_and_integers_get_the_same_rows(policy):
    for batch in range(23):
        stops = [row_stop(np.asarray(batch), 4, rank, policy) for rank in range(4)]
        assert np.diff([0, *stops]).tolist() == list(split_sizes(batch, 4, policy))


def test_explicit_sizes_are_checked():
    assert split_sizes(5, 3, sizes=[4, 0, 1]) == (4, 0, 1)
    for wrong in ([4, 1], [4, 0, 2], [6, -1, 0]):
        with pytest.raises(BatchSizeError, match="Expected 3 sizes of 0 or more that add up to 5 rows, got"):
            split_sizes(5, 3, sizes=wrong)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((-1, 2), {}, "rows, 0 or more, got -1"),
        ((True, 2), {}, "rows, 0 or more, got True"),
        ((3, 0), {}, "1 or more replicas, got 0"),
        ((3, 2, "fair"), {}, "got 'fair'"),
        ((3, 2, (1,)), {}, r"2 positive weights, one for each replica, got \(1,\)"),
        ((3, 2, (1, 0)), {}, r"positive weights"),
        ((3, 2, (1, float("inf"))), {}, r"positive weights"),
        ((3, 2, "torch"), {"min_rows": 2}, "min_rows"),
        ((3, 2), {"min_rows": 0}, "min_rows"),
    ],
)
def test_wrong_requests_say_what_was_expected(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        split_sizes(*arguments, **options)
