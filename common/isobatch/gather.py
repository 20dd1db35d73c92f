"""Join what the replicas returned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.backend import Options, Result
from isobatch.devices import Device
from isobatch.errors import LeafTypeError, StructureError
from isobatch.trees import Broadcast, Path, Rows, children, flatten, path_text, unflatten

if TYPE_CHECKING:
    import optree

    from isobatch.backend import Backend

__all__ = ["gather"]

_NUMBERS = "A number that differs between replicas has to be a 0-d array, which is reduced by scalars=...."
_COUNTS = "For counts use scalars='sum'."
_LISTS = "It may be one entry a row, or one list for all. Return isobatch.Rows(value) or isobatch.Broadcast(value) to say which."
_MARKS = (
    "Return isobatch.Broadcast(value) for what has no batch axis, isobatch.Rows(value) for rows whose number differs from the "
    "input's, or set output_axis=...."
)
_PADDING = (
    "If another axis is the batch axis of this output, set output_axis=.... If the length of an axis depends on the shard, pad to "
    "one that does not; torch.nn.utils.rnn.pad_packed_sequence takes total_length=... for this."
)


def gather(backend: Backend, results: Sequence[Result], device: Device, options: Options) -> Any:
    """Return one output that looks as if one device had computed it.

    Arrays are joined along the batch axis; 0-d floats are reduced; what is no array must agree and is kept once;
    containers keep their class. A list that holds one entry for each row of its shard is extended. `Rows` and
    `Broadcast` in an output say what it is where that cannot be seen.

    Args:
        backend: Whose arrays these are.
        results: At least one, in rank order.
        device: Where the joined arrays lie.
        options: Batch axis of outputs, and how scalars are reduced.

    Returns:
        The output, without marks.

    Raises:
        StructureError: The replicas' outputs differ in structure, or an array has no row for each row of its shard.
        LeafTypeError: An output is of a kind that cannot be joined, a generator for instance.
    """
    if not results:
        msg = "Expected at least one result to gather, got none."
        raise ValueError(msg)
    if len(results) == 1 and backend.shape(results[0].output):
        return backend.take(results[0].output, None, 0, device)
    sizes = [1 if result.shard.rows is None else len(result.shard.rows) for result in results]
    ranks = [result.shard.rank for result in results]
    return _Join(backend, ranks, sizes, device, options).join((), [result.output for result in results])


@dataclass(frozen=True, slots=True)
class _Join:
    backend: Backend
    ranks: Sequence[int]
    sizes: Sequence[int]  # rows of each replica
    device: Device
    options: Options

    def join(self, path: Path, values: list[Any]) -> Any:
        """Join one place of all outputs."""
        first = values[0]
        for mark, action in ((Broadcast, self.keep), (Rows, self.extend)):
            marked = [value.value for value in values if isinstance(value, mark)]
            if marked and len(marked) < len(values):
                raise self.fault(path, values, f"{mark.__name__}(...) on every replica")
            if marked:
                return action(path, marked)
        shapes = [self.backend.shape(value) for value in values]
        if any(shape is not None for shape in shapes):
            return self.arrays(path, values, shapes)
        if self.is_row_list(path, values):
            return self.extend(path, values)
        levels = [children(value) for value in values]
        if levels[0] is None:
            return self.keep(path, values)
        keys, _, build = levels[0]
        if any(type(value) is not type(first) for value in values) or any(
            not level or level[0] != keys for level in levels
        ):
            raise self.fault(path, values, f"the same {type(first).__name__} on every replica")
        rows = zip(*(level[1] for level in levels if level), strict=True)
        return build([self.join((*path, key), list(row)) for key, row in zip(keys, rows, strict=True)])

    def arrays(self, path: Path, values: list[Any], shapes: list[Any]) -> Any:
        """Join arrays along the batch axis; reduce 0-d ones."""
        types = {str(getattr(value, "dtype", None)) for value in values}
        if None in shapes or len({len(shape) for shape in shapes}) > 1 or len(types) > 1:
            raise self.fault(path, values, "an array of the same type and number of axes on every replica")
        if shapes[0] == ():
            return self.scalar(path, values, types.pop())
        axis, axes = self.axis(path), len(shapes[0])
        if not -axes <= axis < axes:
            raise self.fault(path, values, f"a batch axis {axis}", _MARKS)
        axis %= axes
        if len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) > 1:
            raise self.fault(path, values, f"equal shapes but for the batch axis {axis}", _PADDING)
        if not self.has_rows(values, [shape[axis] for shape in shapes]):
            raise self.fault(path, values, "one row for each row given", _MARKS)
        return self.backend.join(values, axis, self.device)

    def has_rows(self, values: list[Any], lengths: list[int]) -> bool:
        """Say whether arrays of these lengths are rows to be joined.

        A whole multiple of the rows is fine (outputs flattened over rows and time), unless all replicas gave the same array:
        that is a table whose length happens to be a multiple.
        """
        if len(values) == 1 or lengths == list(self.sizes):
            return True
        multiple = lengths[0] // self.sizes[0]
        if multiple < 1 or lengths != [multiple * size for size in self.sizes]:
            return False
        return not all(self.backend.equal(values[0], value) for value in values[1:])

    def scalar(self, path: Path, values: list[Any], dtype: str) -> Any:
        """Reduce 0-d arrays; integers and booleans have no mean, so they must agree."""
        how = self.options.scalars
        if how == "mean" and "float" not in dtype and "complex" not in dtype:
            return self.keep(path, values, _COUNTS)
        if len(values) == 1 and how != "stack":  # not by a weight: it may have had no rows
            return self.place(values[0])
        return self.backend.reduce(values, self.sizes, how, self.device)

    def is_row_list(self, path: Path, values: list[Any]) -> bool:
        """Say whether these lists hold one entry for each row, and cannot be one output each."""
        if len(values) == 1 or any(type(value) is not list for value in values):
            return False
        if [len(value) for value in values] != list(self.sizes):
            return False
        leaves = [self.flatten(value)[0] for value in values]
        arrays = [
            (size, shape)
            for size, row in zip(self.sizes, leaves, strict=True)
            for shape in map(self.backend.shape, row)
            if shape is not None
        ]
        if arrays:
            return any(not shape or shape[0] != size for size, shape in arrays)
        if all(value == values[0] for value in values):
            raise self.fault(path, values, "a list whose meaning is clear", _LISTS)
        return True

    def extend(self, path: Path, values: list[Any]) -> Any:
        """Put together what has one entry for each row."""
        if self.backend.shape(values[0]) is not None:
            return self.backend.join(values, 0, self.device)
        fits = [len(value) for value in values] == list(self.sizes) and len(
            {type(value) for value in values}
        ) == 1
        if not fits and len(values) > 1:
            raise self.fault(path, values, f"sequences of one class with {list(self.sizes)} entries")
        whole = values[0]
        for value in values[1:]:
            whole = whole + value
        return whole

    def keep(self, path: Path, values: list[Any], hint: str = "") -> Any:
        """Keep once what all replicas agree on."""
        flat = [self.flatten(value) for value in values]
        leaves, spec = flat[0]
        for leaf in leaves:
            if isinstance(leaf, Iterator):
                msg = f"Expected outputs that can be joined, got {leaf!r} at {path_text(path, 'output')}; return a list or an array."
                raise LeafTypeError(msg)
        if any(other != spec for _, other in flat):
            raise self.fault(path, values, "the same structure on every replica", hint)
        for first, *others in zip(*(row for row, _ in flat), strict=True):
            if not all(self.agree(path, first, other) for other in others):
                number = isinstance(first, int | float | complex) and not isinstance(first, bool)
                raise self.fault(path, values, "the same value on every replica", hint or _NUMBERS * number)
        return unflatten(spec, [self.place(leaf) for leaf in leaves])

    def flatten(self, value: Any) -> tuple[list[Any], optree.PyTreeSpec]:
        return flatten(value, lambda leaf: self.backend.shape(leaf) is not None)

    def agree(self, path: Path, a: Any, b: Any) -> bool:
        if self.backend.shape(a) is not None:
            return self.backend.shape(b) is not None and self.backend.equal(a, b)
        if a is b:
            return True
        if type(a) is not type(b):
            return False
        if isinstance(a, float) and a != a:  # noqa: PLR0124 - NaN agrees with NaN
            return bool(b != b)  # noqa: PLR0124
        if getattr(type(a), "__eq__", None) is object.__eq__:
            msg = (
                f"Expected outputs that can be joined, got different {type(a).__name__} objects at {path_text(path, 'output')}. "
                "Return arrays, containers or plain values, or a dataclass of them."
            )
            raise LeafTypeError(msg)
        try:
            return bool(a == b)
        except Exception as error:
            msg = f"Expected outputs that can be compared, got a {type(a).__name__} at {path_text(path, 'output')}: {error}"
            raise LeafTypeError(msg) from error

    def place(self, leaf: Any) -> Any:
        return leaf if self.backend.shape(leaf) is None else self.backend.take(leaf, None, 0, self.device)

    def axis(self, path: Path) -> int:
        axis = self.options.output_axis
        return axis if isinstance(axis, int) else axis.get(path[0], 0) if path else 0

    def fault(self, path: Path, values: Sequence[Any], expected: str, hint: str = "") -> StructureError:
        """Return the error that shows what each replica returned."""
        shown = "".join(
            f"\n  replica {rank} ({size} rows): {self.show(value)}"
            for rank, size, value in zip(self.ranks, self.sizes, values, strict=True)
        )
        return StructureError(
            f"Expected {expected} at {path_text(path, 'output')}, got{shown}" + (hint and f"\n{hint}")
        )

    def show(self, value: Any) -> str:
        shape = self.backend.shape(value)
        if shape is not None:
            return f"{type(value).__name__} of shape {shape}, {getattr(value, 'dtype', '')}"
        text = repr(value)
        return f"{type(value).__name__}: {text if len(text) <= 80 else text[:77] + '...'}"
