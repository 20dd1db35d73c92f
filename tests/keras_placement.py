# ruff: noqa: E402, T201
"""Run as a program: train placed networks one step and print where TensorFlow ran each operation.

Usage: python keras_placement.py CPUS NETWORK...; prints one JSON object.
"""

import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # keeps the operations' usual names

import isobatch

CPUS = int(sys.argv[1])
if CPUS > 1:
    isobatch.virtual_devices(CPUS)

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

assert len(tf.config.list_logical_devices("CPU")) == CPUS
layers = keras.layers
REPLICAS = 2

# Operations that do the work of a network, in TensorFlow's plain kernels; the rest is bookkeeping.
WORK = {
    "AvgPool", "AvgPoolGrad", "BatchMatMulV2", "BiasAdd", "BiasAddGrad", "Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput",
    "DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropFilter", "DepthwiseConv2dNativeBackpropInput", "Einsum", "FusedBatchNormGradV3",
    "FusedBatchNormV3", "GatherV2", "MatMul", "MaxPool", "MaxPoolGrad", "Relu", "ReluGrad", "ResourceGather", "Rsqrt", "RsqrtGrad",
    "Sigmoid", "SigmoidGrad", "Softmax", "Tanh", "TanhGrad", "TensorListStack", "_FusedConv2D", "_FusedMatMul",
}  # fmt: skip


def network(kind):
    """A network of a kind, and a batch for it."""
    x, y = np.random.default_rng(0).random((8, 8, 8, 1), "float32"), np.zeros((8, 1), "float32")
    if kind == "dense":
        x = x[:, 0, :, 0]
        body = [keras.Input((8,)), layers.Dense(4, "relu"), layers.Dense(1)]
    elif kind == "convolution":
        body = [
            keras.Input((8, 8, 1)),
            layers.Conv2D(3, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
        ]
        body += [layers.SeparableConv2D(4, 2), layers.GlobalAveragePooling2D(), layers.Dense(1)]
    elif kind in {"lstm", "gru"}:
        x = x[..., 0]
        body = [keras.Input((8, 8)), (layers.LSTM if kind == "lstm" else layers.GRU)(4), layers.Dense(1)]
    elif kind == "towers":
        x = x[..., 0]
        tokens = keras.Input((8, 8))
        left = layers.Dense(4, "tanh", name="left_out")(layers.LSTM(4, name="left_lstm")(tokens))
        right = layers.Dense(4, "tanh", name="right_out")(layers.LSTM(4, name="right_lstm")(tokens))
        return keras.Model(tokens, layers.Dense(1, name="head")(layers.Concatenate()([left, right]))), x, y
    elif kind == "embedding":
        x = (x[:, 0, :, 0] * 10).astype("int32")
        body = [keras.Input((8,), dtype="int32"), layers.Embedding(10, 4), layers.Flatten(), layers.Dense(1)]
    else:
        x = x[..., 0]
        tokens = keras.Input((8, 8))
        mixed = layers.MultiHeadAttention(2, 4)(tokens, tokens)
        return (
            keras.Model(tokens, layers.Dense(1)(layers.Flatten()(layers.LayerNormalization()(mixed)))),
            x,
            y,
        )
    return keras.Sequential(body), x, y


def operations(metadata):
    """Each working operation of the graphs that ran, as (type, name, device); functions called from them included."""
    found = []
    for graphs in metadata.function_graphs:
        for graph in graphs.partition_graphs:
            functions = {function.signature.name: function.node_def for function in graph.library.function}
            waiting = list(graph.node)
            while waiting:
                node = waiting.pop()
                called = [attr.func.name for attr in node.attr.values() if attr.func.name] + [node.op]
                for name in (
                    called if "Dataset" not in node.op else ()
                ):  # a dataset's own functions are no part of the model
                    waiting += functions.pop(name, ())
                if node.op in WORK:
                    found.append((node.op, node.name, node.device))
    return found


def transfers(metadata):
    """Each float tensor that went from one device to another, as (name, from, to)."""
    return [
        [
            node.attr["tensor_name"].s.decode(),
            *(node.attr[f"{end}_device"].s.decode()[-5:] for end in ("send", "recv")),
        ]
        for graphs in metadata.function_graphs
        for graph in graphs.partition_graphs
        for node in graph.node
        if node.op in {"_Recv", "_HostRecv"} and node.attr["tensor_type"].type == 1
    ]


def step(kind, through_fit):
    keras.utils.set_random_seed(1)
    model, x, y = network(kind)
    if kind == "towers":
        parallel = isobatch.device_parallel(model, {"left*": "cpu:0", "right*": "cpu:1"})
    else:
        parallel = isobatch.data_parallel(model, devices=[f"cpu:{rank}" for rank in range(REPLICAS)])
    parallel.compile("sgd", "mse")
    before = [v.numpy() for v in model.trainable_variables]
    context.enable_run_metadata()
    if through_fit:
        parallel.fit(x, y, batch_size=8, epochs=1, verbose=0)
    else:
        parallel.train_on_batch(x, y)
    metadata = context.export_run_metadata()
    context.disable_run_metadata()
    moved = any(
        not np.array_equal(a, v.numpy()) for a, v in zip(before, model.trainable_variables, strict=True)
    )
    assert moved, "the step did not train"
    return operations(metadata), transfers(metadata)


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore", isobatch.DeviceWarning)
    print(json.dumps({kind: step(kind, through_fit=i % 2 == 0) for i, kind in enumerate(sys.argv[2:])}))
