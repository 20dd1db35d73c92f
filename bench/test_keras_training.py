"""`fit` and `predict` on two logical CPU devices, beside the plain model and beside MirroredStrategy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("keras")
sys.path.insert(0, str(Path(__file__).parent))
import keras_networks as nets
import numpy as np

import isobatch

KINDS = ["mlp", "cnn", "lstm"]


def parallel(model):
    return isobatch.data_parallel(model, ["cpu:0", "cpu:1"])


@pytest.mark.parametrize("how", ["plain", "parallel"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["fit", "predict"])
def test_beside_the_plain_model(benchmark, what, kind, how):
    benchmark.group = f"{what} {kind}"
    template = nets.network(kind)
    model = nets.compiled(parallel(template) if how == "parallel" else template)
    x, y = nets.data(kind)
    before = template.get_weights()[0].copy()

    def run():
        return (
            model.fit(x, y, batch_size=nets.BATCH, verbose=0)
            if what == "fit"
            else model.predict(x, nets.BATCH, verbose=0)
        )

    run()
    result = benchmark.pedantic(run, rounds=nets.ROUNDS, iterations=1)
    benchmark.extra_info.update(rows=nets.ROWS, batch=nets.BATCH, parameters=template.count_params())
    if what == "fit":
        assert result.history["loss"][0] < 3
        assert not np.array_equal(before, template.get_weights()[0])
    else:
        assert np.allclose(result, template.predict(x, verbose=0), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_mirrored_strategy(benchmark, kind):
    """Times a process; what it measured itself is in the extra information, to be held against the groups above."""
    benchmark.group = f"MirroredStrategy {kind}"

    def run():
        program = [sys.executable, str(Path(nets.__file__)), kind]
        return subprocess.run(
            program,
            capture_output=True,
            text=True,
            check=True,
            env={**nets.os.environ, "PYTHONPATH": ":".join(sys.path)},
        )

    seconds = json.loads(benchmark.pedantic(run, rounds=1, iterations=1).stdout)
    benchmark.extra_info.update(seconds)
    assert set(seconds) == {"fit", "predict"}


def test_wrapping_xception_over_eight_devices(benchmark):
    template = nets.keras.applications.Xception(weights=None, input_shape=(71, 71, 3), classes=10)
    model = benchmark.pedantic(
        isobatch.data_parallel, (template, ["cpu:0", "cpu:1"] * 4), rounds=3, iterations=1
    )
    assert len(model.devices) == 8
    assert [id(v) for v in model.variables] == [id(v) for v in template.variables], "weights were copied"
