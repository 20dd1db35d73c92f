"""`isobatch parity MODEL` and `isobatch twin MODEL`: where models and data come from, and what comes out."""

import json
import re

import keras
import numpy as np
import pytest
import torch
from twin_cases import scramble

import isobatch_torch
from isobatch.cli import main
from isobatch.errors import DataError, ModelError
from isobatch.html import render_html
from isobatch.model_parity import load_batch, load_keras_model, run_model
from isobatch.verdict import judge
from isobatch_keras import to_spec

L = keras.layers

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation", "ignore:.*HDF5.*"
)  # both of Keras when it saves

MODULE = """
import keras, torch

def model():
    keras.utils.set_random_seed(0)
    layers = [keras.Input((6, 5, 3)), keras.layers.Conv2D(4, 3, name="c"), keras.layers.Flatten(), keras.layers.Dense(2, name="d")]
    return keras.Sequential(layers, name="little")

class Port(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(48, 2)

    def forward(self, x):
        return self.head(self.conv(x).flatten(1))

def port():
    return Port()

def no_model():
    raise ValueError("planted")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine_for_tests.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def little():
    return scramble(
        keras.Sequential(
            [keras.Input((6, 5, 3), name="image"), L.Conv2D(4, 3), L.Flatten(), L.Dense(2)], name="little"
        )
    )


def test_a_function_is_held_against_its_twin(folder, capfd):
    assert (
        main(
            [
                "parity",
                "mine_for_tests:model",
                "--rows",
                "5",
                "--replicas",
                "1,2",
                "--json",
                "r.json",
                "--html",
                "r.html",
            ]
        )
        == 0
    )
    shown = capfd.readouterr()
    assert "PASS: 3 layers agree in float64" in shown.out
    assert "2 replicas, rows 3 2" in shown.out
    body = json.loads((folder / "r.json").read_text())
    assert body["passed"] is True
    assert [layer["operations"] for layer in body["verdict"]["layers"]] == [["conv"], ["flatten"], ["dense"]]
    page = (folder / "r.html").read_text()
    assert ">PASS<" in page
    assert page.count("<circle") == 3
    assert not re.search(r"<script|https?://|<link|<img", page)


@pytest.mark.parametrize("suffix", ["keras", "h5"])
def test_a_file_with_data_of_ones_own(folder, suffix, capfd):
    little().save(folder / f"net.{suffix}")
    np.savez(folder / "rows.npz", x=np.random.default_rng(0).uniform(size=(3, 6, 5, 3)))
    assert main(["parity", f"net.{suffix}", "--data", "rows.npz"]) == 0
    assert "3 rows of rows.npz" in capfd.readouterr().out


def test_a_torch_module_with_weights_of_its_own(folder, capfd):
    from mine_for_tests import model, port

    import isobatch

    module = port()
    isobatch.copy_weights(model(), module)
    torch.save(module.state_dict(), folder / "good.pt")
    arguments = [
        "parity",
        "mine_for_tests:model",
        "--torch",
        "mine_for_tests:port",
        "--layout",
        "channels_first",
    ]
    assert main([*arguments, "--torch-weights", "good.pt"]) == 0
    module.conv.bias.data[0] += 1e-5
    torch.save(module.state_dict(), folder / "bad.pt")
    capfd.readouterr()
    assert main([*arguments, "--torch-weights", "bad.pt", "--html", "r.html"]) == 1
    assert "c = conv" in capfd.readouterr().out
    assert "class=wrong" in (folder / "r.html").read_text()


def test_images_of_a_folder(folder):
    pictures = folder / "pictures"
    pictures.mkdir()
    (pictures / "notes.txt").write_text("no image")
    for number in range(3):
        keras.utils.save_img(pictures / f"{number}.png", np.full((9, 7, 3), 80 * number), scale=False)
    batch, text = load_batch(to_spec(little()), pictures, 2, 0)
    assert batch.shape == (2, 6, 5, 3)
    assert batch[1].max() == 80
    assert "2 images" in text


INITIALIZERS = {
    "kernel_initializer": {"class_name": "GlorotUniform", "config": {"seed": None}},
    "bias_initializer": {"class_name": "Zeros", "config": {}},
}


def write_as_keras_2_did(path, *, recurrent):
    """A functional model in the form that Keras 2.11 gave its files: old configuration, weights by layer and name."""
    h5py = pytest.importorskip("h5py")

    def layer(kind, name, before, **config):
        config = {"name": name, "trainable": True, "dtype": "float32", **config}
        return {"class_name": kind, "name": name, "config": config, "inbound_nodes": [[[before, 0, 0, {}]]]}

    first = {
        "batch_input_shape": [None, 8, 6],
        "dtype": "float32",
        "sparse": False,
        "ragged": False,
        "name": "input_1",
    }
    conv = {
        "filters": 4,
        "kernel_size": [3],
        "strides": [1],
        "padding": "same",
        "dilation_rate": [1],
        "groups": 1,
    }
    lstm = {
        "units": 3,
        "activation": "tanh",
        "recurrent_activation": "sigmoid",
        "time_major": False,
        "implementation": 2,
    }
    layers = [
        {"class_name": "InputLayer", "name": "input_1", "config": first, "inbound_nodes": []},
        layer("Conv1D", "conv1d", "input_1", activation="relu", use_bias=True, **conv, **INITIALIZERS),
        layer(
            "BatchNormalization",
            "norm",
            "conv1d",
            axis=[2],
            momentum=0.99,
            epsilon=0.001,
            center=True,
            scale=True,
        ),
        layer("LSTM", "reduced", "norm", **lstm)
        if recurrent
        else layer("Flatten", "reduced", "norm", data_format="channels_last"),
        layer("Dense", "dense", "reduced", units=2, activation="softmax", use_bias=True, **INITIALIZERS),
    ]
    ends = {"input_layers": [["input_1", 0, 0]], "output_layers": [["dense", 0, 0]]}
    model = {"class_name": "Functional", "config": {"name": "model", "layers": layers, **ends}}
    shapes = {
        "input_1": {},
        "conv1d": {"kernel": (3, 6, 4), "bias": (4,)},
        "norm": dict.fromkeys(("gamma", "beta", "moving_mean", "moving_variance"), (4,)),
        "reduced": {},
        "dense": {"kernel": (32, 2), "bias": (2,)},
    }
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file.attrs.update(keras_version="2.11.0", backend="tensorflow", model_config=json.dumps(model))
        group = file.create_group("model_weights")
        group.attrs.update(
            keras_version="2.11.0", backend="tensorflow", layer_names=[name.encode() for name in shapes]
        )
        for name, weights in shapes.items():
            own = group.create_group(name)
            own.attrs["weight_names"] = [f"{name}/{weight}:0".encode() for weight in weights]
            for weight, shape in weights.items():
                own.create_dataset(f"{name}/{weight}:0", data=rng.uniform(0.5, 1.5, shape).astype("float32"))


def test_files_of_keras_2_work_where_keras_3_opens_them(folder, capfd):
    write_as_keras_2_did(folder / "old.h5", recurrent=False)
    assert main(["parity", "old.h5", "--replicas", "2"]) == 0
    assert "PASS" in capfd.readouterr().out
    write_as_keras_2_did(folder / "older.h5", recurrent=True)
    assert main(["parity", "older.h5"]) == 2
    said = capfd.readouterr().err
    assert "time_major" in said  # Keras's own reason
    assert said.count("\n") == 1


def test_random_pixels_go_into_a_rescaling():
    model = keras.Sequential([keras.Input((8, 8, 3)), L.Rescaling(1 / 127.5, -1.0), L.Conv2D(2, 3)])
    batch, _ = load_batch(to_spec(model), None, 4, 0)
    assert batch.min() >= 0
    assert batch.max() > 200
    other = keras.Sequential([keras.Input((8, 8, 3)), L.Rescaling(2.0), L.Conv2D(2, 3)])
    assert load_batch(to_spec(other), None, 4, 0)[0].max() < 10


def test_random_words_fit_their_embedding():
    model = keras.Sequential([keras.Input((7,), dtype="int32"), L.Embedding(3, 4)])
    batch, text = load_batch(to_spec(model), None, 50, 1)
    assert set(np.unique(batch)) == {0, 1, 2}
    assert "seed 1" in text
    assert np.array_equal(batch, load_batch(to_spec(model), None, 50, 1)[0])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ones((2, 6, 5, 4))}, r"\(6, 5, 3\) .* got an array \(2, 6, 5, 4\)"),
        ({"a": np.ones(2), "b": np.ones(2)}, r"Expected arrays \['image'\] .* got \['a', 'b'\]"),
        ({"x": np.ones((0, 6, 5, 3))}, "got an array"),
        ({"x": np.array([{}])}, "plain arrays"),
    ],
)
def test_data_that_do_not_fit(tmp_path, arrays, message):
    np.savez(tmp_path / "rows.npz", **arrays)
    with pytest.raises(
        (DataError, ValueError), match=message if "plain" not in message else "plain arrays|allow_pickle"
    ):
        load_batch(to_spec(little()), tmp_path / "rows.npz", 8, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.keras", "there is no 'absent.keras'"),
        ("nothing_of_that_name", "MobileNetV3Small"),
        ("absent_module:f", "ModuleNotFoundError"),
        ("mine_for_tests:nothing", "AttributeError"),
        ("mine_for_tests:no_model", "planted"),
    ],
)
def test_models_that_are_not_there(folder, name, message, capfd):
    with pytest.raises(ModelError, match=message):
        load_keras_model(name)
    assert main(["parity", name]) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_a_broken_file_gives_kerass_reason_in_one_line(folder, capfd):
    (folder / "broken.keras").write_bytes(b"nonsense")
    assert main(["twin", "broken.keras", "-o", "out"]) == 2
    shown = capfd.readouterr().err
    assert shown.count("\n") == 1
    assert "that Keras" in shown


def test_the_written_twin_is_the_model(folder, capfd):
    model = little()
    model.save(folder / "net.keras")
    assert main(["twin", "net.keras", "-o", "out"]) == 0
    assert "3 operations" in capfd.readouterr().out
    verdict = judge(model, isobatch_torch.from_spec(folder / "out"), np.ones((2, 6, 5, 3)))
    assert verdict.passed, str(verdict)


def test_options_of_a_model_need_one(capfd):
    assert main(["parity", "--html", "r.html"]) == 2
    assert "Expected a MODEL" in capfd.readouterr().err


def test_report_of_an_inconclusive_run(folder):
    report = run_model("mine_for_tests:model")
    inconclusive = type(report)(
        "<net>",
        "its twin",
        report.data,
        type(report.verdict)("INCONCLUSIVE", reason="a <layer>"),
        report.seconds,
        report.versions,
    )
    page = render_html(inconclusive)
    assert "INCONCLUSIVE" in page
    assert "<net>" not in page
    assert "&lt;layer&gt;" in page
