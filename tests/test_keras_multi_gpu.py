"""`multi_gpu_model` under its old name: its example, its arguments, its errors; in processes with stand-ins for GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

keras = pytest.importorskip("keras")

import isobatch  # noqa: E402
from isobatch_keras import multi_gpu_model  # noqa: E402

EXAMPLE = Path(__file__).parent.parent / "examples" / "keras_multi_gpu_model.py"


def small():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


def python(program, **variables):
    path = os.pathsep.join(root for root in sys.path if root)
    return subprocess.run(
        [sys.executable, *program],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def test_without_gpus_the_error_says_what_there_is():
    with pytest.raises(isobatch.DeviceError, match=r"gpu:0, gpu:1 absent\. Found: cpu:0"):
        multi_gpu_model(small(), gpus=2)
    with pytest.raises(ValueError, match="None, which here means 0"):
        multi_gpu_model(small())


@pytest.mark.parametrize("gpus", [1, 0, -1, [0], [], ()])
def test_fewer_than_two_are_refused(gpus):
    with pytest.raises(isobatch.DeviceError, match="Expected gpus to be 2 or more"):
        multi_gpu_model(small(), gpus)


@pytest.mark.parametrize("gpus", ["/gpu:0", 2.0, True, {0, 1}, ["gpu:0", "gpu:1"], [0, True], object()])
def test_wrong_types_are_refused(gpus):
    with pytest.raises(TypeError, match="Expected gpus to be a number, a list of numbers or None"):
        multi_gpu_model(small(), gpus)


def test_the_same_gpu_twice_is_refused():
    with pytest.raises(isobatch.DeviceError, match="each GPU once"):
        multi_gpu_model(small(), [0, 0])


# What the suites of Keras 2 and of TensorFlow 1 tested, and what they did not: that the numbers are right.
PROGRAM = """
import numpy as np, keras
from isobatch_keras import multi_gpu_model
layers = keras.layers
rng = np.random.default_rng(0)

def simple():
    return keras.Sequential([keras.Input((3,)), layers.Dense(10), layers.Dense(4)])

for gpus, expected in ((8, range(8)), ([0, 2, 4], [0, 2, 4]), (None, range(8))):
    model = simple()
    before = model.get_weights()
    parallel = multi_gpu_model(model, gpus=gpus)
    assert [d.index for d in parallel.devices] == list(expected)
    parallel.compile("rmsprop", "mse")
    parallel.fit(rng.random((30, 3)), rng.random((30, 4)), batch_size=16, verbose=0)
    assert not np.array_equal(before[0], model.get_weights()[0])
    x = rng.random((19, 3))
    assert np.allclose(parallel.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)

for wrong in (10, [0, 2, 4, 6, 8], 1, [0]):
    try:
        multi_gpu_model(simple(), gpus=wrong)
    except ValueError as error:
        assert "gpu" in str(error)
    else:
        raise AssertionError(wrong)

a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
nested = keras.Sequential([keras.Input((4,)), layers.Dense(3)], name="nested")
siamese = multi_gpu_model(keras.Model([a, b], [layers.Add(name="add")([nested(a), nested(b)]), nested(a), nested(b)]), gpus=2)
assert siamese.output_names == ["add", "nested", "nested"]

sequence, state = keras.Input((4, 3)), keras.Input((5,))
rnn = multi_gpu_model(keras.Model([sequence, state], layers.SimpleRNN(5)(sequence, initial_state=state)), gpus=2)
rnn.compile("sgd", "mse")
rnn.train_on_batch([rng.random((2, 4, 3)), rng.random((2, 5))], rng.random((2, 5)))

model = simple()
before = [np.array(w) for w in model.get_weights()]
variables = list(model.variables)
moved = multi_gpu_model(model, gpus=2, cpu_relocation=True, cpu_merge=False)
assert all(np.array_equal(x, y) for x, y in zip(before, model.get_weights()))
assert [id(v) for v in variables] == [id(v) for v in moved.variables]
assert all("CPU:0" in v.value.device for v in model.variables)
moved.compile("sgd", "mse")
moved.fit(rng.random((6, 3)), rng.random((6, 4)), verbose=0)
assert not np.array_equal(before[0], model.get_weights()[0])
print("done")
"""


@pytest.mark.slow
def test_everything_that_keras_2_tested():
    done = python(["-c", PROGRAM], ISOBATCH_VIRTUAL_GPUS="8")
    assert done.stdout == "done\n", done.stderr


@pytest.mark.slow
def test_virtual_devices_too_late():
    program = """
import keras
keras.layers.Dense(1).build((None, 1))
import isobatch
isobatch.virtual_devices(4)
"""
    done = python(["-c", program])
    assert (
        "DeviceError: Expected TensorFlow not to have started when 4 virtual devices are made, it runs with 1."
        in done.stderr
    )


@pytest.mark.slow
def test_too_few_logical_devices_are_shared_and_said():
    program = """
import warnings, keras, numpy as np, isobatch
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    parallel = isobatch.data_parallel(model, devices=4)
print([str(w.message).partition(", because")[0] for w in caught if w.category is isobatch.DeviceWarning], *parallel.devices)
x = np.ones((7, 3))
assert np.allclose(parallel(x), model(x))
print(*isobatch.data_parallel(model).devices)
"""
    done = python(["-c", program])
    assert done.stdout == "['cpu:0, cpu:1, cpu:2, cpu:3 share cpu:0'] cpu:0 cpu:0 cpu:0 cpu:0\ncpu:0\n", (
        done.stderr
    )


@pytest.mark.slow
def test_a_wrong_number_of_stand_ins_is_refused():
    done = python(["-c", "import isobatch_keras"], ISOBATCH_VIRTUAL_GPUS="many")
    assert "DeviceError: Expected ISOBATCH_VIRTUAL_GPUS to be a number, got 'many'." in done.stderr


@pytest.mark.slow
def test_the_old_example():
    done = python([EXAMPLE], ISOBATCH_VIRTUAL_GPUS="8")
    assert done.returncode == 0, done.stderr
    assert "saved" in done.stdout
