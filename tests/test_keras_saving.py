"""Files are the template's own: they open with plain Keras, in a process that never heard of this library."""

import copy
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

keras = pytest.importorskip("keras")
h5py = pytest.importorskip("h5py")

import isobatch  # noqa: E402

layers = keras.layers
# Keras's own, wherever it turns a variable into a numpy array.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def parallel_of(model, replicas=2):
    return isobatch.data_parallel(model, [f"cpu:{rank}" for rank in range(replicas)])


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


X, Y = numbers(12, 4), numbers(12, 3)


def functional():
    x = keras.Input((4,), name="x")
    block = [
        layers.Dense(5),
        layers.BatchNormalization(),
    ]  # no Dropout: Keras does not save the state of its seeds
    block = keras.Sequential(block, name="block")
    return keras.Model(x, layers.Dense(3, name="out")(block(x)), name="net")


def sequential():
    return keras.Sequential([keras.Input((4,)), layers.Dense(5, kernel_regularizer="l2"), layers.Dense(3)])


@keras.saving.register_keras_serializable("isobatch_tests.saving")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._hidden = layers.Dense(5)
        self.heads = [layers.BatchNormalization(), layers.Dense(3)]

    def call(self, x, training=None):
        return self.heads[1](self.heads[0](self._hidden(x), training=training))


def subclassed():
    model = Subclassed()
    model(X)
    return model


MODELS = {"functional": functional, "sequential": sequential, "subclassed": subclassed}


@pytest.fixture(
    params=[
        "functional",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sequential", "subclassed")),
    ]
)
def trained(request):
    """A template, its wrapper after some steps of Adam, and what it answers."""
    keras.utils.set_random_seed(0)
    model = MODELS[request.param]()
    parallel = parallel_of(model)
    parallel.compile("adam", "mse", metrics=["mae"])
    parallel.fit(X, Y, batch_size=5, epochs=2, verbose=0)
    return model, parallel, np.asarray(model(X))


def members(path):
    """Names of all groups and arrays of a weight file, or of the one in an archive."""
    raw = zipfile.ZipFile(path).read("model.weights.h5") if zipfile.is_zipfile(path) else path.read_bytes()
    names = []
    h5py.File(io.BytesIO(raw)).visit(names.append)
    return names


def slots(optimizer):
    return [np.asarray(v) for v in optimizer.variables]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("how", ["method", "function"])
def test_the_archive_is_the_one_the_template_writes(trained, tmp_path, how):
    model, parallel, _ = trained
    path, plain = tmp_path / "parallel.keras", tmp_path / "plain.keras"
    parallel.save(path) if how == "method" else keras.saving.save_model(parallel, path)
    assert not model.compiled, "saving left something in the template"
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(X, Y, verbose=0)
    model.save(plain)
    assert members(path) == members(plain)
    ours, theirs = (json.loads(zipfile.ZipFile(p).read("config.json")) for p in (path, plain))
    assert [c.pop("compile_config")["optimizer"]["class_name"] for c in (ours, theirs)] == ["Adam", "Adam"]
    assert ours == theirs
    assert "isobatch_keras" not in json.dumps(ours)


def test_plain_keras_goes_on_training(trained, tmp_path):
    _, parallel, answer = trained
    parallel.save(tmp_path / "model.keras")
    model = keras.saving.load_model(tmp_path / "model.keras")
    assert not hasattr(model, "devices")
    assert np.array_equal(model(X), answer)
    assert same(slots(model.optimizer), slots(parallel.optimizer))
    assert float(model.optimizer.iterations) == 6
    model.fit(X, Y, verbose=0)


@pytest.mark.slow
def test_a_fresh_process_without_this_library_opens_it(tmp_path):
    keras.utils.set_random_seed(0)
    model = functional()
    parallel = parallel_of(model)
    parallel.compile("adam", "mse")
    parallel.fit(X, Y, verbose=0)
    parallel.save(tmp_path / "model.keras")
    parallel.save_weights(tmp_path / "model.weights.h5")
    np.savez(tmp_path / "expected.npz", x=X, y=np.asarray(model(X)))
    program = """
import importlib.util, numpy as np, keras
assert importlib.util.find_spec("isobatch") is None
data = np.load("expected.npz")
model = keras.saving.load_model("model.keras", safe_mode=True)
assert type(model).__name__ == "Functional" and int(model.optimizer.iterations) == 1
assert np.array_equal(model(data["x"]), data["y"])
model.set_weights([0 * w for w in model.get_weights()])
model.load_weights("model.weights.h5")
assert np.array_equal(model(data["x"]), data["y"])
"""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        # -S and the one path: an editable install of this library must not be found
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path.append({str(Path(keras.__file__).parent.parent)!r})\n{program}",
        ],
        cwd=tmp_path,
        env={**clean, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_load_makes_it_parallel_again_and_goes_on(trained, tmp_path, replicas):
    _, parallel, answer = trained
    parallel.save(tmp_path / "model.keras")
    again = isobatch.load(tmp_path / "model.keras", devices=[f"cpu:{rank}" for rank in range(replicas)])
    assert len(again.devices) == replicas
    assert np.allclose(again(X), answer, atol=1e-6)
    assert same(slots(again.optimizer), slots(parallel.optimizer))
    histories = [m.fit(X, Y, batch_size=5, shuffle=False, verbose=0).history for m in (parallel, again)]
    assert set(histories[0]) == set(histories[1])
    assert int(again.optimizer.iterations) == int(parallel.optimizer.iterations) == 9
    if replicas == 2:  # the same shards and slots: the same numbers
        assert same(again.get_weights(), parallel.get_weights())


@pytest.mark.filterwarnings(
    "ignore:Skipping variable loading for optimizer"
)  # Keras's own: the template's file has none
def test_weight_files_exchange_in_both_directions(trained, tmp_path):
    model, parallel, answer = trained
    ours, theirs = tmp_path / "ours.weights.h5", tmp_path / "theirs.weights.h5"
    parallel.save_weights(ours)
    model.load_weights(ours)
    model.save_weights(theirs)
    zeros = [np.zeros_like(w) for w in model.get_weights()]
    for path in (ours, theirs):
        for reader in (model, parallel):
            model.set_weights(zeros)
            reader.load_weights(path)
            assert np.array_equal(model(X), answer)
    assert [name for name in members(ours) if not name.startswith("optimizer")] == members(theirs)


def test_hdf5_opens_with_plain_keras(tmp_path):
    model = functional()
    parallel = parallel_of(model)
    parallel.compile(
        "sgd", keras.losses.MeanSquaredError()
    )  # by name Keras itself cannot load it from this format
    parallel.fit(X, Y, verbose=0)
    parallel.save(tmp_path / "model.h5")
    again = keras.saving.load_model(tmp_path / "model.h5")
    assert type(again) is type(model)
    assert np.array_equal(again(X), model(X))
    assert isobatch.load(tmp_path / "model.h5", devices=2).devices


@pytest.mark.slow
def test_checkpoint_and_backup(tmp_path):
    keras.utils.set_random_seed(0)
    model = functional()
    parallel = parallel_of(model)
    parallel.compile("adam", "mse")
    best = keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", monitor="loss", save_best_only=True)
    weights = keras.callbacks.ModelCheckpoint(tmp_path / "w.weights.h5", save_weights_only=True)
    parallel.fit(X, Y, epochs=2, verbose=0, callbacks=[best, weights])
    assert keras.saving.load_model(tmp_path / "best.keras").optimizer is not None
    model.load_weights(tmp_path / "w.weights.h5")

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    seen = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            seen.append((epoch, int(self.model.optimizer.iterations)))

    backup = str(tmp_path / "backup")
    with pytest.raises(KeyboardInterrupt):
        parallel.fit(
            X, Y, epochs=4, verbose=0, callbacks=[keras.callbacks.BackupAndRestore(backup), Interrupt()]
        )
    fresh = parallel_of(functional(), 3)
    fresh.compile("adam", "mse")
    fresh.fit(X, Y, epochs=4, verbose=0, callbacks=[keras.callbacks.BackupAndRestore(backup), Watch()])
    assert seen == [(2, 4), (3, 5)], "resumes at epoch 2 after the 2 + 2 steps before"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["functional", "sequential"]
)  # Keras itself leaves out layers that are in a list
def test_a_checkpoint_of_tensorflow_is_the_templates(kind, tmp_path):
    tf = pytest.importorskip("tensorflow")
    keras.utils.set_random_seed(0)
    plain, parallel = MODELS[kind](), parallel_of(MODELS[kind]())
    for number, (source, target) in enumerate([(parallel, plain), (plain, parallel)]):
        for model in (source, target):
            model.compile("adam", "mse")
            model.train_on_batch(X, Y)
        path = tf.train.Checkpoint(model=source).save(tmp_path / str(number))
        tf.train.Checkpoint(model=target).restore(path).assert_consumed()
        everything = [[*model.variables, *model.optimizer.variables] for model in (source, target)]
        for a, b in zip(*everything, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_pickle_and_deepcopy_keep_it_parallel(trained):
    _, parallel, answer = trained
    for again in (pickle.loads(pickle.dumps(parallel)), copy.deepcopy(parallel)):  # noqa: S301 - just written
        assert again.devices == parallel.devices
        assert type(again) is type(parallel)
        assert np.allclose(again(X), answer, atol=1e-6)
        assert float(again.optimizer.iterations) == float(parallel.optimizer.iterations)
        again.fit(X, Y, verbose=0)
        assert not np.array_equal(again(X), parallel(X)), "the copy shares weights with the original"


def test_cloning_a_wrapper_says_what_to_write():
    with pytest.raises(isobatch.ModelError, match=r"clone_model\(parallel\.template\)"):
        keras.models.clone_model(parallel_of(functional()))


def test_export_gives_the_templates_function(tmp_path):
    import tensorflow as tf

    model = functional()
    parallel_of(model).export(str(tmp_path / "served"), verbose=False)
    served = tf.saved_model.load(str(tmp_path / "served"))
    assert np.allclose(served.serve(tf.constant(X)), model(X), atol=1e-6)


@pytest.fixture
def mixed():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


@pytest.mark.usefixtures("mixed")
def test_mixed_precision_goes_on_with_its_loss_scale(tmp_path):
    parallel = parallel_of(functional())
    parallel.compile("adam", "mse")
    parallel.fit(X, Y, verbose=0)
    parallel.save(tmp_path / "model.keras")
    again = isobatch.load(tmp_path / "model.keras", devices=["cpu:0", "cpu:1", "cpu:2"])
    assert type(again.optimizer).__name__ == type(parallel.optimizer).__name__ == "LossScaleOptimizer"
    assert same(slots(again.optimizer), slots(parallel.optimizer))
    again.fit(X, Y, verbose=0)


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.keras"):
        isobatch.load(tmp_path / "none.keras")


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_said_to_be(tmp_path, part):
    file = tmp_path / "net.keras"
    sequential().save(file)
    file.write_bytes(file.read_bytes()[: int(part * file.stat().st_size)])
    with pytest.raises(
        isobatch.ModelError, match=r"net\.keras' to be a whole \.keras archive, it is none: it was cut off"
    ):
        isobatch.load(file, devices=2)
