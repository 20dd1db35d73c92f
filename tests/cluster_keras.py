"""The Keras side of `cluster_torch.py`: a program that tests start with torchrun, or by itself."""

import os
import sys
from itertools import chain

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from cluster_torch import X, Y, own, whole

import isobatch


def network(norm, activity=None):
    """With a first bias only if something but the norm after it acts on it: Adam makes steps of the rounding of a gradient of 0."""
    x = inputs = keras.Input((4,))
    x = keras.layers.Dense(5, use_bias=activity is not None, activity_regularizer=activity)(x)
    if norm:
        layer = keras.layers.BatchNormalization(momentum=0.9)
        x = layer(keras.ops.tanh(layer(x)))
    # A factor that float32 has too, which is where Keras keeps it.
    outputs = keras.layers.Dense(4, kernel_regularizer=keras.regularizers.L2(2**-7))(x)
    return keras.Model(inputs, outputs)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.table, self.out = keras.layers.Embedding(7, 4), keras.layers.Dense(4)

    def call(self, x):
        return self.out(x + self.table(keras.ops.cast(keras.ops.abs(x[:, 0]), "int32")))


def compiled(cluster, model, **options):
    keras.utils.set_random_seed(cluster.rank)  # rank 0's weights are everybody's
    model = model()
    model(np.zeros((1, 4)))
    parallel = isobatch.data_parallel(model, devices=cluster)
    parallel.compile(keras.optimizers.Adam(0.05, **options), "mse", metrics=["mae"])
    return parallel


def scenarios(cluster):
    """Yield a name, a trained model, and losses and metrics."""
    parallel = compiled(cluster, lambda: network(norm=True, activity=keras.regularizers.L2(0.01)))
    yield "norm", parallel, [parallel.train_on_batch(*cluster.shard(*batch)) for batch in whole()]
    parallel = compiled(
        cluster,
        lambda: network(norm=False, activity=keras.regularizers.L2(0.01)),
        gradient_accumulation_steps=3,
        global_clipnorm=0.5,
    )
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(21).map(cluster.shard)
    history = parallel.fit(data, epochs=2, verbose=0, validation_data=data, shuffle=False).history
    yield "accumulated", parallel, [*history.values(), parallel.evaluate(data, verbose=0)]
    parallel = compiled(cluster, Subclassed)
    if cluster.size == 1:
        for batch in own(cluster):
            parallel.train_on_batch(*batch)
    else:
        rank, size = cluster.rank, (8, 5)[cluster.rank]
        rows = slice(100 * rank, 100 * rank + (40, 15)[rank])
        parallel.fit(X[rows], Y[rows], batch_size=size, shuffle=False, verbose=0)
    yield "own", parallel, []


def twins(cluster):
    """Yield what a Keras model and its twin in torch come to in ten steps on the same batches."""
    parallel = compiled(cluster, lambda: network(norm=True))
    training = isobatch.training_twin(parallel)
    training.module = isobatch.data_parallel(training.module, devices=cluster)
    losses = {"keras": [], "torch": []}
    for x, y in map(cluster.shard, *zip(*whole(), strict=True)):
        parallel.reset_metrics()
        losses["keras"].append(parallel.train_on_batch(x, y)[0])
        losses["torch"].append(cluster.mean(training.train_on_batch(x, y), len(x)))
    yield "norm in keras", parallel, [losses["keras"]]
    isobatch.copy_weights(training.network, parallel.template)
    yield "norm in torch", parallel, [losses["torch"]]


def main(where, replicas):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    cluster = isobatch.cluster(["cpu:0"] * int(replicas))
    found = {}
    for name, parallel, losses in chain(scenarios(cluster), twins(cluster)):
        found[f"{name}/losses"] = np.array([value for some in losses for value in some], "float64")
        found |= {f"{name}/{i}": value for i, value in enumerate(parallel.get_weights())}
    cluster.save(where, lambda file: np.savez(file, **found))


if __name__ == "__main__":
    main(*sys.argv[1:])
