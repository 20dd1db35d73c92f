"""Containers: what is inside them, where, and how to build the same container from other parts.

The walk itself is optree's. What is added here: dataclasses, mappings and sequences that optree has no
rule for are containers too and keep their class, and every leaf can be named by its path.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    import optree

__all__ = ["Broadcast", "Path", "Rows", "children", "flatten", "path_text", "unflatten", "without_marks"]

T = TypeVar("T")
Path: TypeAlias = tuple[Any, ...]

_NAMESPACE = "isobatch"


@dataclasses.dataclass(frozen=True, slots=True)
class Broadcast(Generic[T]):
    """Mark a value that has no batch axis.

    As an input it is given whole to every replica; as an output all replicas must agree on it and it is kept once.

    Args:
        value: Anything, containers included.

    >>> Broadcast([1, 2]).value
    [1, 2]
    """

    value: T


@dataclasses.dataclass(frozen=True, slots=True)
class Rows(Generic[T]):
    """Mark a value that has one entry for each row, where that cannot be seen: a Python sequence of labels, say.

    As an input each replica gets its own rows of it; as an output the parts are put together in rank order.

    Args:
        value: A sequence that can be sliced, or an array.

    >>> Rows(["cat", "dog"]).value
    ['cat', 'dog']
    """

    value: T


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves of a container in order, and its structure.

    `None`, marks and everything that is no container are leaves.

    Args:
        tree: Any value.
        is_leaf: Says of a value that it is a leaf although it looks like a container.

    Returns:
        The leaves, and the structure for `unflatten`.

    >>> flatten({"b": 1, "a": (2, None)})[0]
    [2, None, 1]
    """
    import optree

    while True:
        leaves, spec = optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=_NAMESPACE)
        unknown = {type(leaf) for leaf in leaves if _is_container(leaf) and not (is_leaf and is_leaf(leaf))}
        if not unknown:
            return leaves, spec
        for cls in unknown:
            _register(cls)


def unflatten(spec: optree.PyTreeSpec, leaves: Sequence[Any]) -> Any:
    """Build the container of a structure from new leaves.

    Args:
        spec: From `flatten`.
        leaves: As many as `flatten` gave, in the same order.

    Returns:
        A container of the same classes, keys and lengths.

    >>> unflatten(flatten({"b": 1, "a": 2})[1], [20, 10])
    {'b': 10, 'a': 20}
    """
    return spec.unflatten(leaves)


def children(node: Any) -> tuple[Path, list[Any], Callable[[Sequence[Any]], Any]] | None:
    """Return one level of a container: its keys, their values, and how to build another one; `None` for a leaf.

    Args:
        node: Any value.

    Returns:
        Keys (indices, mapping keys or field names), values in the same order, and a function from new values to a container.

    >>> keys, values, build = children({"b": 1, "a": 2})
    >>> keys, values, build([3, 4])
    (('a', 'b'), [2, 1], {'b': 4, 'a': 3})
    """
    values, spec = flatten(node, lambda value: value is not node)
    if spec.is_leaf():
        return None
    return tuple(spec.entries()), values, spec.unflatten


def path_text(path: Path, root: str = "") -> str:
    """Return a path as text that reads like code.

    Args:
        path: Keys from the outside in.
        root: What stands in front.

    >>> path_text((0, "image"), "args")
    "args[0]['image']"
    """
    return root + "".join(f".{key}" if isinstance(key, _Field) else f"[{key!r}]" for key in path)


def without_marks(tree: Any) -> Any:
    """Return a container with every `Broadcast` and `Rows` replaced by its value.

    Args:
        tree: Any value.

    >>> without_marks([Rows("ab"), Broadcast(1), 2])
    ['ab', 1, 2]
    """
    leaves, spec = flatten(tree)
    if not any(isinstance(leaf, Broadcast | Rows) for leaf in leaves):
        return tree
    return unflatten(spec, [leaf.value if isinstance(leaf, Broadcast | Rows) else leaf for leaf in leaves])


class _Field(str):
    """The name of an attribute, where a path would otherwise show a key."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Original:
    """The container a structure was read from: a new one is a copy of it with other contents.

    Two are equal when they have the same class and keys, which is what optree compares structures by.
    """

    container: Any
    keys: Path

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Original):
            return NotImplemented
        return type(self.container) is type(other.container) and self.keys == other.keys

    def __hash__(self) -> int:
        return hash((type(self.container), self.keys))


def _is_container(leaf: Any) -> bool:
    if isinstance(leaf, type | Broadcast | Rows):
        return False
    if dataclasses.is_dataclass(leaf) or isinstance(leaf, Mapping):
        return True
    return isinstance(leaf, list | tuple)


def _register(cls: type) -> None:
    """Teach optree a class it has no rule for."""
    import optree

    node: Any = cls
    take: Any
    build: Any
    if dataclasses.is_dataclass(cls):
        take, build = _take_fields, _build_fields
    elif issubclass(cls, Mapping):
        take, build = _take_items, _build_mapping
    else:
        take, build = _take_elements, _build_sequence
    with contextlib.suppress(ValueError):  # another thread was first
        optree.register_pytree_node(node, take, build, namespace=_NAMESPACE)


def _take_fields(container: Any) -> tuple[list[Any], _Original, Path]:
    names = tuple(
        _Field(field.name) for field in dataclasses.fields(container) if hasattr(container, field.name)
    )
    return [getattr(container, name) for name in names], _Original(container, names), names


def _build_fields(original: _Original, values: Sequence[Any]) -> Any:
    # Not dataclasses.replace: __post_init__ has run on these values once, and init=False fields count too.
    container = copy.copy(original.container)
    for name, value in zip(original.keys, values, strict=True):
        object.__setattr__(container, name, value)
        if isinstance(container, dict) and name in container:  # outputs that are dataclass and mapping in one
            dict.__setitem__(container, str(name), value)
    return container


def _take_items(container: Mapping[Any, Any]) -> tuple[list[Any], _Original, Path]:
    keys = tuple(container)
    return [container[key] for key in keys], _Original(container, keys), keys


def _build_mapping(original: _Original, values: Sequence[Any]) -> Any:
    items = dict(zip(original.keys, values, strict=True))
    if not hasattr(original.container, "__setitem__"):
        return type(original.container)(items)
    container = copy.copy(original.container)
    for key, value in items.items():
        container[key] = value
    return container


def _take_elements(container: Sequence[Any]) -> tuple[list[Any], _Original, Path]:
    keys = tuple(range(len(container)))
    return list(container), _Original(container, keys), keys


def _build_sequence(original: _Original, values: Sequence[Any]) -> Any:
    if isinstance(original.container, tuple):
        return type(original.container)(values)
    container = copy.copy(original.container)
    container[:] = values
    return container
