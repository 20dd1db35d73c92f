"""The networks and the loop that the Keras benches time; as a program, timed under `tf.distribute.MirroredStrategy`.

Usage: python keras_networks.py NETWORK; prints seconds for one `fit` and one `predict`, the best of several, as JSON.
"""
# ruff: noqa: E402, T201

import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import isobatch

isobatch.virtual_devices(2)

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
SHAPES = {"mlp": (784,), "cnn": (32, 32, 3), "lstm": (64, 32)}
ROWS, BATCH, CLASSES = 512, 64, 10
ROUNDS = 5


def network(kind):
    keras.utils.set_random_seed(0)
    body = {
        "mlp": [layers.Dense(512, "relu"), layers.Dense(512, "relu")],
        "cnn": [layers.Conv2D(32, 3, activation="relu"), layers.Conv2D(64, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten()],
        "lstm": [layers.LSTM(64, return_sequences=True), layers.LSTM(64)],
    }[kind]  # fmt: skip
    return keras.Sequential([keras.Input(SHAPES[kind]), *body, layers.Dense(CLASSES)])


def data(kind):
    rng = np.random.default_rng(0)
    return rng.random((ROWS, *SHAPES[kind]), "float32"), rng.integers(0, CLASSES, ROWS)


def compiled(model):
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def mirrored(kind):
    """Best seconds of a `fit` and a `predict` under MirroredStrategy, which allows one use in a process."""
    x, y = data(kind)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = compiled(network(kind))
    times = {"fit": [], "predict": []}
    for _ in range(ROUNDS + 1):
        for name, call in (
            ("fit", lambda: model.fit(x, y, batch_size=BATCH, verbose=0)),
            ("predict", lambda: model.predict(x, BATCH, verbose=0)),
        ):
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: min(seconds[1:]) for name, seconds in times.items()}


if __name__ == "__main__":
    print(json.dumps(mirrored(sys.argv[1])))
