"""The same small networks with the same weights in each framework, so that one test serves both."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod

import numpy as np

from isobatch import data_parallel, get_backend

# Scaled; a few hundred units of rounding, a million times below any wrong constant. Keras 3.15 computes a float64 Dense in
# float32 on its torch backend, so there it is a hundred units of that.
FLOAT64_GAP = 1e-5 if os.environ.get("KERAS_BACKEND") == "torch" else 1e-12


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def weights():
    """Of the networks below, by layer: kernel and bias in Keras's layout, or scale, offset, mean and variance."""
    variance = np.abs(numbers(5, seed=14)) + 0.5
    return {
        "hidden": [numbers(4, 5, seed=1), numbers(5, seed=2)],
        "norm": [numbers(5, seed=11) + 1, numbers(5, seed=12), numbers(5, seed=13), variance],
        "out": [numbers(5, 3, seed=3), numbers(3, seed=4)],
        "left": [numbers(4, 2, seed=5), numbers(2, seed=6)],
        "right": [numbers(3, 2, seed=7), numbers(2, seed=8)],
    }


class Kit(ABC):
    """What a shared test needs of a framework beside `isobatch` itself."""

    name: str

    @property
    def backend(self):
        return get_backend(self.name)

    @abstractmethod
    def mlp(self, *, norm=False, scalar=False):
        """Dense(5), perhaps BatchNorm, tanh, Dense(3); with `scalar` the mean of its square beside the output."""

    @abstractmethod
    def two_inputs(self):
        """A model from `{"a": (B, 4), "b": (B, 3)}` to `{"product": (B, 2), "pair": [(B, 2), (B, 2)]}`."""

    @abstractmethod
    def failing(self, rank):
        """A model of one part that raises `ValueError("planted")` in the replica of this rank (`None`: anywhere), and else returns its input."""

    @abstractmethod
    def array(self, x):
        """A numpy array as a tensor."""

    @abstractmethod
    def numpy(self, output):
        """The tensors of a nest as numpy arrays."""

    @abstractmethod
    def variables(self, model):
        """The variable objects of a model, in order."""

    @abstractmethod
    def gradients(self, model, x):
        """Gradients of the sum of the squared output, in training mode, for each trainable variable by name."""

    @abstractmethod
    def state(self, model):
        """Mean and variance of the network's BatchNorm."""

    @abstractmethod
    def dropout(self, seed, replicas, x):
        """The output on `x`, in training, of a fresh Dropout(0.5) whose random numbers come from the seed; `None`: not parallel."""

    def parallel(self, model, replicas, **options):
        return data_parallel(model, [f"cpu:{rank}" for rank in range(replicas)], **options)

    def call(self, model, *args):
        """A model's output on numpy arrays, in inference."""
        return self.numpy(model(*[self._arrays(arg) for arg in args]))

    def _arrays(self, tree):
        return (
            {key: self.array(value) for key, value in tree.items()}
            if isinstance(tree, dict)
            else self.array(tree)
        )


class KerasKit(Kit):
    name = "keras"

    def _load(self, model):
        for layer in model.layers:
            if layer.name in weights():
                layer.set_weights(weights()[layer.name])
        return model

    def mlp(self, *, norm=False, scalar=False):
        import keras

        x = inputs = keras.Input((4,), dtype="float64", name="x")
        x = keras.layers.Dense(5, dtype="float64", name="hidden")(x)
        if norm:
            x = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-3, dtype="float64", name="norm")(x)
        x = keras.layers.Activation("tanh", dtype="float64")(x)
        out = keras.layers.Dense(3, dtype="float64", name="out")(x)
        outputs = {"out": out, "loss": keras.ops.mean(keras.ops.square(out))} if scalar else out
        return self._load(keras.Model(inputs, outputs))

    def two_inputs(self):
        import keras

        a = keras.Input((4,), dtype="float64", name="a")
        b = keras.Input((3,), dtype="float64", name="b")
        left = keras.layers.Dense(2, dtype="float64", name="left")(a)
        right = keras.layers.Dense(2, dtype="float64", name="right")(b)
        product = keras.layers.Multiply(dtype="float64")([left, right])
        return self._load(keras.Model({"a": a, "b": b}, {"product": product, "pair": [left, right]}))

    def failing(self, rank):
        import keras

        from isobatch import current_replica

        @keras.saving.register_keras_serializable("isobatch_tests")
        class Failing(keras.layers.Layer):
            def call(self, x):
                running = current_replica()
                if rank is None or (running is not None and running.rank == rank):
                    msg = "planted"
                    raise ValueError(msg)
                return x

            def compute_output_shape(self, shape):  # in place of a call
                return shape

        inputs = keras.Input((4,), dtype="float64")
        return keras.Model(inputs, Failing(dtype="float64")(inputs))

    def array(self, x):
        import keras

        return keras.ops.convert_to_tensor(x)

    def numpy(self, output):
        import keras

        return keras.tree.map_structure(keras.ops.convert_to_numpy, output)

    def variables(self, model):
        return list(model.variables)

    def gradients(self, model, x):
        import keras

        grads = (self._torch_gradients if keras.config.backend() == "torch" else self._tape_gradients)(
            model, x
        )
        pairs = zip(model.trainable_variables, grads, strict=True)
        return {variable.path.split("/")[-2] + "." + variable.name: grad for variable, grad in pairs}

    def _tape_gradients(self, model, x):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(self.array(x), training=True)))
        return [grad.numpy() for grad in tape.gradient(loss, model.trainable_variables)]

    def _torch_gradients(self, model, x):
        model.zero_grad()
        model(self.array(x), training=True).square().sum().backward()
        return [variable.value.grad.numpy().copy() for variable in model.trainable_variables]

    def state(self, model):
        layer = model.get_layer("norm")
        # Plus 0 makes a tensor of a TensorFlow variable, which numpy 2 cannot read without a warning.
        return self.numpy([layer.moving_mean + 0, layer.moving_variance + 0])

    def dropout(self, seed, replicas, x):
        import keras

        keras.utils.set_random_seed(seed)
        inputs = keras.Input(x.shape[1:], dtype="float64")
        model = keras.Model(inputs, keras.layers.Dropout(0.5, dtype="float64")(inputs))
        model = model if replicas is None else self.parallel(model, replicas)
        return self.numpy(model(self.array(x), training=True))


class TorchKit(Kit):
    name = "torch"

    def _linear(self, name):
        import torch

        kernel, bias = weights()[name]
        layer = torch.nn.Linear(*kernel.shape, dtype=torch.float64)
        layer.load_state_dict({"weight": torch.tensor(kernel.T), "bias": torch.tensor(bias)})
        return layer

    def _norm(self):
        import torch

        layer = torch.nn.BatchNorm1d(5, eps=1e-3, momentum=0.1, dtype=torch.float64)
        names = ("weight", "bias", "running_mean", "running_var")
        state = {name: torch.tensor(array) for name, array in zip(names, weights()["norm"], strict=True)}
        layer.load_state_dict({**state, "num_batches_tracked": torch.tensor(0)})
        return layer

    def mlp(self, *, norm=False, scalar=False):
        import torch

        kit = self

        class Mlp(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.hidden, self.out = kit._linear("hidden"), kit._linear("out")
                self.norm = kit._norm() if norm else torch.nn.Identity()

            def forward(self, x):
                out = self.out(torch.tanh(self.norm(self.hidden(x))))
                return {"out": out, "loss": out.square().mean()} if scalar else out

        return Mlp().eval()

    def two_inputs(self):
        import torch

        kit = self

        class Two(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.left, self.right = kit._linear("left"), kit._linear("right")

            def forward(self, inputs):
                left, right = self.left(inputs["a"]), self.right(inputs["b"])
                return {"product": left * right, "pair": [left, right]}

        return Two().eval()

    def failing(self, rank):
        import torch

        from isobatch import current_replica

        class Failing(torch.nn.Module):
            def forward(self, x):
                running = current_replica()
                if rank is None or (running is not None and running.rank == rank):
                    msg = "planted"
                    raise ValueError(msg)
                return x

        return torch.nn.Sequential(Failing())

    def array(self, x):
        import torch

        return torch.tensor(x)

    def numpy(self, output):
        import torch

        if isinstance(output, torch.Tensor):
            return output.detach().numpy()
        if isinstance(output, dict):
            return {key: self.numpy(value) for key, value in output.items()}
        return type(output)(self.numpy(value) for value in output)

    def variables(self, model):
        return [*model.parameters(), *model.buffers()]

    def gradients(self, model, x):
        model.train().zero_grad()
        model(self.array(x)).square().sum().backward()
        model.eval()
        names = {"weight": "kernel", "bias": "bias"}
        found = {}
        for path, parameter in model.named_parameters():
            layer, name = path.split(".")
            if layer == "norm":
                found[f"norm.{'gamma' if name == 'weight' else 'beta'}"] = parameter.grad.numpy()
            else:
                found[f"{layer}.{names[name]}"] = parameter.grad.numpy().T
        return found

    def state(self, model):
        return model.norm.running_mean.numpy().copy(), model.norm.running_var.numpy().copy()

    def dropout(self, seed, replicas, x):
        import torch

        torch.manual_seed(seed)
        model = torch.nn.Dropout(0.5)
        model = model if replicas is None else self.parallel(model, replicas)
        return self.numpy(model(self.array(x)))


@functools.cache
def kit(name):
    return {"keras": KerasKit, "torch": TorchKit}[name]()
