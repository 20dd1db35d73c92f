"""Specs as data: text, files, and what a broken or hostile file gives."""

import json
from dataclasses import replace

import numpy as np
import pytest

from isobatch.errors import SpecError
from isobatch.operations import FLOOR, Operation, find_operation, operations, register_operation
from isobatch.spec import Input, Node, Spec


def spec(**changes):
    nodes = (
        Node("hidden", "dense", ("x",), {}, {}, {"kernel": "hidden.kernel"}, "hidden", "hidden"),
        Node("parts", "split", ("hidden",), {}, {"parts": [1, 2], "axis": -1}, {}, "parts", "parts", 2),
        Node("out", "multiply", ("parts:1", 0.5), {}, {}, {}, "out", "out"),
    )
    tensors = {"hidden.kernel": np.arange(12, dtype="float32").reshape(4, 3)}
    return replace(Spec("tiny", (Input("x", (4,), "float32"),), nodes, {"y": ["out"]}, tensors), **changes)


def nodes(change):
    found = list(spec().nodes)
    change(found)
    return spec(nodes=tuple(found))


def test_text_shows_every_operation_with_its_weights():
    assert str(spec().check()).splitlines() == [
        "tiny: 3 operations, 12 weights",
        "  x: float32 (B, 4)",
        "  hidden = dense(x)  # kernel (4, 3)",
        "  parts = split(hidden, parts=[1, 2], axis=-1)",
        "  out = multiply(parts:1, 0.5)",
        "  return {y: [out]}",
    ]


def test_saved_spec_is_the_same(tmp_path):
    spec().save(tmp_path / "net")
    loaded = Spec.load(tmp_path / "net")
    assert replace(loaded, tensors={}) == replace(spec(), tensors={})
    assert np.array_equal(loaded.tensors["hidden.kernel"], spec().tensors["hidden.kernel"])
    assert loaded.tensors["hidden.kernel"].dtype == np.float32


def test_scalars_keep_their_shape(tmp_path):
    spec(tensors={**spec().tensors, "scale": np.float32(3).reshape(())}).save(tmp_path)
    assert Spec.load(tmp_path).tensors["scale"].shape == ()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (nodes(lambda n: n.__setitem__(0, replace(n[0], operation="exec"))), "operation .* got 'exec'"),
        (nodes(lambda n: n.__setitem__(0, replace(n[0], weights={"kernel": "gone"}))), "tensor 'gone'"),
        (nodes(lambda n: n.__setitem__(0, replace(n[0], weights={"gamma": "hidden.kernel"}))), "'gamma'"),
        (nodes(lambda n: n.__setitem__(1, replace(n[1], attributes={"axis": 1}))), "attributes .*'parts'"),
        (
            nodes(lambda n: n.__setitem__(0, replace(n[0], inputs=("out",)))),
            "refer to what comes before it, got 'out'",
        ),
        (nodes(lambda n: n.__setitem__(2, replace(n[2], inputs=("parts:2", 1)))), "'parts:2'"),
        (nodes(lambda n: n.reverse()), "refer to what comes before"),
        (nodes(lambda n: n.append(n[0])), "every name once .* 'hidden'"),
        (
            nodes(lambda n: n.append(replace(n[2], name="other", module="hidden"))),
            "of module 'hidden' to be alike",
        ),
        (spec(outputs=["nothing"]), "the outputs .* 'nothing'"),
        (spec(outputs=[3]), "a reference, got 3"),
    ],
)
def test_unsound_spec_is_refused(broken, message):
    with pytest.raises(SpecError, match=message):
        broken.check()


def edit(folder, change):
    path = folder / "spec.json"
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(version=2), "version 1 .* got 2"),
        (lambda body: body.pop("version"), "version 1 .* got None"),
        (lambda body: body.pop("nodes"), "whole spec .* 'nodes'"),
        (lambda body: body["nodes"][0].pop("name"), "whole spec"),
        (lambda body: body["nodes"][0].update(code="import os"), "whole spec .* 'code'"),
        (lambda body: body["nodes"][0].update(name=["a"]), "whole spec .* expected text"),
        (lambda body: body["nodes"][0].update(outputs="many"), "whole spec .* number of outputs"),
        (lambda body: body["nodes"][0].update(attributes=[]), "whole spec"),
        (
            lambda body: body["tensors"]["hidden.kernel"].__setitem__(1, [3, 4]),
            "these differ: .*hidden.kernel",
        ),
        (lambda body: body["tensors"].update(more=["float32", [1]]), "these differ: .*more"),
        (lambda body: body["nodes"][0].update(operation="__import__"), "__import__"),
    ],
)
def test_broken_file_gives_one_clear_error(tmp_path, change, message):
    spec().save(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(SpecError, match=message):
        Spec.load(tmp_path)


@pytest.mark.parametrize("name", ["spec.json", "weights.safetensors"])
def test_truncated_file_gives_one_clear_error(tmp_path, name):
    spec().save(tmp_path)
    path = tmp_path / name
    whole = path.read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:length])
        with pytest.raises(SpecError, match=name):
            Spec.load(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=name):
        Spec.load(tmp_path)


@pytest.mark.parametrize(
    ("signature", "batch", "bound"),
    [
        (None, 1, {"a": 1}),
        ("a", 1, {"a": 1}),
        (["a"], [1], {"a": 1}),
        ({"left": "a"}, {"left": 1, "extra": 2}, {"a": 1}),
    ],
)
def test_batch_is_bound_as_the_network_is_called(signature, batch, bound):
    assert Spec("n", (Input("a", (), "float32"),), (), "a", {}, signature).bind(batch) == bound


@pytest.mark.parametrize(
    ("signature", "batch"), [(["a"], [1, 2]), ({"left": "a"}, {"right": 1}), (["a"], 3), ({"left": "a"}, [1])]
)
def test_another_batch_is_refused(signature, batch):
    with pytest.raises(SpecError, match="Expected inputs as"):
        Spec("n", (Input("a", (), "float32"),), (), "a", {}, signature).bind(batch)


def test_every_operation_says_what_it_is():
    for name, operation in operations().items():
        assert name.islower()
        assert operation.meaning
        assert FLOOR <= operation.floor <= 1e-5
        assert all(operation.weights.values())


def test_a_taken_operation_is_refused():
    with pytest.raises(SpecError, match="'dense' is taken"):
        register_operation("dense", Operation("something else"))
    register_operation("dense", find_operation("dense"))
