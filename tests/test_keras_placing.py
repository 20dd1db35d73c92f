"""Placed Keras models: what only Keras has, such as masks, shared layers, losses inside, `fit` and files."""

import pickle

import keras
import numpy as np
import pytest
from kits import numbers

from isobatch import ModelError, data_parallel, device_parallel
from isobatch.compare import compare

pytestmark = [
    pytest.mark.usefixtures("keras_float64"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.skipif(
        keras.config.backend() != "tensorflow", reason="on Keras's torch backend all CPU devices are one"
    ),
]
L = keras.layers


def assert_same(actual, expected, allowed=1e-12):
    verdict = compare(actual, expected, allowed)
    assert verdict.passed, str(verdict)


def lstm(name):
    return L.LSTM(5, name=name)


def sentences(encoder=L.GlobalAveragePooling1D):
    """One embedding and one encoder with a mask for two inputs, dropout, batch statistics and a loss inside."""
    keras.utils.set_random_seed(3)
    a, b = keras.Input((6,), dtype="int32", name="a"), keras.Input((6,), dtype="int32", name="b")
    embed = L.Embedding(9, 5, mask_zero=True, name="embed")
    encode = encoder(name="encode")
    side = keras.Sequential(
        [
            keras.Input((5,)),
            L.Dense(4, use_bias=False, name="inner"),
            L.BatchNormalization(name="norm"),
            L.Dropout(0.4, seed=5, name="drop"),
        ],
        name="side",
    )
    left, right = encode(embed(a)), side(encode(embed(b)) * 0.5)
    joined = L.Concatenate(name="join")([left, right])
    out = L.Dense(2, activity_regularizer="l2", kernel_regularizer="l2", name="out")(joined)
    return keras.Model([a, b], {"scores": out, "left": left})


PLACEMENT = {
    "embed": "cpu:1",
    "encode": "cpu:2",
    "side.inner": "cpu:3",
    "side.norm": "cpu:1",
    "join": "cpu:2",
}


def batch(rows=7, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 9, (rows, 6)) for _ in range(2)], {
        "scores": numbers(rows, 2, seed=seed),
        "left": numbers(rows, 5, seed=seed),
    }


def trained(model, steps=20, optimizer="adam"):
    model.compile(optimizer, "mse")
    losses = [model.train_on_batch(*batch(seed=step), return_dict=True)["loss"] for step in range(steps)]
    return losses, [np.asarray(variable.value) for variable in model.variables]


@pytest.mark.slow
def test_twenty_steps_with_masks_dropout_and_running_state_are_those_of_the_unplaced_model():
    placed = device_parallel(sentences(lstm), PLACEMENT)
    x, _ = batch()
    assert_same(
        keras.tree.map_structure(np.asarray, placed(x)),
        keras.tree.map_structure(np.asarray, sentences(lstm)(x)),
    )
    expected, found = trained(sentences(lstm)), trained(placed)
    assert_same(found[0], expected[0])
    assert_same(found[1], expected[1])


@pytest.mark.slow
def test_both_kinds_together_train_as_so_many_replicas():
    groups = [("cpu:0", "cpu:1"), ("cpu:2", "cpu:3")]
    placement = {"embed": 0, "encode": 1, "side.norm": 0}
    both = data_parallel(sentences(), groups, placement=placement, micro_batches=2)
    replicas = data_parallel(sentences(), ["cpu:0"] * 4)
    found, expected = trained(both, 4, "sgd"), trained(replicas, 4, "sgd")
    assert_same(found[0], expected[0])
    assert_same(found[1], expected[1])


@pytest.mark.slow
def test_files_are_the_templates(tmp_path):
    placed, plain = device_parallel(sentences(), PLACEMENT), sentences()
    for name, model in {"placed": placed, "plain": plain}.items():
        trained(model, 3)
        model.save(tmp_path / f"{name}.keras")
    loaded, expected = (keras.models.load_model(tmp_path / f"{name}.keras") for name in ("placed", "plain"))
    assert type(loaded) is type(plain)
    x, y = batch(seed=9)
    assert_same(loaded.train_on_batch(x, y), expected.train_on_batch(x, y))  # with the optimizer's state
    placed.save_weights(tmp_path / "m.weights.h5")
    plain = sentences()
    plain.load_weights(tmp_path / "m.weights.h5")
    assert_same(plain.predict(x, verbose=0)["scores"], placed.predict(x, verbose=0)["scores"])
    assert [layer.name for layer in placed.layers] == [layer.name for layer in plain.layers]
    assert [variable.path for variable in placed.variables] == [
        variable.path for variable in placed.template.variables
    ]


def test_weights_move_to_their_parts_and_the_template_goes_on_working():
    template = sentences()
    x, y = batch()
    template.compile("sgd", "mse")
    before = template.predict(x, verbose=0)["scores"]  # compiled with the weights where they were
    placed = device_parallel(template, PLACEMENT)
    where = {variable.path: variable.value.device[-5:] for variable in template.variables}
    assert where["embed/embeddings"] == "CPU:1"
    assert {device for path, device in where.items() if "/norm/" in path} == {"CPU:1"}
    assert where["out/kernel"] == "CPU:2"  # where its input comes from
    placed.compile("sgd", "mse")
    placed.train_on_batch(x, y)
    after = template.predict(x, verbose=0)["scores"]
    assert np.abs(after - before).max() > 1e-6
    assert_same(after, placed.predict(x, verbose=0)["scores"])


def test_the_template_is_not_grown_into():
    template = sentences()
    nodes = {layer.name: len(layer._inbound_nodes) for layer in template.layers}
    for _ in range(2):
        device_parallel(template, PLACEMENT)
    assert {layer.name: len(layer._inbound_nodes) for layer in template.layers} == nodes


def test_summary_shows_the_devices(capsys):
    device_parallel(sentences(), PLACEMENT).summary()
    assert "encode-cpu2" in capsys.readouterr().out


def test_mixed_precision_and_a_nested_model_as_a_whole():
    keras.utils.set_random_seed(0)
    inner = keras.Sequential(
        [keras.Input((4,)), L.Dense(3, dtype="mixed_bfloat16"), L.Dense(2, dtype="float64")], name="inner"
    )
    x = keras.Input((4,))
    model = keras.Model(x, inner(x))
    expected = np.asarray(model(numbers(3, 4)))
    assert_same(np.asarray(device_parallel(model, {"inner": "cpu:1"})(numbers(3, 4))), expected)


def test_models_without_a_graph_are_refused():
    class Own(keras.Model):
        def call(self, x):
            return x

    model = Own()
    model(np.ones((2, 3)))
    with pytest.raises(ModelError, match=r"functional or Sequential model.*keras.Input"):
        device_parallel(model, {"x": "cpu:0"})
    with pytest.raises(ModelError, match="built model"):
        device_parallel(keras.Sequential([L.Dense(1)]), {"dense": "cpu:0"})
    with pytest.raises(ModelError, match="template"):
        device_parallel(data_parallel(sentences(), 2), {"embed": "cpu:0"})


def test_auto_wants_an_example_where_lengths_are_open():
    x = keras.Input((None, 3))
    model = keras.Model(x, L.Dense(2)(L.GRU(4, name="gru")(x)))
    with pytest.raises(ModelError, match="example="):
        device_parallel(model, "auto", 2)
    placed = device_parallel(model, "auto", 2, example=numbers(2, 5, 3), balance="memory")
    assert_same(np.asarray(placed(numbers(3, 4, 3))), np.asarray(model(numbers(3, 4, 3))))


def test_copies_and_pickles_stay_placed():
    placed = device_parallel(sentences(), PLACEMENT)
    both = data_parallel(sentences(), [("cpu:0", "cpu:1")], placement={"embed": 0, "out": 1}, micro_batches=2)
    x, _ = batch()
    for model in (placed, both):
        again = pickle.loads(pickle.dumps(model))  # noqa: S301 - just written
        assert type(again) is type(model)
        assert again.devices == model.devices
        assert_same(again.predict(x, verbose=0)["scores"], model.predict(x, verbose=0)["scores"])
