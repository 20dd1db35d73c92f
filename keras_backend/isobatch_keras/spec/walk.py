"""From a Keras model's graph to the nodes of a spec, one operation after another.

A rule for each class writes the nodes; `isobatch_keras.spec.rules` finds it. Nested models are walked with their name as prefix,
and a layer that is called twice gives two nodes of one module. Masks travel beside the arrays, as in Keras when it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import keras

from isobatch.errors import ModelError, SpecError
from isobatch.spec import Input, Node, Spec, references
from isobatch_keras.spec.refs import Call, Ref, as_array, functional_of, input_name, packed_names, plain

__all__ = ["Emitter", "Rule", "Walk", "walk"]


_READS_MASKS = (keras.layers.Multiply, keras.layers.Maximum, keras.layers.Minimum)
"""Layers that take the masks off their inputs, and not from an argument."""

Rule: TypeAlias = Callable[..., "Ref | Sequence[Ref]"]
"""Called with an `Emitter`, the layer or operation, and the arguments of the call, references in place of arrays."""


@dataclass(frozen=True, slots=True)
class _Value:
    """An array of the graph: its reference, and Keras's symbol for its mask."""

    ref: Ref
    mask: Any = None


@dataclass(slots=True)
class Walk:
    """What was found on the way.

    Args:
        find_rule: Gives the rule for a layer or operation, or `None`.
        nodes: The nodes so far.
        calls: The calls so far.
        variables: The variable or array behind each tensor, by key.
        unsupported: What has no rule, one line each.
    """

    find_rule: Callable[[Any], Rule | None]
    nodes: list[Node] = field(default_factory=list[Node])
    calls: list[Call] = field(default_factory=list[Call])
    variables: dict[str, Any] = field(default_factory=dict[str, Any])
    unsupported: list[str] = field(default_factory=list[str])
    _names: set[str] = field(default_factory=set[str])
    _modules: dict[int, tuple[str, int]] = field(default_factory=dict[int, tuple[str, int]])
    _parts: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    _masks: dict[int, Ref] = field(default_factory=dict[int, Ref])
    _alive: list[Any] = field(default_factory=list[Any])  # whose identities are keys

    def fresh(self, name: str) -> str:
        """Return a name that no node has, and take it."""
        found, number = name, 0
        while found in self._names:
            number += 1
            found = f"{name}_{number}"
        self._names.add(found)
        return found

    def part(self, module: str, part: str) -> str:
        """Return the path of a part of a module, the same one at each of the module's calls."""
        if not part:
            return module
        if (module, part) not in self._parts:
            self._parts[module, part] = self.fresh(module + part)
        return self._parts[module, part]

    def masks_of_outputs(self, outputs: Sequence[_Value]) -> dict[str, Ref]:
        """Return the masks that outputs carry, by the number of the output."""
        return {
            str(number): self._resolve(value.mask, f"mask_{number}")
            for number, value in enumerate(outputs)
            if value.mask is not None
        }

    def module_of(self, operation: Any) -> str:
        """Return the path that a layer has as a module, the same for all its calls."""
        return self._modules[id(operation)][0]

    def invoke(self, operation: Any, path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Ref]:
        """Write the nodes of one call, references in place of arrays; return its outputs, flat."""
        functional = functional_of(operation)
        if functional is not None:
            values = [_Value(ref, None) for ref in keras.tree.flatten(args[0])]
            return [value.ref for value in self.run(functional, values, f"{path}.")]
        rule = self.find_rule(operation)
        if rule is None:
            msg = f"{path}: {type(operation).__module__}.{type(operation).__qualname__}"
            raise SpecError(msg)
        if id(operation) in self._modules:
            module, count = self._modules[id(operation)]
            self._modules[id(operation)] = (module, count + 1)
            emitter = Emitter(self, module, f"{module}#{count + 1}", path)
        else:
            base = self.fresh(path)
            self._modules[id(operation)] = (base, 1)
            self._alive.append(operation)
            emitter = Emitter(self, base, base, path)
        return list(keras.tree.flatten(rule(emitter, operation, *args, **kwargs)))

    def run(self, functional: Any, inputs: Sequence[_Value], prefix: str) -> list[_Value]:
        """Walk a functional model; return its outputs, flat."""
        env = {id(tensor): value for tensor, value in zip(functional.inputs, inputs, strict=True)}
        for depth in sorted(functional._nodes_by_depth, reverse=True):  # noqa: SLF001 - as Keras runs it
            for node in functional._nodes_by_depth[depth]:  # noqa: SLF001
                if not node.is_input:
                    self._step(node, env, prefix)
        return [env[id(tensor)] for tensor in functional.outputs]

    def _step(self, node: Any, env: dict[int, _Value], prefix: str) -> None:
        operation = node.operation
        path = prefix + operation.name.replace(".", "_").replace(":", "_").replace("#", "_")
        args = _map_tensors(lambda tensor: env[id(tensor)], node.arguments.args)
        kwargs = _map_tensors(lambda tensor: env[id(tensor)], node.arguments.kwargs)
        functional = functional_of(operation)
        if functional is not None:
            kwargs.pop("training", None)
            given = keras.tree.flatten(args[0] if args else kwargs["inputs"])
            for tensor, value in zip(node.outputs, self.run(functional, given, f"{path}."), strict=True):
                ref = Ref(value.ref, tensor.shape, tensor.dtype)
                env[id(tensor)] = _Value(ref, value.mask)
            return
        refs = self._call(operation, path, args, kwargs, node.outputs)
        masks = self._masks_of(operation, path, args, kwargs, len(refs))
        for tensor, ref, mask in zip(node.outputs, refs, masks, strict=True):
            env[id(tensor)] = _Value(ref, mask)

    def _call(
        self, operation: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Any]
    ) -> list[Ref]:
        plain = _map_values(lambda value: value.ref, args), _map_values(lambda value: value.ref, kwargs)
        given = {**plain[1], **self._mask_arguments(operation, args, kwargs)}
        given.pop("training", None)
        try:
            names = self.invoke(operation, path, plain[0], given)
        except SpecError as error:
            self.unsupported.append(str(error))
            names = [Ref("?") for _ in outputs]
        refs = [Ref(name, one.shape, one.dtype) for name, one in zip(names, outputs, strict=True)]
        self.calls.append(Call(path, operation, plain[0], plain[1], tuple(refs)))
        return refs

    def _mask_arguments(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """The masks that Keras would fill in for this call, where they are not given."""
        if not isinstance(operation, keras.layers.Layer):
            return {}
        if isinstance(operation, _READS_MASKS):
            masks = [None if one.mask is None else self._resolve(one.mask, "") for one in args[0]]
            return {"mask": masks} if any(masks) else {}
        names = inspect.signature(operation.call).parameters
        bound = {**dict(zip(names, args, strict=False)), **kwargs}
        arrays = {
            name: value for name, value in bound.items() if _has_values(value) and not name.endswith("mask")
        }
        wanted = {"mask": next(iter(arrays.values()))} if len(arrays) == 1 else {}
        if len(arrays) > 1:
            wanted = {f"{name}_mask": value for name, value in arrays.items()}
        found = {}
        for name, value in wanted.items():
            if name in names and bound.get(name) is None:
                masks = _map_values(
                    lambda one: None if one.mask is None else self._resolve(one.mask, ""), value
                )
                if any(mask is not None for mask in keras.tree.flatten(masks)):
                    found[name] = masks
        return found

    def _masks_of(
        self, operation: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], count: int
    ) -> list[Any]:
        """Keras's symbols for the masks of a call's outputs."""
        none: list[Any] = [None] * count
        if not isinstance(operation, keras.layers.Layer) or not operation.supports_masking:
            return none
        first = args[0] if args else next(iter(kwargs.values()))
        explicit = kwargs.get("mask")
        previous = _map_values(lambda value: value.mask, first)
        if explicit is not None:
            previous = _map_values(self._symbol, explicit)
        inherited = type(operation).compute_mask is keras.layers.Layer.compute_mask
        if inherited and all(mask is None for mask in keras.tree.flatten(previous)):
            return none
        symbols = _map_values(self._symbol, first)
        masks = operation.compute_mask(symbols, previous)
        flat = keras.tree.flatten(masks)
        if masks is None or all(mask is None for mask in flat):
            return none
        flat = (flat + none)[:count]
        try:
            for mask in flat:
                if mask is not None:
                    self._resolve(mask, f"{path}_mask")
        except SpecError as error:
            self.unsupported.append(str(error))
            return none
        return list(flat)

    def _symbol(self, value: _Value) -> Any:
        """A new symbol for an array, so that computing with it leaves no trace in the user's model."""
        symbol = keras.KerasTensor(value.ref.shape, value.ref.dtype)
        self._masks[id(symbol)] = value.ref
        self._alive.append(symbol)
        return symbol

    def _resolve(self, symbol: Any, path: str) -> Ref:
        """The reference of a mask's symbol; the nodes that compute it are written when it is met first."""
        if id(symbol) in self._masks:
            return self._masks[id(symbol)]
        operation, index, position = symbol._keras_history  # noqa: SLF001 - how Keras names what made a symbol
        node = operation._inbound_nodes[index]  # noqa: SLF001
        args = _map_tensors(lambda one: self._resolve(one, path), node.arguments.args)
        kwargs = _map_tensors(lambda one: self._resolve(one, path), node.arguments.kwargs)
        for one, name in zip(node.outputs, self.invoke(operation, path, args, kwargs), strict=True):
            self._masks[id(one)] = Ref(name, one.shape, one.dtype)
        self._alive.append(node)
        return self._masks[id(node.outputs[position])]


@dataclass(frozen=True, slots=True)
class Emitter:
    """What a rule writes nodes with.

    Args:
        walk: Where they go.
        module: Path of the layer.
        name: Name of this call's nodes; it differs from `module` when the layer has been called before.
        layer: Path of the layer the call belongs to.
    """

    walk: Walk
    module: str
    name: str
    layer: str

    def add(self, operation: str, *inputs: Any, **settings: Any) -> Ref:
        """Write one node with one output.

        Args:
            operation: A word of `isobatch.operations`.
            inputs: References and numbers.
            settings: As for `add_several`, and the operation's attributes.

        Returns:
            The reference to its output.
        """
        return self.add_several(1, operation, *inputs, **settings)[0]

    def add_several(
        self,
        outputs: int,
        operation: str,
        *inputs: Any,
        part: str = "",
        weights: Mapping[str, Any] | None = None,
        keywords: Mapping[str, Any] | None = None,
        **attributes: Any,
    ) -> list[Ref]:
        """Write one node.

        Args:
            outputs: How many outputs it has.
            operation: A word of `isobatch.operations`.
            inputs: References and numbers.
            part: What its name adds to the layer's: `_activation` for a node beside the layer's own, `.depthwise` for one within.
            weights: Variables or arrays by role; those that are `None` are left out.
            keywords: References by name; those that are `None` are left out.
            attributes: The operation's attributes.

        Returns:
            The references to its outputs.
        """
        module = self.walk.part(self.module, part)
        name = module if self.name == self.module else self.name + part
        given = {role: weight for role, weight in (weights or {}).items() if weight is not None}
        keys = {role: f"{module}.{role}" for role in given}
        self.walk.variables.update({keys[role]: weight for role, weight in given.items()})
        self.walk.nodes.append(
            Node(
                name,
                operation,
                tuple(one if isinstance(one, Ref) else plain(one) for one in inputs),
                {key: ref for key, ref in (keywords or {}).items() if ref is not None},
                plain(attributes),
                keys,
                self.layer,
                module,
                outputs,
            )
        )
        return [Ref(name if number == 0 else f"{name}:{number}") for number in range(outputs)]

    def call(
        self, operation: Any, x: Ref, part: str, shape: Sequence[int | None] = (), **kwargs: Any
    ) -> list[Ref]:
        """Write the nodes of a layer inside this one; return its outputs, flat."""
        return self.walk.invoke(operation, self.name + part, (Ref(x, shape),), kwargs)


def walk(model: Any, find_rule: Callable[[Any], Rule | None], *, masks: bool = False) -> tuple[Walk, Spec]:
    """Walk a model.

    Args:
        model: A functional or sequential Keras model, built.
        find_rule: Gives the rule for a layer or operation, or `None`.
        masks: Whether a network whose outputs carry masks returns `[outputs, masks]`, the masks by number of the output.

    Returns:
        What was found, and the spec.

    Raises:
        ModelError: The model has no graph.
        SpecError: Layers have no rule; the message lists all of them.
    """
    functional = functional_of(model)
    if functional is None:
        msg = (
            f"Expected a functional or sequential Keras model that is built, got {type(model).__name__} {model.name!r}. "
            "Cure: call it once if it is sequential; a subclassed model has no graph to read: give it one by "
            "keras.Model(x, model.call(x)) with x = keras.Input(shape)."
        )
        raise ModelError(msg)
    found = Walk(find_rule)
    inputs = [
        Input(found.fresh(input_name(tensor)), tuple(tensor.shape[1:]), str(tensor.dtype))
        for tensor in functional.inputs
    ]
    values = [
        _Value(Ref(one.name, tensor.shape, one.dtype))
        for one, tensor in zip(inputs, functional.inputs, strict=True)
    ]
    outputs = found.run(functional, values, "")
    kept = found.masks_of_outputs(outputs) if masks else {}
    if found.unsupported:
        msg = (
            f"Expected layers that have a word in a spec; these {len(found.unsupported)} have none: "
            f"{'; '.join(found.unsupported)}. Cure: isobatch_keras.register_layer."
        )
        raise SpecError(msg)
    return found, _spec(model.name, inputs, found, functional, ([value.ref for value in outputs], kept))


def _spec(
    name: str,
    inputs: list[Input],
    found: Walk,
    functional: Any,
    returned: tuple[list[Ref], Mapping[str, Ref]],
) -> Spec:
    outputs, masks = returned
    nodes = _reachable(found.nodes, [*outputs, *masks.values()])
    keys = {key for node in nodes for key in node.weights.values()}
    found.variables = {key: variable for key, variable in found.variables.items() if key in keys}
    tensors = {key: as_array(variable) for key, variable in found.variables.items()}
    signature = packed_names(functional._inputs_struct, [one.name for one in inputs])  # noqa: SLF001 - how the model is called
    result = packed_names(functional._outputs_struct, [str(ref) for ref in outputs])  # noqa: SLF001
    if isinstance(result, list) and len(result) == 1:  # Keras takes the only output out of its list
        result = result[0]
    if masks:
        result = [result, {number: str(ref) for number, ref in masks.items()}]
    return Spec(name, tuple(inputs), tuple(nodes), result, tensors, signature).check()


def _reachable(nodes: Sequence[Node], outputs: Sequence[str]) -> list[Node]:
    """The nodes that the outputs need: masks that nothing asked for are left out."""
    needed = {ref.partition(":")[0] for ref in outputs}
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.name in needed:
            kept.append(
                replace(node, inputs=tuple(str(one) if isinstance(one, Ref) else one for one in node.inputs))
            )
            given = [one for one in node.inputs if isinstance(one, str)]
            needed.update(ref.partition(":")[0] for ref in (*given, *references(dict(node.keywords))))
    return kept[::-1]


def _map_tensors(function: Callable[[Any], Any], nest: Any) -> Any:
    return keras.tree.map_structure(
        lambda one: function(one) if isinstance(one, keras.KerasTensor) else one, nest
    )


def _map_values(function: Callable[[_Value], Any], nest: Any) -> Any:
    return keras.tree.map_structure(lambda one: function(one) if isinstance(one, _Value) else one, nest)


def _has_values(nest: Any) -> bool:
    return any(isinstance(one, _Value) for one in keras.tree.flatten(nest))
