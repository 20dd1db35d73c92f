"""What cannot work is refused early, by name, with the cure; what fails later says where."""

import numpy as np
import pytest

keras = pytest.importorskip("keras")
import tensorflow as tf  # noqa: E402

import isobatch  # noqa: E402

layers = keras.layers
TWO = ["cpu:0", "cpu:1"]


def mlp():
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, name="out")])


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype("float32")


def test_unbuilt_models():
    class Later(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x):
            return self.dense(x)

    for model in (keras.Sequential([layers.Dense(2)]), Later()):
        with pytest.raises(
            isobatch.ModelError, match=r"Expected a built model, got '\w+'.*call the model once"
        ):
            isobatch.data_parallel(model, TWO)


def test_stateful_layers():
    x = keras.Input((5, 3), batch_size=4)
    model = keras.Model(x, layers.LSTM(2, stateful=True, name="memory")(x))
    with pytest.raises(isobatch.ModelError, match=r"'memory'.*stateful=False"):
        isobatch.data_parallel(model, TWO)


def test_fixed_batch_sizes():
    x = keras.Input((3,), batch_size=8, name="pixels")
    with pytest.raises(isobatch.ModelError, match=r"input 'pixels' of shape \(8, 3\).*without batch_size"):
        isobatch.data_parallel(keras.Model(x, layers.Dense(2)(x)), TWO)


def test_wrapping_twice():
    parallel = isobatch.data_parallel(mlp(), TWO)
    with pytest.raises(isobatch.ModelError, match=r"not parallel yet.*`template`"):
        isobatch.data_parallel(parallel, TWO)
    assert len(isobatch.data_parallel(parallel.template, [*TWO, "cpu:2"]).devices) == 3


def test_layers_and_things_that_are_no_model():
    with pytest.raises(isobatch.ModelError, match=r"keras\.Sequential"):
        isobatch.data_parallel(layers.Dense(2), TWO)
    with pytest.raises(isobatch.ModelError, match=r"Expected a keras\.Model"):
        isobatch.data_parallel(tf.Module(), TWO)


@pytest.mark.parametrize(
    "options", [{"policy": "fair"}, {"policy": (1, 2, 3)}, {"state": "last"}, {"broadcast": "x"}]
)
def test_options(options):
    with pytest.raises(ValueError, match="Expected"):
        isobatch.data_parallel(mlp(), TWO, **options)


@keras.saving.register_keras_serializable("isobatch_tests")
class Failing(layers.Layer):
    """Fails in the replica of one rank; in a graph, when it runs."""

    def __init__(self, rank, **kwargs):
        super().__init__(**kwargs)
        self.rank = rank

    def call(self, x):
        running = isobatch.current_replica()
        if running is None or running.rank != self.rank:
            return x
        if tf.inside_function():
            tf.debugging.assert_less(x, -100.0)
            return x
        msg = "planted"
        raise LookupError(msg)


def failing(rank):
    inputs = keras.Input((4,))
    return keras.Model(inputs, Failing(rank)(inputs))


def test_a_failure_says_where_and_the_model_works_afterwards():
    model = failing(1)
    parallel = isobatch.data_parallel(model, [*TWO, "cpu:2"])
    with pytest.raises(LookupError, match="planted") as caught:
        parallel(numbers(5, 4))
    assert caught.value.__notes__ == ["in replica 1 on cpu:1, rows 2..3"]
    before = [v.numpy() for v in model.variables]
    assert np.array_equal(parallel(numbers(1, 4)), numbers(1, 4))
    assert all(np.array_equal(a, v.numpy()) for a, v in zip(before, model.variables, strict=True))


def test_a_failure_in_a_graph_names_the_replica():
    parallel = isobatch.data_parallel(failing(1), [*TWO, "cpu:2"])
    with pytest.raises(tf.errors.InvalidArgumentError, match="replica_1"):
        parallel.predict(numbers(5, 4), verbose=0)


def test_inputs_of_different_lengths():
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    parallel = isobatch.data_parallel(keras.Model([a, b], layers.Add()([a, b])), TWO)
    with pytest.raises(isobatch.BatchSizeError, match=r"(?s)inputs\[0\]: 4 rows.*inputs\[1\]: 3 rows"):
        parallel([numbers(4, 4), numbers(3, 4)])
    traced = tf.function(parallel, input_signature=[[tf.TensorSpec((None, 4))] * 2])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"same number of rows as inputs\[0\], not so: inputs\[1\]"
    ):
        traced([numbers(4, 4), numbers(3, 4)])


def test_ragged_tensors():
    parallel = isobatch.data_parallel(mlp(), TWO)
    with pytest.raises(isobatch.LeafTypeError, match=r"RaggedTensor.*to_tensor\(\)"):
        parallel(tf.ragged.constant([[1.0], [1.0, 2.0]]))


def test_a_subclassed_model_says_where_too():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.failing = Failing(2)

        def call(self, x):
            return self.failing(x)

    model = Model()
    model(numbers(2, 4))
    parallel = isobatch.data_parallel(model, [*TWO, "cpu:2"])
    with pytest.raises(LookupError, match="planted") as caught:
        parallel(numbers(6, 4))
    assert caught.value.__notes__ == ["in replica 2 on cpu:2, rows 4..5"]
