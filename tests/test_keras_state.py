"""Running state and randomness: each policy exact, in eager calls and in traced graphs of unknown batch size."""

import numpy as np
import pytest

keras = pytest.importorskip("keras")
import tensorflow as tf  # noqa: E402

import isobatch  # noqa: E402

layers = keras.layers
GAP = 1e-12


pytestmark = pytest.mark.usefixtures("keras_float64")


def parallel_of(model, replicas, **options):
    return isobatch.data_parallel(model, [f"cpu:{rank}" for rank in range(replicas)], **options)


def train_call(model, x, traced):
    """Call in training mode; traced: in a graph that does not know the batch size."""
    if not traced:
        return model(x, training=True)
    return tf.function(
        lambda x: model(x, training=True), input_signature=[tf.TensorSpec((None, *x.shape[1:]), x.dtype)]
    )(x)


def siamese(momentum=0.9):
    """One BatchNorm called twice in a forward pass, with a nonlinearity between, and random statistics to start from."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4, 4, 2))
    norm = layers.BatchNormalization(momentum=momentum, name="norm")
    x = norm(layers.ReLU()(norm(layers.Conv2D(3, 2, name="conv")(inputs))))
    model = keras.Model(inputs, layers.Flatten()(x))
    rng = np.random.default_rng(1)
    norm.set_weights([rng.random(3) + 0.5 for _ in range(4)])
    return model


def shards_of(x, replicas):
    return [part for part in np.split(x, np.cumsum(isobatch.split_sizes(len(x), replicas))[:-1]) if len(part)]


def pooled(model, x, replicas):
    """Mean and variance after one step, by the definition: all rows that reached the layer, call by call."""
    norm = model.get_layer("norm")
    gamma, beta, mean, variance = (np.asarray(w) for w in norm.get_weights())
    parts = [np.asarray(model.get_layer("conv")(part)) for part in shards_of(x, replicas)]
    for _ in range(2):
        rows = np.concatenate(parts)
        mean = norm.momentum * mean + (1 - norm.momentum) * rows.mean((0, 1, 2))
        variance = norm.momentum * variance + (1 - norm.momentum) * rows.var((0, 1, 2))
        scaled = [(p - p.mean((0, 1, 2))) / np.sqrt(p.var((0, 1, 2)) + norm.epsilon) for p in parts]
        parts = [np.maximum(gamma * p + beta, 0) for p in scaled]
    return [mean, variance]


def statistics(model):
    return [np.asarray(w) for w in model.get_layer("norm").get_weights()[2:]]


def gap(a, b):
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max(initial=0)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("replicas", "rows"), [(1, 5), (2, 5), (3, 7), (4, 3), (4, 1), (4, 4)])
def test_merge_is_exact_call_by_call(replicas, rows, traced):
    x = np.random.default_rng(rows).random((rows, 4, 4, 2))
    model = siamese()
    before, expected = statistics(model), pooled(model, x, replicas)
    train_call(parallel_of(model, replicas), tf.constant(x), traced)
    assert gap(statistics(model), expected) < GAP
    assert gap(statistics(model), before) > 1e-3


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("replicas", "rows"), [(2, 5), (4, 3)])
def test_first_and_sequential_are_exact(replicas, rows, traced):
    x = np.random.default_rng(rows).random((rows, 4, 4, 2))
    parts = shards_of(x, replicas)
    for policy, seen in (("first", parts[:1]), ("sequential", parts)):
        model, reference = siamese(), siamese()
        output = train_call(parallel_of(model, replicas, state=policy), tf.constant(x), traced)
        outputs = [reference(part, training=True) for part in seen]
        assert gap(statistics(model), statistics(reference)) < GAP, policy
        assert gap([output[: sum(len(p) for p in seen)]], [np.concatenate(outputs)]) < GAP, policy


def masked_norm():
    """A BatchNorm over the words of sentences that end early, with random statistics to start from."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(9, 3, mask_zero=True, name="conv"),
            layers.BatchNormalization(momentum=0.9, name="norm"),
        ]
    )
    rng = np.random.default_rng(1)
    model.get_layer("norm").set_weights([rng.random(3) + 0.5 for _ in range(4)])
    return model


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("replicas", "lengths"), [(2, [5, 1, 2, 3, 0]), (3, [0, 0, 5, 1]), (4, [2, 4]), (2, [0, 0])]
)
def test_a_masked_norm_pools_what_is_not_masked(replicas, lengths, traced):
    words = np.random.default_rng(0).integers(1, 9, (len(lengths), 5))
    words[np.arange(5) >= np.array(lengths)[:, None]] = 0
    model, reference = masked_norm(), masked_norm()
    train_call(parallel_of(model, replicas), tf.constant(words), traced)
    reference(
        words, training=True
    )  # one forward pass of the norm: the split changes nothing in what reaches it
    assert gap(statistics(model), statistics(reference)) < GAP
    assert "call" not in vars(model.get_layer("norm"))


def test_a_momentum_of_one_keeps_the_statistics():
    model = siamese(momentum=1.0)
    before = statistics(model)
    train_call(parallel_of(model, 2), tf.ones((5, 4, 4, 2), "float64"), traced=True)
    assert gap(statistics(model), before) < GAP


def test_a_frozen_norm_is_left_alone():
    model = siamese()
    model.get_layer("norm").trainable = False
    before = statistics(model)
    train_call(parallel_of(model, 2), tf.ones((5, 4, 4, 2), "float64"), traced=True)
    assert gap(statistics(model), before) == 0


@keras.saving.register_keras_serializable("isobatch_tests")
class Counting(layers.Layer):
    """Counts its calls, keeps the mean of what it last saw, and normalises in a way that is NaN for a row of zeros."""

    def build(self, _shape):
        self.calls = self.add_weight(
            name="calls", shape=(), dtype="int32", initializer="zeros", trainable=False
        )
        self.seen = self.add_weight(name="seen", shape=(), initializer="zeros", trainable=False)
        self.scale = self.add_weight(name="scale", shape=(), initializer="ones")

    def call(self, x):
        self.calls.assign_add(1)
        self.seen.assign(keras.ops.mean(x))
        self.add_loss(keras.ops.mean(x / keras.ops.norm(x, axis=-1, keepdims=True)))
        return self.scale * x / keras.ops.norm(x, axis=-1, keepdims=True)


def counting():
    inputs = keras.Input((3,))
    return keras.Model(inputs, Counting(name="counting")(inputs))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("rows", [7, 3, 1])
def test_counters_advance_once_and_other_state_is_a_mean(rows, traced):
    x = np.random.default_rng(0).random((rows, 3))
    model = counting()
    parallel = parallel_of(model, 4, policy="keras")
    train_call(parallel, tf.constant(x), traced)
    layer = model.get_layer("counting")
    assert int(layer.calls) == 1
    assert abs(float(layer.seen) - x.mean()) < GAP


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_replicas_without_rows_leave_no_trace(rows):
    """A borrowed row of zeros divides zero by zero: nothing of it may be seen."""
    x = np.random.default_rng(0).random((rows, 3)) + 0.1
    model = counting()
    parallel = parallel_of(model, 4)

    @tf.function(input_signature=[tf.TensorSpec((None, 3), tf.float64)])
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = parallel(x, training=True)
            loss = tf.reduce_sum(output[:, 0]) + sum(parallel.losses)
        return output, loss, *tape.gradient(loss, [x, model.get_layer("counting").scale.value])

    output, loss, to_x, to_scale = (np.asarray(t) for t in step(tf.constant(x)))
    unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
    assert output.shape == (rows, 3)
    assert gap([output, to_scale], [unit, unit[:, 0].sum()]) < GAP
    assert np.isfinite(loss)
    assert np.isfinite(to_x).all()
    layer = model.get_layer("counting")
    assert int(layer.calls) == (rows > 0)
    assert np.isfinite(float(layer.seen))


@pytest.mark.parametrize("replicas", [1, 3])
def test_weights_assigned_in_the_forward_pass_are_trained_on(replicas):
    """Spectral normalisation overwrites a trainable kernel in training: the gradient is that of the new value."""
    x, y = np.random.default_rng(0).random((7, 4)), np.zeros((7, 2))
    results = []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((4,)), layers.SpectralNormalization(layers.Dense(3)), layers.Dense(2)]
        )
        trained = parallel_of(model, replicas) if parallel else model
        trained.compile("sgd", "mse")
        results.append(
            [trained.train_on_batch(x[:rows], y[:rows]) for rows in (7, 2, 7)] + model.get_weights()
        )
    assert gap(*results) < GAP


def dropping(seed=3):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((64,)), layers.Dropout(0.5, seed=5), layers.Dense(1, use_bias=False)]
    )


def masks(model, rows=8):
    """What a dropout layer lets through, in a traced graph."""
    return np.asarray(train_call(model, tf.ones((rows, 64), "float64"), traced=True))


def only_dropout(seed=5):
    return keras.Sequential([keras.Input((64,)), layers.Dropout(0.5, seed=seed)])


@pytest.mark.parametrize("rows", [8, 3])
def test_dropout_differs_between_replicas_and_repeats(rows):
    first, again = (masks(parallel_of(only_dropout(), 4), rows) for _ in range(2))
    assert np.array_equal(first, again)
    assert len({row.tobytes() for row in first}) == rows
    parallel = parallel_of(only_dropout(), 4)
    assert not np.array_equal(masks(parallel, rows), masks(parallel, rows)), "the next step draws anew"


def test_the_next_step_draws_what_no_replica_drew():
    parallel = parallel_of(only_dropout(), 4)
    drawn = np.concatenate([masks(parallel, 4), masks(parallel, 4)])
    assert len({row.tobytes() for row in drawn}) == 8


def test_one_replica_trains_as_the_template_does():
    x, y = np.random.default_rng(0).random((10, 64)), np.zeros((10, 1))
    results = []
    for parallel in (False, True):
        model = dropping()
        trained = parallel_of(model, 1) if parallel else model
        trained.compile("sgd", "mse")
        results.append(
            [
                trained.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"],
                model.get_weights()[0],
            ]
        )
    assert np.array_equal(results[0][0], results[1][0])
    assert np.array_equal(results[0][1], results[1][1])


@keras.saving.register_keras_serializable("isobatch_tests")
class Noise(layers.Layer):
    """Draws from Keras's global seed generator, which belongs to no layer."""

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x), dtype="float64")


def test_noise_of_the_global_generator_differs_between_replicas():
    inputs = keras.Input((3,))
    parallel = parallel_of(keras.Model(inputs, Noise()(inputs)), 4)
    for traced in (False, True):
        output = np.asarray(train_call(parallel, tf.zeros((4, 3), "float64"), traced))
        assert len(np.unique(output)) == 12
