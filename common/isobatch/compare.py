"""Compare two nests of numpy arrays and say, in this order, whether structure, shape, type and values agree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from isobatch.trees import flatten, path_text

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far two results are apart, and whether that is allowed.

    Args:
        passed: Nothing differs by more than is allowed.
        allowed: The greatest `scaled` that passes.
        fault: What failed first: `"structure"`, `"shape"`, `"dtype"`, `"nan"` or `"values"`; empty when it passed.
        path: The leaf that is worst, or where the first fault is.
        index: Where in that leaf the greatest difference is.
        absolute: The greatest absolute difference.
        scaled: The greatest difference divided by the greatest absolute expected value of its leaf.
        differing: How many elements differ by more than is allowed.
        total: How many elements were compared.
        detail: Both values at the place of the fault, or both structures.
    """

    passed: bool
    allowed: float
    fault: str = ""
    path: str = ""
    index: tuple[int, ...] = ()
    absolute: float = 0.0
    scaled: float = 0.0
    differing: int = 0
    total: int = 0
    detail: str = ""

    def __str__(self) -> str:
        if self.passed:
            return f"agree: greatest scaled difference {self.scaled:.1e} of {self.allowed:.1e} allowed, {self.total} elements"
        if self.fault != "values":
            return f"{self.fault} differs at {self.path}: {self.detail}"
        return (
            f"{self.differing} of {self.total} elements differ; greatest at {self.path}{list(self.index)}: {self.detail}; "
            f"absolute {self.absolute:.3e}, scaled {self.scaled:.3e} of {self.allowed:.1e} allowed"
        )


def compare(actual: Any, expected: Any, allowed: float) -> Comparison:
    """Compare two nests of arrays; structure first, then shape, type, NaN and values.

    A difference is scaled by the greatest absolute value in its expected leaf, so that one number fits a whole tensor: elements
    near zero that are sums of large terms carry the rounding error of those terms. NaN equals NaN in the same place only, and
    an infinity itself only.

    Args:
        actual: Arrays in any containers.
        expected: The same, taken as right.
        allowed: The greatest scaled difference that passes, 0 or more.

    Returns:
        The verdict, about the worst leaf.

    >>> import numpy as np
    >>> compare([np.array([1.0, 2.0])], [np.array([1.0, 2.5])], allowed=1e-3).scaled
    0.2
    >>> print(compare({"a": np.ones(2)}, {"a": np.ones(3)}, allowed=1e-3))
    shape differs at ['a']: (2,), expected (3,)
    """
    import numpy as np

    ours, spec = flatten(actual)
    theirs, expected_spec = flatten(expected)
    if spec != expected_spec:
        return _fault("structure", "the output", f"{spec}, expected {expected_spec}", allowed)
    worst = Comparison(passed=True, allowed=allowed)
    total = differing = 0
    for path, a, b in zip(spec.paths(), ours, theirs, strict=True):
        leaf = _compare_leaf(np.asarray(a), np.asarray(b), path_text(path) or "the output", allowed)
        if leaf.fault not in {"", "values"}:
            return leaf
        total += leaf.total
        differing += leaf.differing
        worst = max(worst, leaf, key=lambda one: one.scaled)
    return replace(worst, total=total, differing=differing)


def _compare_leaf(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], path: str, allowed: float) -> Comparison:
    import numpy as np

    if a.shape != b.shape:
        return _fault("shape", path, f"{a.shape}, expected {b.shape}", allowed)
    if a.dtype != b.dtype:
        return _fault("dtype", path, f"{a.dtype}, expected {b.dtype}", allowed)
    if a.dtype.kind not in "fc":
        a, b = a.astype(np.float64), b.astype(np.float64)
    odd = np.argwhere(~((np.isfinite(a) & np.isfinite(b)) | (a == b) | (np.isnan(a) & np.isnan(b))))
    if len(odd):
        index = tuple(int(i) for i in odd[0])
        return _fault(
            "nan",
            path,
            f"{a[index]!r} at {list(index)}, expected {b[index]!r}; {len(odd)} such elements",
            allowed,
        )
    finite = np.isfinite(b)
    gaps = np.abs(np.where(finite, a, 0) - np.where(finite, b, 0))
    if not gaps.size:
        return Comparison(passed=True, allowed=allowed, path=path)
    scale = float(np.max(np.abs(b), where=finite, initial=0.0)) or 1.0
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(gaps)), gaps.shape))
    passed = float(gaps[index]) <= allowed * scale
    return Comparison(
        passed=passed,
        allowed=allowed,
        fault="" if passed else "values",
        path=path,
        index=index,
        absolute=float(gaps[index]),
        scaled=float(gaps[index]) / scale,
        differing=int(np.count_nonzero(gaps > allowed * scale)),
        total=gaps.size,
        detail=f"{a[index]!r}, expected {b[index]!r}",
    )


def _fault(fault: str, path: str, detail: str, allowed: float) -> Comparison:
    inf = float("inf")
    return Comparison(
        passed=False, allowed=allowed, fault=fault, path=path, absolute=inf, scaled=inf, detail=detail
    )
