"""What a torch module computes in float64: layer by layer on given inputs, and as a whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from isobatch.spec import Node, Spec
from isobatch.trees import flatten, unflatten
from isobatch_torch.spec.build import Twin, module_path, spec_of
from isobatch_torch.spec.weights import Array

__all__ = ["TRAINED", "evaluate_layers", "predict", "without_gaps"]

TRAINED = " in training"
"""What a reference adds to its name when it stands for the running statistics after one step of training."""

_ROUNDING = 8 * torch.finfo(torch.float64).eps
"""Width of the random relative error: up to four units either way, as a layer's sum leaves it in another order."""


def evaluate_layers(
    module: nn.Module, spec: Spec, values: Mapping[str, Array], report: Callable[[str, Any], None]
) -> None:
    """Run each layer in float64, by itself, on what the other framework gave to it.

    Args:
        module: From `from_spec`.
        spec: Its spec.
        values: The other framework's arrays, by reference. What it has no value for, inside a layer, is computed here.
        report: Called with each reference and the array, or the exception, that came out; for a BatchNorm also with its name and
            `TRAINED`, and its running mean and variance after one step of training.
    """
    own: dict[str, torch.Tensor] = {}
    children: dict[str, nn.Module] = {}

    def given(one: Any) -> Any:
        if not isinstance(one, str):
            return one
        return torch.from_numpy(values[one].copy()) if one in values else own[one]

    with torch.no_grad(), _DefaultDtype():
        for node in spec.nodes:
            path = module_path(node)
            child = children.setdefault(path, _double(module.get_submodule(path)))
            try:
                args = [given(one) for one in node.inputs]
                outputs = child(*args, **{key: given(ref) for key, ref in node.keywords.items()})
            except Exception as error:  # noqa: BLE001 - whatever a layer raises is its verdict
                report(node.name, error)
                continue
            for number, output in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
                reference = f"{node.name}:{number}" if number else node.name
                report(reference, output.numpy())
                if reference not in values:
                    own[reference] = output
            if isinstance(child, _BatchNorm):
                report(
                    f"{node.name}{TRAINED}",
                    _train_step(child, args, {key: given(ref) for key, ref in node.keywords.items()}),
                )


def _train_step(layer: _BatchNorm, args: Any, kwargs: Any) -> list[Array]:
    """The running statistics after one step."""
    trained: Any = copy.deepcopy(layer).train()
    trained(*args, **kwargs)
    return [trained.running_mean.numpy(), trained.running_var.numpy()]


def without_gaps(gaps: Mapping[str, Array]) -> Callable[[nn.Module], nn.Module]:
    """Return what takes the gap of each layer out of a twin, and rounds each output otherwise.

    How far the twin's outputs move shows what the gaps of its layers, and their rounding, grow to on the way through the network:
    Monte Carlo arithmetic, D. S. Parker, 1997, "Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic".

    Args:
        gaps: What is added to the layers' outputs, by reference.
    """
    random = torch.Generator().manual_seed(0)

    def corrected(reference: str, output: torch.Tensor) -> torch.Tensor:
        if reference not in gaps:
            return output
        gap = torch.from_numpy(gaps[reference])
        gap = torch.where(gap.isfinite(), gap, 0.0)
        noise = torch.rand(output.shape, generator=random, dtype=output.dtype) - 0.5
        return output + gap + output * noise * _ROUNDING

    def hook(nodes: Iterator[Node]) -> Callable[..., Any]:
        def correct(_module: nn.Module, _args: Any, outputs: Any) -> Any:
            name = next(nodes).name
            if not isinstance(outputs, tuple):
                return corrected(name, outputs)
            references = [f"{name}:{number}" if number else name for number in range(len(outputs))]
            return tuple(map(corrected, references, outputs))

        return correct

    def wrap(twin: nn.Module) -> nn.Module:
        calls: dict[str, list[Node]] = {}
        for node in spec_of(twin).nodes:  # type: ignore[union-attr] # a twin has one
            calls.setdefault(module_path(node), []).append(node)
        for path, nodes in calls.items():
            twin.get_submodule(path).register_forward_hook(hook(iter(nodes)))
        return twin

    return wrap


def predict(
    module: nn.Module,
    batch: Any,
    dtype: str = "float64",
    *,
    channels_first: bool = False,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
) -> Any:
    """Run a copy of a module in eval mode and one precision.

    Args:
        module: Any module; one from `from_spec` is called as its spec says, another one with a list or tuple as arguments
            and with a mapping as keyword arguments.
        batch: Numpy arrays, channels last.
        dtype: `"float64"` or another float type.
        channels_first: Whether a module that is no twin is given arrays of four axes and more channels first, and returns them so.
        wrap: What is done to the copy before it is called.

    Returns:
        Numpy arrays in the nest that the module returns, channels last.
    """
    precision = getattr(torch, dtype)
    with torch.no_grad(), _DefaultDtype(precision):
        copied = copy.deepcopy(module).eval().to(precision)
        run = copied if wrap is None else wrap(copied)
        leaves, structure = flatten(batch)
        tensors = [_tensor(leaf, precision) for leaf in leaves]
        if isinstance(copied, Twin):
            return _call_twin(run, copied, unflatten(structure, tensors))
        if channels_first:
            tensors = [one.movedim(-1, 1) if one.dim() > 3 else one for one in tensors]
        found, returned = flatten(_call(run, unflatten(structure, tensors)))
        if channels_first:
            found = [one.movedim(1, -1) if one.dim() > 3 else one for one in found]
        return unflatten(returned, [one.numpy() for one in found])


def _call(run: nn.Module, nest: Any) -> Any:
    if isinstance(nest, Mapping):
        return run(**nest)
    return run(*nest) if isinstance(nest, list | tuple) else run(nest)


def _call_twin(run: nn.Module, twin: Twin, nest: Any) -> Any:
    spec, moved = twin.description.spec, twin.description.moved
    arrays = spec.bind(nest)
    args = [
        arrays[one.name].movedim(-1, 1) if moved.get(one.name) else arrays[one.name] for one in spec.inputs
    ]
    return _numpy_of_twin(run(*args), spec.outputs, moved)


def _numpy_of_twin(outputs: Any, references: Any, moved: Mapping[str, int]) -> Any:
    if isinstance(references, dict):
        return {key: _numpy_of_twin(outputs[key], ref, moved) for key, ref in references.items()}
    if isinstance(references, list):
        return [_numpy_of_twin(one, ref, moved) for one, ref in zip(outputs, references, strict=True)]
    return (outputs.movedim(1, -1) if moved.get(references) else outputs).numpy()


def _tensor(leaf: Any, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.as_tensor(leaf)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _double(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).eval().double()


class _DefaultDtype:
    """Make a float type torch's default, for numbers that become tensors on the way."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype, self.before = dtype, torch.get_default_dtype()

    def __enter__(self) -> None:
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)
