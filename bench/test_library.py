"""What is not a network: splitting and joining, importing, memory, the verdict."""

import copy
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

import isobatch
from isobatch.timing import Timing, take_turns

DEVICES = [isobatch.Device("cpu", rank) for rank in range(4)]


@pytest.mark.parametrize("name", ["torch", "keras"])
def test_splitting_and_joining(contest, name):
    """One copy of the batch is what joining must cost; splitting takes views."""
    pytest.importorskip(name)
    backend = isobatch.get_backend(name)
    batch = np.random.default_rng(0).random((256, 3, 128, 128), "float32")
    if name == "torch":
        import torch

        tensor = torch.from_numpy(batch)
        copied = tensor.clone
    else:
        import keras

        tensor = keras.ops.convert_to_tensor(batch)
        copied = batch.copy  # TensorFlow has no eager operation that copies

    def there_and_back():
        shards = backend.scatter(tensor, DEVICES)
        return backend.gather([isobatch.Result(shard, shard.args[0]) for shard in shards], DEVICES[0])

    contest(f"{name}: splitting and joining {batch.nbytes >> 20} MiB", {"one copy": copied, "scatter and gather": there_and_back},
            {("scatter and gather", "one copy"): 1.2}, seconds=2)  # fmt: skip
    assert np.array_equal(np.asarray(there_and_back()), batch)


def test_import(measured):
    """A fresh interpreter that imports the library, less one that imports nothing."""
    calls = {
        code: lambda code=code: subprocess.run([sys.executable, "-c", code], check=True)
        for code in ("pass", "import isobatch")
    }

    def run() -> dict[str, Timing]:
        *_, last = take_turns(calls, turns=(9, 15))
        return last

    def numbers(last):
        return {"import isobatch": (1e3 * (last["import isobatch"].median - last["pass"].median), "ms", 50)}

    assert set(measured("import", run, numbers)) == set(calls)


MEMORY = {
    "torch": """
import sys, resource, torch, isobatch
net = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(12)])
model = isobatch.data_parallel(net, int(sys.argv[1])) if int(sys.argv[1]) else net
with torch.no_grad(): assert model(torch.ones(16, 2048)).shape == (16, 2048)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
""",
    "keras": """
import sys, resource, numpy, keras, isobatch
net = keras.Sequential([keras.Input((2048,)), *[keras.layers.Dense(2048) for _ in range(12)]])
model = isobatch.data_parallel(net, ["cpu:0"] * int(sys.argv[1])) if int(sys.argv[1]) else net
assert model.predict(numpy.ones((16, 2048)), 16, verbose=0).shape == (16, 2048)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
""",
}


@pytest.mark.parametrize("name", ["torch", "keras"])
def test_memory_of_eight_replicas(measured, name):
    """The whole process's, at its highest: the framework's own is in both."""
    pytest.importorskip(name)

    def run():
        return [
            int(
                subprocess.run(
                    [sys.executable, "-c", MEMORY[name], n], check=True, capture_output=True
                ).stdout
            )
            for n in "08"
        ]

    def numbers(found):
        plain, parallel = found
        return {f"{name}: 8 replicas of 200 MB, over the plain model's": (parallel / plain, "x", 1.05)}

    assert min(measured("memory", run, numbers)) > 200_000


# Keras 3.15 turns TensorFlow's variables into arrays in a way that NumPy 2 warns about.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("name", ["torch", "keras"])
def test_saving(contest, tmp_path, name):
    """The parallel model's file is the template's, and no slower to write."""
    pytest.importorskip(name)
    if name == "torch":
        import torch

        template = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(10)])
        parallel = isobatch.data_parallel(template, 2)
        files = tmp_path / "plain.pt", tmp_path / "parallel.pt"

        def save(model, path):
            torch.save(model.state_dict(), path)
    else:
        import keras

        layers = [keras.layers.Dense(1024) for _ in range(10)]
        template = keras.Sequential([keras.Input((1024,)), *layers])
        parallel = isobatch.data_parallel(template, ["cpu:0", "cpu:0"])
        files = tmp_path / "plain.keras", tmp_path / "parallel.keras"

        def save(model, path):
            model.save(path)

    calls = {
        label: partial(save, model, path)
        for label, model, path in zip(("plain", "parallel"), (template, parallel), files, strict=True)
    }
    contest(f"{name}: saving 40 MB", calls, {("parallel", "plain"): 1.05}, seconds=2)
    sizes = [path.stat().st_size for path in files]
    assert sizes[0] > 40_000_000
    assert abs(sizes[1] - sizes[0]) < 10_000, "the parallel model's file is not the template's"


def test_wrapping(contest):
    """A module is wrapped without a copy of its weights."""
    torch = pytest.importorskip("torch")
    template = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(100)])
    calls = {
        "copy.deepcopy": lambda: copy.deepcopy(template),
        "8 replicas": lambda: isobatch.data_parallel(template, 8),
    }
    contest("torch: wrapping 100 layers", calls, seconds=2)
    parameters = zip(calls["8 replicas"]().parameters(), template.parameters(), strict=True)
    assert all(ours is theirs for ours, theirs in parameters), "weights were copied"


@pytest.mark.full
def test_verdict_of_xception(measured):
    pytest.importorskip("torch")
    pytest.importorskip("keras")
    from time import perf_counter

    def run():
        began = perf_counter()
        command = [
            sys.executable,
            "-m",
            "isobatch",
            "parity",
            "xception",
            "--size",
            "96",
            "--rows",
            "8",
            "--replicas",
            "none",
        ]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        return perf_counter() - began, done

    _, done = measured("verdict", run, lambda found: {"Xception 96x96 on 8 images": (found[0], "s", 30)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout
