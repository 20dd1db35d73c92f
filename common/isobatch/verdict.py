"""Whether a torch module is the same network as a Keras model: both in float64, layer by layer.

Each layer of the torch side is given what the Keras side gave to its own, so a wrong layer does not hide behind those before it, and
each gap is held against the floor of its operations. The whole network is run too, which shows a layer that is right but wired wrong:
its outputs may differ by what the layers' own gaps, measured, come to at the end, and by one floor of a clean operation.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from isobatch.compare import Comparison, compare
from isobatch.errors import DataError, SpecError
from isobatch.operations import FLOOR, find_operation
from isobatch.parallel import device_parallel, over_cpus
from isobatch.registry import get_backend
from isobatch.rows import split_sizes
from isobatch.spec import Spec, references
from isobatch.trees import flatten

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Closeness", "LayerCheck", "ParallelCheck", "Verdict", "judge"]

DECADES = (-18, 1)
"""Powers of ten that histograms of differences cover."""

WHOLE = 1000.0
"""What the gaps of single layers may grow to between two batchings of one network, and where no growth can be measured."""

GROWTH = 2.0
"""By how much the growth of gaps may exceed what was measured: the measured rounding is random, and so is the real one."""

BY_HAND = 10.0
"""How much farther from Keras a module may be that someone wrote by hand than our own twin: it sums in another order."""

FLOAT32 = 1e-5
"""The floor of a layer that the Keras side can only run in float32, a hundred units of its rounding."""

Word = Literal["PASS", "FAIL", "INCONCLUSIVE"]


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """One layer.

    Args:
        layer: Its path.
        operations: What it consists of.
        check: Its output against the Keras side's; what is allowed is the floor of its operations.
        training: What is compared are a BatchNorm's running statistics after one step of training on the same input.
    """

    layer: str
    operations: tuple[str, ...]
    check: Comparison
    training: bool = False

    def __str__(self) -> str:
        when = ", after one step of training" if self.training else ""
        return f"{self.layer} ({', '.join(self.operations)}{when}): {self.check}"


@dataclass(frozen=True, slots=True)
class Closeness:
    """How close both sides are in the user's own precision; stated, not judged.

    Args:
        precision: The type.
        gap: Between the two sides, scaled.
        keras: Rounding error of the Keras side: its own run against its float64 run, scaled.
        torch: Rounding error of the torch side, likewise.
        histograms: How many elements of the outputs differ by how much: counts for each power of ten of the scaled difference, from
            `DECADES[0]` on, by what is compared (`"gap"`, `"keras"`, `"torch"`). Equal elements are not counted.
        milliseconds: Time of one call by `"keras"` and `"torch"`, the first one not counted.
    """

    precision: str
    gap: float
    keras: float
    torch: float
    histograms: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    milliseconds: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def ratio(self) -> float:
        """The gap as a multiple of the greater rounding error; a small one is rounding."""
        return self.gap / (max(self.keras, self.torch) or 1.0)

    def __str__(self) -> str:
        return (
            f"{self.precision}: gap {self.gap:.1e}, {self.ratio:.1f} times the rounding error "
            f"(Keras {self.keras:.1e}, torch {self.torch:.1e})"
        )


@dataclass(frozen=True, slots=True)
class ParallelCheck:
    """Both sides over so many replicas, or with their parts on several devices, in float64.

    Args:
        replicas: Number of replicas; 1 where parts are placed.
        sizes: Rows that each got.
        checks: Keras parallel against single, torch parallel against single, and torch parallel against Keras parallel, by
            `keras`, `torch` and `keras-torch`.
        placement: The parts and their devices, if they are placed.
    """

    replicas: int
    sizes: tuple[int, ...]
    checks: Mapping[str, Comparison]
    placement: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How both sides were run, in words."""
        if self.placement:
            return f"parts on {', '.join(dict.fromkeys(self.placement.values()))}"
        return f"{self.replicas} replicas, rows {' '.join(map(str, self.sizes))}"

    @property
    def passed(self) -> bool:
        """Whether all of them agree."""
        return all(check.passed for check in self.checks.values())


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer.

    Args:
        word: `"PASS"`, `"FAIL"` or `"INCONCLUSIVE"`.
        layers: One for each layer, in order; empty when the torch module is no twin of ours, or nothing could be run.
        whole: The network's outputs.
        reason: Why there is no answer.
        closeness: In the user's own precision.
        parallel: Over several replicas.
    """

    word: Word
    layers: tuple[LayerCheck, ...] = ()
    whole: Comparison | None = None
    reason: str = ""
    closeness: Closeness | None = None
    parallel: tuple[ParallelCheck, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether the networks are the same."""
        return self.word == "PASS"

    @property
    def wrong(self) -> tuple[LayerCheck, ...]:
        """Every layer that differs, the farthest above its floor first."""
        found = [layer for layer in self.layers if not layer.check.passed]
        return tuple(sorted(found, key=lambda one: one.check.scaled / one.check.allowed, reverse=True))

    def __str__(self) -> str:
        lines = [self._headline()]
        lines += [f"  {layer}" for layer in self.wrong]
        if self.whole is not None:
            lines.append(f"  whole network: {self.whole}")
        if self.closeness is not None:
            lines.append(f"  {self.closeness}")
        for one in self.parallel:
            for name, check in one.checks.items():
                lines.append(f"  {one.label}, {name}: {check}")
        return "\n".join(lines)

    def _headline(self) -> str:
        if self.word == "INCONCLUSIVE":
            return f"INCONCLUSIVE: {self.reason}"
        if self.word == "PASS":
            return (
                f"PASS: {len(self.layers)} layers agree in float64"
                if self.layers
                else "PASS: the outputs agree in float64"
            )
        wrong = len(self.wrong)
        return f"FAIL: {wrong} of {len(self.layers)} layers differ" if wrong else "FAIL: the outputs differ"

    def as_dict(self) -> dict[str, Any]:
        """Return everything in plain containers, as it goes into JSON."""
        return {**asdict(self), "wrong": [layer.layer for layer in self.wrong]}


def judge(
    keras_model: Any,
    torch_module: Any,
    batch: Any,
    *,
    factory: Callable[[], Any] | None = None,
    layout: str = "channels_last",
    replicas: Sequence[int] = (),
    placement: Mapping[str, Any] | None = None,
    precision: str | None = "float32",
) -> Verdict:
    """Say whether a torch module is the same network as a Keras model.

    Args:
        keras_model: A functional or sequential `keras.Model`.
        torch_module: From `isobatch.twin` or `isobatch_torch.from_spec`; or any other module, of which the outputs are compared,
            and those layers that can be told to be Keras's by their shapes and connections.
        batch: Arrays `(B, ...)` as the Keras model is given them.
        factory: Builds the Keras model, for one that cannot be rebuilt from its configuration.
        layout: `"channels_first"` if a module that is no twin takes and gives channels first.
        replicas: Numbers of replicas over which both sides are run as well.
        placement: Parts of both models and their devices, with which both are run as well; see `isobatch.device_parallel`.
        precision: In which closeness is stated; `None` for not at all.

    Returns:
        The verdict.

    Raises:
        DataError: The batch has no rows.

    >>> import keras, isobatch, numpy as np
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.LayerNormalization(name="norm")])
    >>> twin = isobatch.twin(model)
    >>> rows = np.array([[0.0, 1, 2, 3], [3, 1, 4, 1]])
    >>> judge(model, twin, rows).word
    'PASS'
    >>> twin.norm.eps = 1e-5  # torch's own default
    >>> [layer.layer for layer in judge(model, twin, rows).wrong]
    ['norm']
    """
    rows = len(flatten(batch)[0][0])
    if not rows:
        msg = "Expected a batch of at least one row, got none."
        raise DataError(msg)
    keras_side, torch_side = sides = _sides()
    try:
        record = keras_side.record(keras_model, batch, factory)
        in_float64 = keras_side.in_float64(keras_model, factory) if replicas or placement else None
    except keras_side.Refusal as error:
        return Verdict("INCONCLUSIVE", reason=f"{error}. Cure: factory=, a function that builds the model.")
    expected = _outputs(record.spec, record.values)
    floor = max((find_operation(node.operation).floor for node in record.spec.nodes), default=0.0)
    floor = max(floor, FLOAT32 if record.coarse else 0.0)
    is_twin = torch_side.spec_of(torch_module) is not None
    layers, gaps = (_layer_checks if is_twin else _paired_checks)(torch_side, torch_module, record)
    first = layout == "channels_first"
    found = _lists(torch_side.predict(torch_module, batch, channels_first=first))
    allowed = WHOLE * floor
    if is_twin and all(layer.check.passed for layer in layers):
        without = _lists(torch_side.predict(torch_module, batch, wrap=torch_side.without_gaps(gaps)))
        allowed = FLOOR + GROWTH * compare(found, without, allowed).scaled
    elif not is_twin:
        twin = _lists(torch_side.predict(torch_side.from_spec(record.spec), batch))
        allowed = min(allowed, FLOOR + BY_HAND * compare(twin, expected, allowed).scaled)
    whole = compare(found, expected, allowed)
    # Splitting a batch rounds otherwise, but with the same constants: in clean float64 it stays at the clean floor.
    own = WHOLE * (FLOAT32 if record.coarse else FLOOR)
    ways: list[tuple[int, Mapping[str, Any], Callable[[Any], Any]]]
    ways = [(count, {}, partial(over_cpus, replicas=count)) for count in replicas]
    if placement:
        ways.append((1, placement, partial(device_parallel, placement=placement)))
    runs = tuple(
        ParallelCheck(
            count,
            split_sizes(rows, count),
            _parallel_checks(
                sides, (in_float64, torch_module), batch, way, (own, WHOLE * floor), first=first
            ),
            {name: str(device) for name, device in placed.items()},
        )
        for count, placed, way in ways
    )
    passed = whole.passed and all(layer.check.passed for layer in layers) and all(run.passed for run in runs)
    closeness = None
    if precision is not None and whole.fault in {"", "values"}:
        ours, torch_time = _timed(
            lambda: torch_side.predict(torch_module, batch, precision, channels_first=first)
        )
        theirs, keras_time = _timed(lambda: keras_side.predict(keras_model, batch))
        pairs = {"gap": (ours, theirs), "keras": (theirs, expected), "torch": (ours, found)}
        closeness = Closeness(
            precision,
            **{name: _scaled(*pair) for name, pair in pairs.items()},
            histograms={name: _histogram(*pair) for name, pair in pairs.items()},
            milliseconds={"keras": keras_time, "torch": torch_time},
        )
    return Verdict("PASS" if passed else "FAIL", layers, whole, closeness=closeness, parallel=runs)


def _sides() -> tuple[Any, Any]:
    for name in ("torch", "keras"):  # torch must be loaded before TensorFlow
        get_backend(name)
    return importlib.import_module("isobatch_keras.spec"), importlib.import_module("isobatch_torch.spec")


def _layer_checks(torch_side: Any, module: Any, record: Any) -> tuple[tuple[LayerCheck, ...], dict[str, Any]]:
    """Each layer's check, and by reference what its output lacks of Keras's."""
    spec: Spec = torch_side.spec_of(module)
    if not spec.same_network(record.spec):
        msg = "Expected a twin of this Keras model, got one of another network."
        raise SpecError(msg)
    names = dict(zip(record.spec.names(), spec.names(), strict=True))
    values, trained_values = _renamed(record.values, names), _renamed(record.trained, names)
    coarse = _renamed(dict.fromkeys(record.coarse), names)
    operations: dict[str, list[str]] = {}
    for node in spec.nodes:
        operations.setdefault(node.layer or node.name, []).append(node.operation)
    layers = {node.name: node.layer or node.name for node in spec.nodes}
    checks: list[LayerCheck] = []
    gaps: dict[str, Any] = {}

    def report(reference: str, found: Any) -> None:
        trained = reference.removesuffix(torch_side.TRAINED)
        name = trained.partition(":")[0]
        parts = tuple(dict.fromkeys(operations[layers[name]]))
        allowed = FLOAT32 if reference in coarse else max(find_operation(part).floor for part in parts)
        if isinstance(found, Exception):
            check = _failed(name, f"{type(found).__name__}: {found}", allowed)
        elif reference in values:
            check = compare(found, values[reference], allowed)
            if check.passed and found.dtype.kind == "f":
                gaps[reference] = values[reference] - found
        elif trained in trained_values:
            check = compare(found, trained_values[trained], allowed)
        else:
            return
        checks.append(LayerCheck(layers[name], parts, check, trained != reference))

    torch_side.evaluate_layers(module, spec, values, report)
    return tuple(checks), gaps


def _paired_checks(
    torch_side: Any, module: Any, record: Any
) -> tuple[tuple[LayerCheck, ...], dict[str, Any]]:
    """Of a module that is no twin: those layers that can be told to be Keras's, each by itself."""
    nodes = {node.name: node for node in record.spec.nodes}
    checks: list[LayerCheck] = []

    def report(reference: str, path: str, found: Any) -> None:
        node = nodes[reference]
        check = compare(found, record.values[reference], find_operation(node.operation).floor)
        checks.append(LayerCheck(f"{node.layer} = {path}", (node.operation,), check))

    torch_side.evaluate_paired(torch_side.from_spec(record.spec), module, record.values, report)
    return tuple(checks), {}


def _renamed(by_reference: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    parts = {reference: reference.partition(":") for reference in by_reference}
    return {
        f"{names[name]}{colon}{output}": by_reference[one]
        for one, (name, colon, output) in parts.items()
        if name in names
    }


def _failed(path: str, detail: str, allowed: float) -> Comparison:
    inf = float("inf")
    return Comparison(
        passed=False, allowed=allowed, fault="error", path=path, absolute=inf, scaled=inf, detail=detail
    )


def _parallel_checks(
    sides: tuple[Any, Any],
    models: tuple[Any, Any],
    batch: Any,
    way: Callable[[Any], Any],
    allowed: tuple[float, float],
    *,
    first: bool,
) -> dict[str, Comparison]:
    """Run both models as they are and made parallel in some way, and compare."""
    own, between = allowed
    keras_single, keras_split = (
        _lists(sides[0].predict(model, batch)) for model in (models[0], way(models[0]))
    )
    torch_single, torch_split = (
        _lists(sides[1].predict(models[1], batch, channels_first=first, wrap=wrap)) for wrap in (None, way)
    )
    return {
        "keras": compare(keras_split, keras_single, own),
        "torch": compare(torch_split, torch_single, own),
        "keras-torch": compare(torch_split, keras_split, between),
    }


def _outputs(spec: Spec, values: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    def filled(nest: Any) -> Any:
        if isinstance(nest, dict):
            return {key: filled(value) for key, value in nest.items()}
        return [filled(value) for value in nest] if isinstance(nest, list) else values[next(references(nest))]

    return filled(spec.outputs)


def _lists(nest: Any) -> Any:
    """Tuples as lists: frameworks return several outputs in either."""
    if isinstance(nest, dict):
        return {key: _lists(value) for key, value in nest.items()}
    return [_lists(value) for value in nest] if isinstance(nest, list | tuple) else nest


def _scaled(found: Any, expected: Any) -> float:
    import numpy as np

    as_float64 = [np.asarray(one).astype("float64") for one in flatten(found)[0]]
    return compare(
        as_float64, [np.asarray(one).astype("float64") for one in flatten(expected)[0]], 1.0
    ).scaled


def _histogram(found: Any, expected: Any) -> tuple[int, ...]:
    import numpy as np

    total = np.zeros(DECADES[1] - DECADES[0], dtype=int)
    for a, b in zip(flatten(found)[0], flatten(expected)[0], strict=True):
        gaps = np.abs(np.asarray(a, "float64") - np.asarray(b, "float64")) / (
            float(np.max(np.abs(b), initial=0.0)) or 1.0
        )
        powers = np.floor(np.log10(gaps[(gaps > 0) & np.isfinite(gaps)])).clip(DECADES[0], DECADES[1] - 1)
        total += np.bincount(powers.astype(int) - DECADES[0], minlength=len(total))
    return tuple(int(count) for count in total)


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    run()
    began = time.perf_counter()
    result = run()
    return _lists(result), 1000 * (time.perf_counter() - began)
