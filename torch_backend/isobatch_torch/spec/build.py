"""From a spec to a torch module and back: one child for each layer, and a forward function that reads like the network."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from keyword import iskeyword
from os import PathLike
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import fx, nn

from isobatch.errors import ModelError, SpecError
from isobatch.spec import Node, Spec
from isobatch_torch.spec.layouts import positions
from isobatch_torch.spec.modules import build_module
from isobatch_torch.spec.weights import Array, weight_of

__all__ = [
    "Description",
    "Layout",
    "Twin",
    "from_spec",
    "load_tensors",
    "module_path",
    "parts_of",
    "spec_of",
    "to_tensors",
    "to_torch",
    "with_weights",
]

Layout: TypeAlias = Literal["channels_last", "channels_first"]


@dataclass(frozen=True, slots=True)
class Description:
    """What a twin keeps of its spec.

    Args:
        spec: The spec without its tensors.
        shapes: Shapes of the tensors, by key.
        moved: References whose channels the twin takes or gives first, with the number of their position axes.
    """

    spec: Spec
    shapes: dict[str, tuple[int, ...]]
    moved: dict[str, int]


class Twin(fx.GraphModule):
    """A module built from a spec: one child for each layer, and a forward function that reads like the network.

    Args:
        root: The children.
        graph: The forward function.
        class_name: The network's name.
    """

    description: Description

    def __init__(self, root: nn.Module, graph: fx.Graph, class_name: str = "Network") -> None:
        super().__init__(root, graph, class_name=class_name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Twin:
        copied: Any = super().__deepcopy__(memo)
        copied.description = self.description
        return copied

    def __reduce__(self) -> Any:
        state: Any = super().__reduce__()
        return _revived, (*state, self.description)


def _revived(make: Callable[..., Any], arguments: tuple[Any, ...], description: Description) -> Twin:
    """What `torch.fx` unpickles as a module of its own class, as a twin again."""
    module = make(*arguments)
    twin = Twin(module, module.graph, type(module).__name__).train(module.training)
    twin.description = description
    return twin


def from_spec(spec: Spec | str | PathLike[str], *, layout: Layout = "channels_last") -> Twin:
    """Build the network that a spec describes.

    Args:
        spec: The spec, or the folder it was saved in.
        layout: Of images and other arrays with positions at the network's inputs and outputs. `"channels_last"`: the same arrays
            as in the spec; `"channels_first"`: `(B, C, *positions)`, as torch networks usually have it.

    Returns:
        A module in eval mode whose children have the spec's names. It is called with one argument for each input.

    Raises:
        SpecError: The spec is broken, or has an operation that torch has no module for.

    >>> from isobatch.spec import Input
    >>> net = from_spec(Spec("double", (Input("x", (3,), "float32"),), (Node("twice", "multiply", ("x", 2)),), "twice"))
    >>> net(torch.ones(1, 3))
    tensor([[2., 2., 2.]])
    """
    if not isinstance(spec, Spec):
        spec = Spec.load(spec)
    if layout not in {"channels_last", "channels_first"}:
        msg = f"Expected layout channels_last or channels_first, got {layout!r}."
        raise ValueError(msg)
    spec.check()
    root = nn.Module()
    for node in spec.nodes:
        if not _has(root, module_path(node)):
            shapes = {role: tuple(spec.tensors[key].shape) for role, key in node.weights.items()}
            _place(root, module_path(node), _built(node, shapes))
    moved = positions(spec) if layout == "channels_first" else {}
    name = (
        "".join(letter for letter in spec.name.title() if letter.isalnum())
        if not spec.name.isidentifier()
        else spec.name
    )
    module = Twin(root, _graph(spec, moved), name or "Network")
    shapes = {key: tuple(tensor.shape) for key, tensor in spec.tensors.items()}
    module.description = Description(replace(spec, tensors={}), shapes, moved)
    load_tensors(module, spec.tensors)
    return module.eval()


def spec_of(module: nn.Module) -> Spec | None:
    """Return the spec that a module was built from, without its tensors; `None` for another module.

    Args:
        module: Any module.
    """
    return module.description.spec if isinstance(module, Twin) else None


def load_tensors(module: nn.Module, tensors: Mapping[str, Array]) -> None:
    """Give a module the weights in a spec's tensors.

    Args:
        module: From `from_spec`.
        tensors: Arrays by the spec's keys; they are cast to the type of the module's own.

    Raises:
        SpecError: A tensor is missing, or of another shape.
    """
    for tensor, values in to_torch(module, tensors):
        tensor.data = values


def to_torch(module: nn.Module, tensors: Mapping[str, Array]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what each parameter and buffer would be, from arrays in a spec's layout.

    Args:
        module: From `from_spec`.
        tensors: Arrays by the spec's keys: weights, or what belongs to them and has their shape.

    Returns:
        The module's own tensors, with tensors of their shape.

    Raises:
        SpecError: An array is missing, or of another shape.
    """
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    shapes = _description(module).shapes
    for node, role, key, parts in _weights(module):
        if key not in tensors:
            msg = f"Expected a tensor {key!r}, there is none."
            raise SpecError(msg)
        array = np.asarray(tensors[key])
        if array.shape != shapes[key]:
            msg = f"Expected {key!r} of shape {shapes[key]}, got {array.shape}."
            raise SpecError(msg)
        values = torch.tensor(np.array(weight_of(node.operation, role).to_torch(array, array.shape)))
        rows = values.reshape(len(parts), -1) if len(parts) > 1 else values[None]
        found += [
            (part, _checked(row, part, key).to(part.device)) for part, row in zip(parts, rows, strict=True)
        ]
    return found


def to_tensors(
    module: nn.Module, read: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
) -> dict[str, Array]:
    """Return a module's weights as the tensors of its spec.

    Args:
        module: From `from_spec`.
        read: Gives something else in place of each parameter and buffer, of the same shape, such as its gradient.

    Returns:
        Arrays by key, in the spec's layout and the module's precision.
    """
    found: dict[str, Array] = {}
    shapes = _description(module).shapes
    for node, role, key, parts in _weights(module):
        rows = [read(part) for part in parts]
        values = torch.stack(rows) if len(rows) > 1 else rows[0]
        if values.dtype == torch.bfloat16:
            values = values.float()
        found[key] = np.array(weight_of(node.operation, role).to_spec(values.cpu().numpy(), shapes[key]))
    return found


def parts_of(module: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Return the parameters and buffers that hold each tensor of a module's spec: one, or both biases of a GRU.

    Args:
        module: From `from_spec`.
    """
    return {key: parts for _, _, key, parts in _weights(module)}


def module_path(node: Node) -> str:
    """Return where the module of a node is; a name that every module has for something else, or Python, gets an underscore.

    >>> module_path(Node("float", "relu", module="in.float"))
    'in_.float_'
    """
    return ".".join(map(_free, (node.module or node.name).split(".")))


_TAKEN = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))
"""Names that every module of ours has for something else."""


def _free(name: str) -> str:
    return f"{name}_" if iskeyword(name) or name in _TAKEN else name


def _description(module: nn.Module) -> Description:
    if not isinstance(module, Twin):
        msg = f"Expected a module from isobatch_torch.from_spec, got {type(module).__name__}."
        raise SpecError(msg)
    return module.description


def _weights(module: nn.Module) -> list[tuple[Node, str, str, list[torch.Tensor]]]:
    """Node, role, key and tensors of each weight, once for each module."""
    nodes = {module_path(node): node for node in _description(module).spec.nodes}
    found: list[tuple[Node, str, str, list[torch.Tensor]]] = []
    for path, node in nodes.items():
        child = module.get_submodule(path)
        for role, key in node.weights.items():
            found.append((node, role, key, _parts(child, weight_of(node.operation, role).parameter)))
    return found


def _parts(child: nn.Module, name: str) -> list[torch.Tensor]:
    """What holds a weight; `biases` are both of a GRU, which the spec keeps in one array `(2, 3 units)`, or its only one."""
    if name != "biases":
        return [operator.attrgetter(name)(child)]
    return [getattr(child, one) for one in ("bias_ih_l0", "bias_hh_l0") if hasattr(child, one)]


def _checked(values: torch.Tensor, tensor: torch.Tensor, key: str) -> torch.Tensor:
    if values.shape != tensor.shape:
        msg = (
            f"Expected {key!r} to give a parameter of shape {tuple(tensor.shape)}, got {tuple(values.shape)}."
        )
        raise SpecError(msg)
    return values.clone()


def _built(node: Node, shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    try:
        return build_module(node.operation, node.attributes, shapes)
    except SpecError:
        raise
    except Exception as error:
        msg = f"Expected sound attributes and weights at node {node.name!r} ({node.operation}): {type(error).__name__}: {error}"
        raise SpecError(msg) from error


def _has(root: nn.Module, path: str) -> bool:
    module: Any = root
    for part in path.split("."):
        module = getattr(module, part, None)
    return module is not None


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, name = path.split(".")
    for part in parents:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    root.add_module(name, module)


def _graph(spec: Spec, moved: Mapping[str, int]) -> fx.Graph:
    graph = fx.Graph()
    values: dict[str, fx.Node] = {}
    names = _argument_names(spec)
    placeholders = {one.name: graph.placeholder(names[one.name]) for one in spec.inputs}
    for name, value in placeholders.items():
        values[name] = _move(graph, value, 1, -1) if moved.get(name) else value
    for node in spec.nodes:
        args = tuple(values[one] if isinstance(one, str) else one for one in node.inputs)
        kwargs: dict[str, Any] = {key: values[ref] for key, ref in node.keywords.items()}
        called = graph.call_module(module_path(node), args, kwargs)
        if node.outputs == 1:
            values[node.name] = called
            continue
        for number in range(node.outputs):
            reference = f"{node.name}:{number}" if number else node.name
            values[reference] = graph.call_function(operator.getitem, (called, number))
    graph.output(
        _result(spec.outputs, lambda ref: _move(graph, values[ref], -1, 1) if moved.get(ref) else values[ref])
    )
    return graph


def _argument_names(spec: Spec) -> dict[str, str]:
    """What the inputs are called in the forward function: the keys of a dict of inputs, or their own names."""
    keys: dict[str, str] = {}
    if isinstance(spec.signature, dict):
        keys = {name: key for key, name in spec.signature.items() if isinstance(name, str)}
    names = {one.name: keys.get(one.name, one.name) for one in spec.inputs}
    return {name: f"{key}_" if iskeyword(key) else key for name, key in names.items()}


def _move(graph: fx.Graph, value: fx.Node, source: int, destination: int) -> fx.Node:
    return graph.call_function(torch.movedim, (value, source, destination))


def _result(nest: Any, read: Callable[[str], fx.Node]) -> Any:
    if isinstance(nest, dict):
        return {key: _result(value, read) for key, value in nest.items()}
    return tuple(_result(value, read) for value in nest) if isinstance(nest, list | tuple) else read(nest)


def with_weights(module: nn.Module, path: str | PathLike[str]) -> nn.Module:
    """Return a module with the `state_dict` in a file.

    Args:
        module: Any module; it is changed.
        path: A file that `torch.save` wrote; nothing in it is run.

    Raises:
        ModelError: It cannot be read, or does not fit.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        module.load_state_dict({name.removeprefix("module."): tensor for name, tensor in state.items()})
    except Exception as error:
        msg = f"Expected a state_dict of the module in {str(path)!r}: {error}"
        raise ModelError(msg) from error
    return module.eval()
