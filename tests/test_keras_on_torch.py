"""Keras on its torch backend: the same values, state, errors and files, and TensorFlow stays out.

Keras chooses its backend once in a process, so all of it runs in one of its own.
"""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("keras")
pytest.importorskip("torch")

PROGRAM = """
import sys, warnings
import isobatch, keras, numpy as np, torch
assert keras.config.backend() == "torch"
isobatch.virtual_devices(4)  # nothing to do here, and no error
layers = keras.layers
keras.config.set_floatx("float64")
to_numpy = keras.ops.convert_to_numpy

plain = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
isobatch.data_parallel(plain, 2)(np.ones((5, 3)))
assert "tensorflow" not in sys.modules  # Keras's own set_random_seed and fit load it

def gap(a, b):
    pairs = zip(keras.tree.flatten(a), keras.tree.flatten(b), strict=True)
    return max(float(np.abs(np.asarray(x, float) - np.asarray(y, float)).max(initial=0)) for x, y in pairs)

class Exact(layers.Layer):  # Dense(dtype="float64") rounds its product to float32 on torch
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], self.units), regularizer="l2")

    def call(self, x):
        return x @ self.kernel.value

class AddLoss(layers.Layer):
    def call(self, x):
        self.add_loss(mean(x**2))  # an activity regulariser would be computed in float32
        return x

def mean(x):  # keras.ops.mean computes in float32 on torch
    return keras.ops.sum(x) / keras.ops.sum(keras.ops.ones_like(x))

def network(norm=True):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,), name="x")
    x = Exact(5, name="hidden")(inputs)
    x = AddLoss()(x)
    x = layers.BatchNormalization(name="norm", momentum=0.9)(x) if norm else x
    return keras.Model(inputs, {"out": Exact(3, name="out")(x), "loss": mean(x)})

def gradients(model, owner, x):
    owner.zero_grad()
    output = model(x, training=True)
    (sum(torch.sum(v**2) for v in output.values()) + sum(model.losses)).backward()
    return [v.value.grad.numpy().copy() for v in owner.trainable_variables]

x = np.random.default_rng(0).standard_normal((13, 4))
for replicas in (1, 2, 3, 4):
    model = network(norm=False)
    parallel = isobatch.data_parallel(model, replicas)
    for rows in range(1, 3 * replicas + 1):
        expected, output = model(x[:rows]), parallel(x[:rows])
        assert set(output) == {"out", "loss"}
        assert gap([to_numpy(output[k]) for k in ("out", "loss")], [to_numpy(expected[k]) for k in ("out", "loss")]) < 1e-12
        assert gap(gradients(parallel, model, x[:rows]), gradients(model, model, x[:rows])) < 1e-12
    assert parallel(x[:0])["out"].shape == (0, 3)

for policy in ("merge", "first", "sequential"):
    model, reference = network(), network()
    isobatch.data_parallel(model, 3, state=policy)(x, training=True)
    parts = [x[:5], x[5:9], x[9:]]
    if policy == "merge":
        hidden = to_numpy(reference.get_layer("hidden")(x))
        expected = [0.1 * hidden.mean(0), 0.9 + 0.1 * hidden.var(0)]
    else:
        for part in parts[:1] if policy == "first" else parts:
            reference(part, training=True)
        expected = reference.get_layer("norm").get_weights()[2:]
    assert gap(model.get_layer("norm").get_weights()[2:], expected) < 1e-6, policy  # BatchNormalization too is float32 there

drop = lambda: keras.Sequential([keras.Input((64,)), layers.Dropout(0.5, seed=3)])
masks = [to_numpy(isobatch.data_parallel(drop(), 4)(np.ones((4, 64)), training=True)) for _ in range(2)]
assert np.array_equal(*masks) and len({row.tobytes() for row in masks[0]}) == 4
one = isobatch.data_parallel(drop(), 1)(np.ones((4, 64)), training=True)
assert np.array_equal(to_numpy(one), to_numpy(drop()(np.ones((4, 64)), training=True)))

results = []
for replicas in (None, 3):
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(5, "relu"), layers.Dense(3)])
    trained = isobatch.data_parallel(model, replicas) if replicas else model
    trained.compile("sgd", "mse", metrics=["mae"])
    history = trained.fit(x, x[:, :3], batch_size=5, epochs=2, shuffle=False, verbose=0).history
    results.append([list(history.values()), model.get_weights(), trained.predict(x, batch_size=2, verbose=0)])
assert gap(*results) < 1e-5  # Dense layers, in float32

try:
    isobatch.data_parallel(network(), ["gpu:0"])
except isobatch.DeviceError as error:
    assert "Found: cpu:0" in str(error)

class Failing(layers.Layer):
    def call(self, x):
        running = isobatch.current_replica()
        if running is not None and running.rank == 1:
            raise ValueError("planted")
        return x

inputs = keras.Input((4,))
try:
    isobatch.data_parallel(keras.Model(inputs, Failing()(inputs)), 3)(x)
except ValueError as error:
    assert "planted" in str(error) and error.__notes__ == ["in replica 1 on cpu:1, rows 5..8"], error.__notes__
else:
    raise AssertionError

trained.save("model.keras")
again = isobatch.load("model.keras", 2)
assert int(again.optimizer.iterations) == 6 and gap(again.get_weights(), trained.get_weights()) == 0
trained.save_weights("model.weights.h5")
model.load_weights("model.weights.h5")
print("done")
"""


@pytest.mark.slow
def test_the_torch_backend(tmp_path):
    path = os.pathsep.join(root for root in sys.path if root)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout == "done\n", done.stderr


def test_another_backend_is_refused_clearly(monkeypatch):
    import keras

    import isobatch

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(
        isobatch.BackendError, match="Expected Keras to run on tensorflow or torch, it runs on jax"
    ):
        isobatch.data_parallel(model, 2)


@pytest.mark.slow
def test_the_contract_of_both_backends_holds_there_too():
    tests = [str(path) for path in sorted(pathlib.Path(__file__).parent.glob("test_contract_*.py"))]
    done = subprocess.run(
        # Keras 3.15 turns tensors into numpy arrays in a way that numpy 2 deprecates.
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--backends",
            "keras",
            "-W",
            "default::DeprecationWarning",
            *tests,
        ],
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
