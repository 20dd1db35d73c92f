import numpy as np
import pytest

from isobatch.compare import compare

X = np.array([[1.0, 2.0], [3.0, -4.0]])


def test_equal_nests_agree():
    verdict = compare(
        {"a": [X, X.astype(np.float32)], "n": np.arange(3)},
        {"a": [X, X.astype(np.float32)], "n": np.arange(3)},
        0.0,
    )
    assert verdict.passed
    assert (verdict.scaled, verdict.differing, verdict.total) == (0.0, 0, 11)
    assert str(verdict) == "agree: greatest scaled difference 0.0e+00 of 0.0e+00 allowed, 11 elements"


def test_the_worst_leaf_index_and_counts_are_named():
    other = X.copy()
    other[1, 0] += 0.5
    other[0, 1] += 0.25
    verdict = compare({"a": X, "b": other}, {"a": X, "b": X}, allowed=1e-6)
    assert not verdict.passed
    assert (verdict.fault, verdict.path, verdict.index) == ("values", "['b']", (1, 0))
    assert (verdict.absolute, verdict.scaled, verdict.differing, verdict.total) == (0.5, 0.125, 2, 8)
    assert (
        "2 of 8 elements differ; greatest at ['b'][1, 0]: np.float64(3.5), expected np.float64(3.0)"
        in str(verdict)
    )


def test_the_allowed_gap_itself_passes():
    assert compare(np.array([1.25]), np.array([1.0]), allowed=0.25).passed
    assert not compare(np.array([1.25]), np.array([1.0]), allowed=0.2499).passed


@pytest.mark.parametrize(
    ("actual", "expected", "fault", "text"),
    [
        ({"a": X}, {"b": X}, "structure", "structure differs"),
        ([X], (X,), "structure", "structure differs"),
        ([X, X[:1]], [X, X], "shape", r"shape differs at [1]: (1, 2), expected (2, 2)"),
        (X.astype(np.float32), X, "dtype", "dtype differs at the output: float32, expected float64"),
        (
            np.array([1, np.nan]),
            np.array([1, 2.0]),
            "nan",
            "nan differs at the output: np.float64(nan) at [1], expected np.float64(2.0)",
        ),
        (np.array([1, np.inf]), np.array([1, -np.inf]), "nan", "1 such elements"),
        (np.array([1, 2.0]), np.array([1, np.inf]), "nan", "expected np.float64(inf)"),
    ],
)
def test_structure_then_shape_then_type_then_values(actual, expected, fault, text):
    verdict = compare(actual, expected, allowed=1e9)
    assert not verdict.passed
    assert verdict.fault == fault
    assert text in str(verdict)


def test_nan_and_infinity_equal_themselves_in_the_same_place():
    x = np.array([np.nan, np.inf, -np.inf, 1.0])
    assert compare(x, x.copy(), 0.0).passed


def test_empty_arrays_and_nests_agree():
    assert compare(np.zeros((0, 3)), np.zeros((0, 3)), 0.0).passed
    assert compare([], [], 0.0).passed
    assert not compare(np.zeros((0, 3)), np.zeros((0, 4)), 0.0).passed


def test_all_zero_expectations_are_compared_absolutely():
    assert compare(np.array([1e-9]), np.array([0.0]), 1e-8).passed
    assert not compare(np.array([1e-7]), np.array([0.0]), 1e-8).passed


def test_integers_and_booleans_are_compared():
    assert not compare(np.array([True]), np.array([False]), 0.5).passed
    assert compare(np.array([2**40]), np.array([2**40]), 0.0).passed
    assert not compare(np.array([0], np.uint8), np.array([1], np.uint8), 0.5).passed
