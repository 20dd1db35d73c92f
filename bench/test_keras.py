"""`fit` and `predict` on two logical CPU devices, beside the plain model, MirroredStrategy and Keras on torch."""

import math

import pytest

pytest.importorskip("keras")
import keras_networks as nets
import numpy as np

import isobatch

GOALS = {"fit": {"mlp": 1.05, "cnn": 1.05, "lstm": 1.5}, "predict": dict.fromkeys(nets.SHAPES, 1.02)}
FULL = pytest.mark.full
SHORT = ("mlp", "cnn", "lstm")


def parallel(model, replicas=2):
    return isobatch.data_parallel(model, [f"cpu:{rank % 2}" for rank in range(replicas)])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[FULL] * (kind not in SHORT)) for kind in nets.SHAPES]
)
@pytest.mark.parametrize("what", ["fit", "predict"])
def test_two_replicas(contest, peer, what, kind):
    template = nets.network(kind)
    answers = nets.network(kind), template
    ours = nets.compiled(parallel(template))
    loops = {
        "plain": nets.loops(nets.compiled(answers[0]), kind)[what],
        "2 replicas": nets.loops(ours, kind)[what],
    }
    loops["MirroredStrategy"] = peer("keras_networks.py", kind).call(what)
    goals = {("2 replicas", "plain"): GOALS[what].get(kind), ("2 replicas", "MirroredStrategy"): 0.75}
    before = template.get_weights()[0]
    contest(
        f"Keras {what} {kind}",
        loops,
        goals,
        rows=nets.rows(kind),
        batch=nets.batch_size(kind),
        weights=template.count_params(),
    )
    if what == "fit":
        assert math.isfinite(loops["2 replicas"]())
        assert not np.array_equal(before, template.get_weights()[0])
    else:
        assert abs(loops["2 replicas"]() - loops["plain"]()) < 1e-4


@FULL
@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("what", ["fit", "predict"])
def test_engines(contest, peer, what, kind):
    """Keras on TensorFlow and on torch: the same network on one device."""
    loops = {
        "plain": nets.loops(nets.compiled(nets.network(kind)), kind)[what],
        "Keras on torch": peer("keras_networks.py", kind, KERAS_BACKEND="torch").call(what),
    }
    contest(
        f"Keras {what} {kind}, engines", loops, seconds=2, rows=nets.rows(kind), batch=nets.batch_size(kind)
    )
    if what == "fit":
        assert all(math.isfinite(loop()) for loop in loops.values())
    else:
        assert abs(loops["plain"]() - loops["Keras on torch"]()) < 1e-4


@FULL
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_many_replicas(contest, kind):
    templates = [nets.network(kind) for _ in range(7)]
    models = {"plain": templates[0]} | {
        f"{count} replicas": parallel(model, count)
        for count, model in zip((1, 2, 4, 8, 16, 64), templates[1:], strict=True)
    }
    loops = {name: nets.loops(nets.compiled(model), kind)["fit"] for name, model in models.items()}
    contest(
        f"Keras fit {kind}, many replicas",
        loops,
        seconds=3,
        rows=nets.rows(kind),
        batch=nets.batch_size(kind),
    )
    assert all(math.isfinite(loop()) for loop in loops.values())


def test_wrapping_xception_over_eight_devices(measured):
    template = nets.keras.applications.Xception(weights=None, input_shape=(71, 71, 3), classes=10)
    seconds = []

    def wrap():
        from time import perf_counter

        for _ in range(3):
            began = perf_counter()
            model = parallel(template, 8)
            seconds.append(perf_counter() - began)
        return model

    model = measured("Xception over 8 devices", wrap, lambda _: {"wrapping": (min(seconds), "s", 1.0)})
    assert len(model.devices) == 8
    assert [id(v) for v in model.variables] == [id(v) for v in template.variables], "weights were copied"
