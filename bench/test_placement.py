"""What placing the parts of a model costs on CPU devices: two equal towers, each on a device of its own, beside the plain model."""

import math

import numpy as np
import pytest

import isobatch
from isobatch.placement import crossings

TOWERS = {"left": "cpu:0", "right": "cpu:1"}
ROWS = 64


@pytest.fixture
def keras():
    """Keras, with two logical CPU devices."""
    module = pytest.importorskip("keras")
    isobatch.virtual_devices(2)
    return module


def keras_towers(kind):
    """Two towers over one input, and a batch."""
    import keras

    layers = keras.layers
    shape = (32, 32, 3) if kind == "cnn" else (32, 32)

    def tower(name):
        body = (
            [
                layers.Conv2D(32, 3, activation="relu"),
                layers.Conv2D(64, 3, activation="relu"),
                layers.GlobalAveragePooling2D(),
            ]
            if kind == "cnn"
            else [layers.LSTM(128)]
        )
        return keras.Sequential([keras.Input(shape), *body], name=name)

    inputs = keras.Input(shape)
    joined = layers.Concatenate()([tower("left")(inputs), tower("right")(inputs)])
    model = keras.Model(inputs, layers.Dense(10)(joined))
    rng = np.random.default_rng(0)
    return model, rng.random((ROWS, *shape), "float32"), rng.integers(0, 10, ROWS)


def torch_towers(kind):
    """Likewise."""
    import torch
    from torch import nn

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(32, 128, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0][:, -1]

    def tower():
        if kind == "lstm":
            return Last()
        pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), *pool)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = tower(), tower()
            self.head = nn.Linear(128 if kind == "cnn" else 256, 10)

        def forward(self, x):
            return self.head(torch.cat([self.left(x), self.right(x)], 1))

    shape = (3, 32, 32) if kind == "cnn" else (32, 32)
    rng = np.random.default_rng(0)
    return Two(), torch.tensor(rng.random((ROWS, *shape), "float32")), torch.tensor(rng.integers(0, 10, ROWS))


@pytest.mark.parametrize("kind", ["cnn", "lstm"])
def test_keras_towers(contest, benchmark, keras, kind):
    calls = {}
    for name in ("plain", "placed"):
        model, x, y = keras_towers(kind)
        if name == "placed":
            parts = isobatch.get_backend("keras").survey(model, x, "memory")
            model = isobatch.device_parallel(model, TOWERS)
            cut = crossings(parts, model.placement)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        calls[name] = lambda model=model, x=x, y=y: float(model.train_on_batch(x, y))
    contest(f"keras step, two {kind} towers", calls, rows=ROWS)
    benchmark.extra_info["numbers"] = [["edges cut by the placement", cut, "", None]]
    assert all(math.isfinite(call()) for call in calls.values())


@pytest.mark.parametrize("kind", ["cnn", "lstm"])
@pytest.mark.parametrize("train", [False, True], ids=["forward", "step"])
def test_torch_towers(contest, kind, train):
    torch = pytest.importorskip("torch")
    calls = {}
    for name in ("plain", "placed"):
        net, x, y = torch_towers(kind)
        net = isobatch.device_parallel(net, TOWERS) if name == "placed" else net
        optimizer = torch.optim.SGD(net.parameters(), 0.01)

        def step(net=net, x=x, y=y, optimizer=optimizer):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()

        calls[name] = step if train else lambda net=net, x=x: net(x)
    with torch.set_grad_enabled(train):
        contest(f"torch {'step' if train else 'forward'}, two {kind} towers", calls, rows=ROWS)
