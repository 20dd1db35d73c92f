"""The networks that the Keras benches time; as a program, the peers that need a process of their own.

Under TensorFlow that is `tf.distribute.MirroredStrategy`, which allows one use in a process; with `KERAS_BACKEND=torch`, the plain model.
"""
# ruff: noqa: E402

import json
import os
import sys
from contextlib import nullcontext

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import isobatch

isobatch.virtual_devices(2)

import keras
import numpy as np

from isobatch.timing import keep_memory

layers = keras.layers
SHAPES = {
    "mlp": (784,), "cnn": (32, 32, 3), "resnet": (24, 24, 3), "lstm": (64, 32), "transformer": (32, 32), "xception": (96, 96, 3),
}  # fmt: skip
ROWS, CLASSES = {"xception": 32}, 10
# Each replica makes a gradient of all weights, and they are added: for the 0.7 million weights of this MLP, 0.5 ms on two cores. That is 8 %
# of a step on 64 rows; on 128 it is lost in the noise.
BATCH = {"mlp": 128, "xception": 8}


def rows(kind):
    return ROWS.get(kind, 512)


def batch_size(kind):
    return BATCH.get(kind, 64)


def _residual(x):
    y = layers.BatchNormalization()(layers.Conv2D(32, 3, padding="same")(x))
    y = layers.BatchNormalization()(layers.Conv2D(32, 3, padding="same")(layers.ReLU()(y)))
    return layers.ReLU()(layers.Add()([x, y]))


def _encoder(x):
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 8)(x, x))
    return layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(128, "relu")(x)))


def network(kind):
    """With the same weights on every engine: they draw others from the same seed."""
    model, rng = _network(kind), np.random.default_rng(0)
    for weight in model.trainable_weights:
        if len(weight.shape) > 1:
            weight.assign(rng.standard_normal(weight.shape) / np.sqrt(np.prod(weight.shape[:-1])))
    return model


def _network(kind):
    if kind == "xception":
        options = {"input_shape": SHAPES[kind], "classes": CLASSES, "classifier_activation": None}
        return keras.applications.Xception(weights=None, **options)
    inputs = x = keras.Input(SHAPES[kind])
    body = {
        "mlp": [layers.Dense(512, "relu"), layers.Dense(512, "relu")],
        "cnn": [layers.Conv2D(32, 3, activation="relu"), layers.Conv2D(64, 3, activation="relu"), layers.MaxPooling2D()],
        "resnet": [layers.Conv2D(32, 3), _residual, _residual, layers.GlobalAveragePooling2D()],
        "lstm": [layers.LSTM(64, return_sequences=True), layers.LSTM(64)],
        "transformer": [_encoder, _encoder],
    }[kind]  # fmt: skip
    for part in body:
        x = part(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Flatten()(x)))


def data(kind):
    rng = np.random.default_rng(0)
    return rng.random((rows(kind), *SHAPES[kind]), "float32"), rng.integers(0, CLASSES, rows(kind))


def compiled(model):
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def loops(model, kind):
    """A `fit` that returns its loss, and a `predict` that returns the greatest output."""
    x, y = data(kind)
    size = batch_size(kind)
    return {
        "fit": lambda: model.fit(x, y, batch_size=size, verbose=0).history["loss"][0],
        "predict": lambda: float(model.predict(x, size, verbose=0).max()),
    }


def mirrored():
    """The scope of a strategy over two devices, where there is one."""
    if keras.config.backend() != "tensorflow":
        return nullcontext()
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope()


if __name__ == "__main__":
    keep_memory()
    with mirrored():
        work = loops(compiled(network(sys.argv[1])), sys.argv[1])
    for line in sys.stdin:
        word = line.strip()
        sys.stdout.write(json.dumps("ready" if word == "hello" else work[word]()) + "\n")
        sys.stdout.flush()
