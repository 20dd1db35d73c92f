"""Parts of a model on different devices: the same numbers as without, in both frameworks."""

import json
import re
import threading

import numpy as np
import pytest
from kits import FLOAT64_GAP, numbers

import isobatch
from isobatch import DeviceError, ModelError, Placement, data_parallel, device_parallel
from isobatch.compare import compare

# Keras 3.15 on numpy 2 when it reads weights: https://github.com/keras-team/keras/issues/20847
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

PARTS = {"hidden": "cpu:1", "norm": "cpu:2", "out": "cpu:3"}
TOWERS = {"left": "cpu:1", "right": "cpu:2"}


@pytest.fixture(autouse=True)
def _on_tensorflow(request):
    if "backend" in request.fixturenames and request.getfixturevalue("backend").name == "keras":
        import keras

        if keras.config.backend() != "tensorflow":
            pytest.skip("on Keras's torch backend all CPU devices are one")


def assert_same(actual, expected):
    verdict = compare(actual, expected, FLOAT64_GAP)
    assert verdict.passed, str(verdict)


def without_noise(gradients):
    """Leave out the bias before the BatchNorm: its gradient is zero but for rounding."""
    return {name: gradient for name, gradient in gradients.items() if name != "hidden.bias"}


@pytest.mark.parametrize(
    "placement", [{"hidden": "cpu:1"}, {"hidden": "cpu:1", "out": "cpu:2"}, {"*": "cpu:3"}]
)
def test_outputs_and_gradients_are_those_of_the_unplaced_model(backend, placement):
    placed = device_parallel(backend.mlp(), placement)
    for batch in (1, 2, 7):
        x = numbers(batch, 4)
        assert_same(backend.call(placed, x), backend.call(backend.mlp(), x))
        assert_same(backend.gradients(placed, x), backend.gradients(backend.mlp(), x))


def test_running_state_is_that_of_the_unplaced_model(backend):
    plain, template = backend.mlp(norm=True), backend.mlp(norm=True)
    placed = device_parallel(template, PARTS)
    for seed in range(3):
        x = numbers(5, 4, seed=seed)
        assert_same(without_noise(backend.gradients(placed, x)), without_noise(backend.gradients(plain, x)))
    assert_same(list(backend.state(template)), list(backend.state(plain)))
    before = backend.state(template)
    backend.call(placed, numbers(5, 4))
    assert all(np.array_equal(a, b) for a, b in zip(before, backend.state(template), strict=True))


def test_containers_of_inputs_and_outputs(backend):
    batch = {"a": numbers(5, 4), "b": numbers(5, 3)}
    placed = device_parallel(backend.two_inputs(), TOWERS)
    assert_same(backend.call(placed, batch), backend.call(backend.two_inputs(), batch))


def test_weights_names_and_files_are_the_templates(backend):
    template = backend.mlp(norm=True)
    before = [id(variable) for variable in backend.variables(template)]
    placed = device_parallel(template, PARTS)
    assert [id(variable) for variable in backend.variables(placed)] == before
    assert isinstance(placed, type(template)) if backend.name == "keras" else placed.module is template


def test_the_placement_can_be_printed_and_given_back(backend, tmp_path):
    placed = device_parallel(backend.mlp(), {"hidden": "cpu:1", "out": "/device:CPU:2"})
    assert str(placed.placement) == "part    device\nhidden  cpu:1\nout     cpu:2"
    placed.placement.save(tmp_path / "p.json")
    again = device_parallel(backend.mlp(), Placement.load(tmp_path / "p.json"))
    assert dict(again.placement) == dict(placed.placement)
    x = numbers(3, 4)
    assert_same(backend.call(again, x), backend.call(backend.mlp(), x))


def test_wrong_requests_change_nothing(backend):
    model = backend.mlp()
    with pytest.raises(ModelError, match=r"'hiden' matches none. There are: hidden"):
        device_parallel(model, {"hiden": "cpu:0"})
    with pytest.raises(DeviceError, match="gpu:7"):
        device_parallel(model, {"hidden": "gpu:7"})
    with pytest.raises(ModelError, match="'hidden' named by 'h\\*' and by 'hidden'"):
        device_parallel(model, {"h*": "cpu:0", "hidden": "cpu:1"})
    with pytest.raises(ModelError, match="'auto'"):
        device_parallel(model, "hidden")
    with pytest.raises(ValueError, match="balance"):
        device_parallel(model, "auto", 2, balance="speed")
    with pytest.raises(DeviceError, match="two or more devices"):
        device_parallel(model, "auto", ["cpu:0"], example=backend.array(numbers(2, 4)))
    with pytest.raises(ModelError, match="on one device yet"):
        device_parallel(device_parallel(model, {"hidden": "cpu:0"}), {"hidden": "cpu:1"})
    x = numbers(3, 4)
    assert_same(backend.call(model, x), backend.call(backend.mlp(), x))


@pytest.mark.parametrize("balance", ["time", "memory"])
def test_auto_puts_independent_branches_on_different_devices(backend, balance):
    batch = {"a": numbers(64, 4), "b": numbers(64, 3)}
    example = {name: backend.array(x) for name, x in batch.items()}
    placed = device_parallel(backend.two_inputs(), "auto", 2, balance=balance, example=example)
    if balance == "memory":  # times of so small parts are those of the machine's moods
        assert placed.placement["left"] != placed.placement["right"]
    assert_same(backend.call(placed, batch), backend.call(backend.two_inputs(), batch))


def test_a_chain_becomes_consecutive_stages(backend):
    placed = device_parallel(backend.mlp(), "auto", 2, balance="memory", example=backend.array(numbers(2, 4)))
    devices = [device.index for device in placed.placement.values()]
    assert devices == sorted(devices)
    assert set(devices) == {0, 1}


GROUPS = [("cpu:0", "cpu:1"), ("cpu:2", "cpu:3")]


@pytest.mark.parametrize(
    ("placement", "micro_batches"), [({"hidden": 0, "out": 1}, 1), ({"hidden": "cpu:0", "norm": "cpu:1"}, 2)]
)
def test_both_kinds_together_are_so_many_replicas(backend, placement, micro_batches):
    model = backend.mlp(norm=True)
    parallel = data_parallel(model, GROUPS, placement=placement, micro_batches=micro_batches)
    reference = backend.mlp(norm=True)
    replicas = backend.parallel(reference, 2 * micro_batches)
    for batch in (1, 3, 8, 11):  # some replicas have no rows at first
        x = numbers(batch, 4, seed=batch)
        assert_same(backend.call(parallel, x), backend.call(replicas, x))
        if batch >= 4 * micro_batches:
            found, expected = backend.gradients(parallel, x), backend.gradients(replicas, x)
            assert_same(without_noise(found), without_noise(expected))
    assert_same(list(backend.state(model)), list(backend.state(reference)))


def test_micro_batches_without_batch_statistics_are_the_whole_batch(backend):
    parallel = data_parallel(
        backend.mlp(), [("cpu:0", "cpu:1")], placement={"hidden": 0, "out": 1}, micro_batches=4
    )
    x = numbers(10, 4)
    assert_same(backend.gradients(parallel, x), backend.gradients(backend.mlp(), x))


def test_wrong_groups_are_refused(backend):
    with pytest.raises(DeviceError, match="group of devices for each replica"):
        data_parallel(backend.mlp(), 2, placement={"hidden": 0})
    with pytest.raises(DeviceError, match="0 to 1, got 2"):
        data_parallel(backend.mlp(), GROUPS, placement={"hidden": 2})
    with pytest.raises(DeviceError, match="at least 2 devices"):
        data_parallel(backend.mlp(), [GROUPS[0], ("cpu:2",)], placement={"hidden": 0, "out": 1})
    with pytest.raises(ValueError, match="micro_batches"):
        data_parallel(backend.mlp(), GROUPS, placement={"hidden": 0}, micro_batches=0)
    with pytest.raises(ValueError, match="only with a placement"):
        data_parallel(backend.mlp(), 2, micro_batches=2)


def test_a_failing_part_is_named(backend):
    model = backend.failing(rank=None)
    placed = device_parallel(model, {"*": "cpu:1"})
    with pytest.raises(ValueError, match="planted") as caught:
        placed(backend.array(numbers(2, 4)))
    assert any(re.fullmatch(r"in part '\w+' on cpu:1", note) for note in caught.value.__notes__)
    parallel = data_parallel(model, GROUPS, placement={"*": 1})
    with pytest.raises(ValueError, match="planted") as caught:
        parallel(backend.array(numbers(4, 4)))
    assert any(note.startswith("in replica 0 on cpu:") for note in caught.value.__notes__)


def test_two_placements_of_one_model_work_in_two_threads(backend):
    model = backend.mlp()
    placed = [device_parallel(model, {"hidden": f"cpu:{i}", "out": f"cpu:{1 - i}"}) for i in range(2)]
    x = numbers(5, 4)
    expected = backend.call(backend.mlp(), x)
    found = [[], []]

    def work(i):
        for _ in range(20):
            found[i].append(backend.call(placed[i], x))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(one) for one in found] == [20, 20]
    assert_same(found, [[expected] * 20] * 2)
    if backend.name == "torch":  # nothing is left in the template
        assert not any("forward" in vars(part) for part in model.modules())


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(backend, rows):
    x = numbers(rows, 4)
    expected = backend.call(backend.mlp(), x)
    assert_same(backend.call(device_parallel(backend.mlp(), {"hidden": "cpu:1"}), x), expected)
    both = data_parallel(backend.mlp(), GROUPS, placement={"hidden": 0, "out": 1}, micro_batches=3)
    assert_same(backend.call(both, x), expected)  # six replicas


def test_the_same_placement_of_a_model_and_its_twin_gives_the_same(both, keras_float64):
    import keras
    import torch

    layers = keras.layers
    keras.utils.set_random_seed(0)
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    tower = keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, "tanh", name="first"), layers.BatchNormalization(name="norm")],
        name="tower",
    )
    joined = layers.Concatenate(name="join")([tower(a), tower(b), layers.Dense(3, name="side")(a)])
    model = keras.Model([a, b], layers.Dense(2, name="out")(joined))
    placement = {"tower.first": "cpu:1", "tower.norm": "cpu:2", "side": "cpu:3", "out": "cpu:0"}
    twin = isobatch.twin(model)
    placed, placed_twin = device_parallel(model, placement), device_parallel(twin, placement)
    batch = [numbers(6, 4, seed=seed) for seed in (1, 2)]
    theirs = placed_twin.eval()(*map(torch.tensor, batch))
    assert_same(theirs.detach().numpy(), np.asarray(placed(batch)))
    placed.compile("sgd", "mse")
    placed.fit(batch, numbers(6, 2, seed=3), epochs=3, verbose=0)
    isobatch.copy_weights(placed.template, twin)  # trained in Keras, read in torch
    assert_same(placed_twin(*map(torch.tensor, batch)).detach().numpy(), np.asarray(placed(batch)))


def test_parity_takes_a_placement(both, tmp_path, capsys):
    import keras

    from isobatch.cli import main

    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, name="first"), keras.layers.Dense(2, name="last")]
    )
    model.save(tmp_path / "m.keras")
    (tmp_path / "p.json").write_text(json.dumps({"first": "cpu:1", "last": "cpu:0"}))
    arguments = [
        "parity",
        str(tmp_path / "m.keras"),
        "--replicas",
        "none",
        "--placement",
        str(tmp_path / "p.json"),
    ]
    assert main([*arguments, "--html", str(tmp_path / "r.html"), "--json", str(tmp_path / "r.json")]) == 0
    assert "parts on cpu:1, cpu:0" in (tmp_path / "r.html").read_text()
    runs = json.loads((tmp_path / "r.json").read_text())["verdict"]["parallel"]
    assert [run["placement"] for run in runs] == [{"first": "cpu:1", "last": "cpu:0"}]
    capsys.readouterr()
    (tmp_path / "p.json").write_text(json.dumps({"middle": "cpu:1"}))
    assert main(arguments) == 2
    assert "'middle' matches none" in capsys.readouterr().err
