"""What is not a network: splitting and joining, importing, memory, the verdict."""

import subprocess
import sys

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
        copy = tensor.clone
    else:
        import keras

        tensor = keras.ops.convert_to_tensor(batch)
        copy = batch.copy  # TensorFlow has no eager operation that copies

    def there_and_back():
        shards = backend.scatter(tensor, DEVICES)
        return backend.gather([isobatch.Result(shard, shard.args[0]) for shard in shards], DEVICES[0])

    contest(f"{name}: splitting and joining {batch.nbytes >> 20} MiB", {"one copy": copy, "scatter and gather": there_and_back},
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


MEMORY = """
import sys, resource, torch, isobatch
net = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(12)])
model = isobatch.data_parallel(net, int(sys.argv[1])) if int(sys.argv[1]) else net
with torch.no_grad(): assert model(torch.ones(16, 2048)).shape == (16, 2048)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_of_eight_replicas(measured):
    pytest.importorskip("torch")

    def run():
        return [
            int(
                subprocess.run([sys.executable, "-c", MEMORY, str(n)], check=True, capture_output=True).stdout
            )
            for n in (0, 8)
        ]

    def numbers(found):
        plain, parallel = found
        return {"memory of 8 replicas of 200 MB, over the plain module's": (parallel / plain, "x", 1.05)}

    assert min(measured("memory", run, numbers)) > 200_000


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
