"""A network as data: a graph of operations of `isobatch.operations` with numpy weights, and its form on disk.

Nothing here runs what a file says: a spec is read as JSON and safetensors, checked, and built from a table of known operations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from isobatch.errors import SpecError
from isobatch.operations import find_operation

if TYPE_CHECKING:
    import numpy as np

__all__ = ["VERSION", "Input", "Node", "Spec", "references"]

VERSION = 1
"""Of the form on disk; it grows when an older reader would misread a file."""

Argument: TypeAlias = "str | bool | int | float"

_FILES = ("spec.json", "weights.safetensors")


@dataclass(frozen=True, slots=True)
class Input:
    """An input of the network.

    Args:
        name: Its name, under which nodes refer to it.
        shape: Of one row; `None` for an axis of any length.
        dtype: Type of its elements, as numpy writes it.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Node:
    """One call of an operation.

    Args:
        name: Its own name. Its output is referred to by it, further outputs as `name:1`, `name:2`.
        operation: A word of `isobatch.operations`.
        inputs: References to what it is given, and numbers.
        keywords: References to what it is given by name, such as a mask.
        attributes: What the operation is set to; plain JSON values.
        weights: Key in the spec's tensors of each weight, by role.
        layer: Path of the layer it is, or is a part of.
        module: Path of the module that is called; nodes of one module share attributes and weights.
        outputs: How many outputs it has.
    """

    name: str
    operation: str
    inputs: tuple[Argument, ...] = ()
    keywords: Mapping[str, str] = field(default_factory=dict[str, str])
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weights: Mapping[str, str] = field(default_factory=dict[str, str])
    layer: str = ""
    module: str = ""
    outputs: int = 1

    def __str__(self) -> str:
        given = [*map(str, self.inputs), *(f"{key}={value}" for key, value in self.keywords.items())]
        settings = "".join(f", {key}={value!r}" for key, value in self.attributes.items())
        return f"{self.name} = {self.operation}({', '.join(given)}{settings})"


@dataclass(frozen=True, slots=True)
class Spec:
    """A network.

    Args:
        name: Its name.
        inputs: Its inputs, in order.
        nodes: Its operations, each after those that it refers to.
        outputs: References in any nest of lists and dicts, as the network returns them.
        tensors: Numpy arrays by key.
        signature: Names of the inputs in the nest in which the network is given them.

    >>> spec = Spec("double", (Input("x", (3,), "float32"),), (Node("y", "multiply", ("x", 2)),), "y")
    >>> print(spec.check())
    double: 1 operation, 0 weights
      x: float32 (B, 3)
      y = multiply(x, 2)
      return y
    """

    name: str
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: Any
    tensors: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict[str, Any])
    signature: Any = None

    def __str__(self) -> str:
        count = sum(tensor.size for tensor in self.tensors.values())
        plural = "" if len(self.nodes) == 1 else "s"
        lines = [f"{self.name}: {len(self.nodes)} operation{plural}, {count:,} weights"]
        for one in self.inputs:
            axes = ", ".join(["B", *("?" if size is None else str(size) for size in one.shape)])
            lines.append(f"  {one.name}: {one.dtype} ({axes})")
        for node in self.nodes:
            shapes = ", ".join(f"{role} {self.tensors[key].shape}" for role, key in node.weights.items())
            lines.append(f"  {node}{f'  # {shapes}' if shapes else ''}")
        return "\n".join([*lines, f"  return {_text(self.outputs)}"])

    def bind(self, batch: Any) -> dict[str, Any]:
        """Return the arrays of a batch by input name.

        Args:
            batch: An array, or a list, tuple or dict of arrays, as the network is given them.

        Raises:
            SpecError: They are not the network's inputs.

        >>> Spec("n", (Input("a", (), "int32"), Input("b", (), "int32")), (), "a", signature=["a", "b"]).bind([1, 2])
        {'a': 1, 'b': 2}
        """
        found: dict[str, Any] = {}
        signature = self.signature
        if signature is None:
            names = [one.name for one in self.inputs]
            signature = names[0] if len(names) == 1 else names
        _bind(signature, batch, found)
        return found

    def names(self) -> list[str]:
        """Return the names of inputs and nodes, in order."""
        return [*(one.name for one in self.inputs), *(node.name for node in self.nodes)]

    def same_network(self, other: Spec) -> bool:
        """Return whether another spec has the same operations on the same things, whatever their names.

        Args:
            other: Any spec; weights are not looked at.

        >>> spec = Spec("one", (Input("x", (3,), "float32"),), (Node("y", "relu", ("x",)),), "y")
        >>> spec.same_network(Spec("two", (Input("a", (3,), "float32"),), (Node("b", "relu", ("a",)),), "b"))
        True
        """
        if len(self.names()) != len(other.names()):
            return False
        renamed = dict(zip(other.names(), self.names(), strict=True))

        def ours(reference: Any) -> Any:
            name, colon, output = str(reference).partition(":")
            return f"{renamed.get(name, name)}{colon}{output}" if isinstance(reference, str) else reference

        return all(
            (a.operation, a.inputs, dict(a.keywords), dict(a.attributes), a.outputs)
            == (
                b.operation,
                tuple(ours(one) for one in b.inputs),
                {key: ours(one) for key, one in b.keywords.items()},
                dict(b.attributes),
                b.outputs,
            )
            for a, b in zip(self.nodes, other.nodes, strict=True)
        ) and list(references(self.outputs)) == [ours(one) for one in references(other.outputs)]

    def check(self) -> Spec:
        """Return this spec if it is sound.

        Raises:
            SpecError: An operation is unknown, an attribute or a weight is missing or unknown, a node refers to what does not come
                before it, or two nodes of one module differ.
        """
        known: dict[str, int] = {}
        for one in self.inputs:
            _once(one.name, known, 1)
        modules: dict[str, tuple[Any, ...]] = {}
        for node in self.nodes:
            self._check_node(node, known)
            _once(node.name, known, node.outputs)
            what = (node.operation, dict(node.attributes), dict(node.weights))
            if modules.setdefault(node.module or node.name, what) != what:
                msg = f"Expected the nodes of module {node.module!r} to be alike, {node.name!r} is not."
                raise SpecError(msg)
        for reference in references(self.outputs):
            _check_reference(reference, known, "the outputs")
        return self

    def _check_node(self, node: Node, known: dict[str, int]) -> None:
        try:
            operation = find_operation(node.operation)
        except SpecError as error:
            msg = f"At node {node.name!r}: {error}"
            raise SpecError(msg) from None
        for reference in (*node.inputs, *node.keywords.values()):
            if isinstance(reference, str):
                _check_reference(reference, known, f"node {node.name!r}")
        if set(node.attributes) != set(operation.attributes):
            msg = (
                f"Expected attributes {sorted(operation.attributes)} of {node.operation} at node {node.name!r}, "
                f"got {sorted(node.attributes)}."
            )
            raise SpecError(msg)
        for role, key in node.weights.items():
            if role not in operation.weights:
                msg = f"Expected weights out of {sorted(operation.weights)} at node {node.name!r}, got {role!r}."
                raise SpecError(msg)
            if key not in self.tensors:
                msg = f"Expected a tensor {key!r} for node {node.name!r}, there is none."
                raise SpecError(msg)

    def save(self, folder: str | PathLike[str]) -> None:
        """Write `spec.json` and `weights.safetensors`.

        Args:
            folder: Where to; it is made if it is absent.
        """
        import numpy as np
        from safetensors.numpy import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {key: np.array(tensor, order="C") for key, tensor in self.tensors.items()}, folder / _FILES[1]
        )
        body = {
            "version": VERSION,
            "name": self.name,
            "inputs": [asdict(one) for one in self.inputs],
            "nodes": [asdict(node) for node in self.nodes],
            "outputs": self.outputs,
            "signature": self.signature,
            "tensors": {key: [str(t.dtype), list(t.shape)] for key, t in self.tensors.items()},
        }
        (folder / _FILES[0]).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(folder: str | PathLike[str]) -> Spec:
        """Return the spec in a folder.

        Args:
            folder: Where `save` wrote it.

        Raises:
            FileNotFoundError: A file is absent.
            SpecError: A file is broken, of a newer version, or not a sound spec.
        """
        folder = Path(folder)
        try:
            body = json.loads((folder / _FILES[0]).read_text("utf-8"))
        except ValueError as error:
            msg = f"Expected JSON in {str(folder / _FILES[0])!r}: {error}"
            raise SpecError(msg) from None
        version = body.get("version") if isinstance(body, dict) else None
        if version != VERSION:
            msg = f"Expected a spec of version {VERSION} in {str(folder)!r}, got {version!r}."
            raise SpecError(msg)
        tensors = _load_tensors(folder / _FILES[1])
        found = {key: [str(tensor.dtype), list(tensor.shape)] for key, tensor in tensors.items()}
        try:
            if found != body["tensors"]:
                keys = sorted(
                    key for key in {*found, *body["tensors"]} if found.get(key) != body["tensors"].get(key)
                )
                msg = f"Expected the tensors that spec.json lists in {str(folder / _FILES[1])!r}; these differ: {keys}."
                raise SpecError(msg)
            spec = Spec(
                body["name"],
                tuple(_input(one) for one in body["inputs"]),
                tuple(_node(one) for one in body["nodes"]),
                body["outputs"],
                tensors,
                body["signature"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            msg = f"Expected a whole spec in {str(folder / _FILES[0])!r}: {type(error).__name__}: {error}"
            raise SpecError(msg) from None
        return spec.check()


def references(nest: Any) -> Iterator[str]:
    """Yield the references in a nest of lists and dicts.

    >>> list(references({"a": ["x", "y:1"]}))
    ['x', 'y:1']
    """
    if isinstance(nest, Mapping):
        for value in nest.values():
            yield from references(value)
    elif isinstance(nest, list | tuple):
        for value in nest:
            yield from references(value)
    elif isinstance(nest, str):
        yield nest
    else:
        msg = f"Expected a reference, got {nest!r}."
        raise SpecError(msg)


def _load_tensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        msg = f"Expected safetensors in {str(path)!r}: {error}"
        raise SpecError(msg) from None


def _input(body: Mapping[str, Any]) -> Input:
    return Input(_string(body["name"]), tuple(body["shape"]), _string(body["dtype"]))


def _node(body: Mapping[str, Any]) -> Node:
    settings: dict[str, Any] = {**body, "inputs": tuple(body["inputs"])}
    node = Node(**settings)
    for text in (
        node.name,
        node.operation,
        node.layer,
        node.module,
        *node.keywords.values(),
        *node.weights.values(),
    ):
        _string(text)
    if type(node.outputs) is not int or not isinstance(node.attributes, dict):
        msg = f"expected a number of outputs and attributes by name, got {node.outputs!r} and {node.attributes!r}"
        raise TypeError(msg)
    return node


def _string(value: Any) -> str:
    if not isinstance(value, str):
        msg = f"expected text, got {value!r}"
        raise TypeError(msg)
    return value


def _once(name: str, known: dict[str, int], outputs: int) -> None:
    if name in known or ":" in name:
        msg = f"Expected every name once and without a colon, got {name!r}."
        raise SpecError(msg)
    known[name] = outputs


def _check_reference(reference: str, known: dict[str, int], where: str) -> None:
    name, _, output = reference.partition(":")
    if name not in known or (output and not (output.isdecimal() and 0 < int(output) < known[name])):
        msg = f"Expected {where} to refer to what comes before it, got {reference!r}."
        raise SpecError(msg)


def _bind(signature: Any, batch: Any, found: dict[str, Any]) -> None:
    if isinstance(signature, str):
        found[signature] = batch
        return
    if isinstance(signature, Mapping):
        pairs = [(signature[key], batch.get(key)) for key in signature] if isinstance(batch, Mapping) else []
        missing = not isinstance(batch, Mapping) or any(value is None for _, value in pairs)
    else:
        missing = not isinstance(batch, list | tuple) or len(batch) != len(signature)
        pairs = [] if missing else list(zip(signature, batch, strict=True))
    if missing:
        msg = f"Expected inputs as {_text(signature)}, got {type(batch).__name__}."
        raise SpecError(msg)
    for part, value in pairs:
        _bind(part, value, found)


def _text(nest: Any) -> str:
    return nest if isinstance(nest, str) else json.dumps(nest).replace('"', "")
