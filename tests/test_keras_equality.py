"""Parallel equals one device, in float64, in everything that training shows."""

import numpy as np
import pytest

keras = pytest.importorskip("keras")
import tensorflow as tf  # noqa: E402

import isobatch  # noqa: E402

layers = keras.layers
GAP = 1e-12  # a few thousand roundings of numbers around 1


pytestmark = pytest.mark.usefixtures("keras_float64")


def parallel_of(model, replicas, **options):
    return isobatch.data_parallel(model, [f"cpu:{rank}" for rank in range(replicas)], **options)


@keras.saving.register_keras_serializable("isobatch_tests")
class AddLoss(layers.Layer):
    """Adds the mean, or the sum, of the squares that pass."""

    def __init__(self, how="mean", **kwargs):
        super().__init__(**kwargs)
        self.how = how

    def call(self, x):
        self.add_loss((keras.ops.mean if self.how == "mean" else keras.ops.sum)(keras.ops.square(x)))
        return x


def rich(seed=0, how="mean"):
    """Two inputs, two outputs, every kind of loss a model can carry."""
    keras.utils.set_random_seed(seed)
    a, b = keras.Input((6,), name="a"), keras.Input((4,), name="b")
    x = layers.Dense(
        5, "tanh", kernel_regularizer="l2", activity_regularizer="l2" if how == "mean" else None
    )(a)
    x = AddLoss(how)(layers.Concatenate()([x, b]))
    return keras.Model([a, b], [layers.Dense(3, "softmax", name="label")(x), layers.Dense(2, name="size")(x)])


def batches(steps, most, seed=1):
    rng = np.random.default_rng(seed)
    for step in range(steps):
        rows = step % most + 1
        x = [rng.standard_normal((rows, 6)), rng.standard_normal((rows, 4))]
        y = [rng.integers(0, 3, rows), rng.standard_normal((rows, 2))]
        yield x, y, [rng.random(rows), rng.random(rows)]


def compiled(model, optimizer):
    model.compile(
        keras.optimizers.get({"class_name": optimizer, "config": {"learning_rate": 0.01}}),
        {"label": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"label": 1.0, "size": 0.5},
        metrics={"label": "accuracy", "size": "mae"},
    )
    return model


def gap(a, b):
    pairs = zip(keras.tree.flatten(a), keras.tree.flatten(b), strict=True)
    return max(float(np.abs(np.asarray(x, float) - np.asarray(y, float)).max(initial=0)) for x, y in pairs)


FAST = {(2, "SGD"), (4, "Adam")}
CASES = [
    pytest.param(n, name, marks=() if (n, name) in FAST else pytest.mark.slow)
    for n in (2, 3, 4)
    for name in ("SGD", "RMSprop", "Adam")
]


@pytest.mark.parametrize(("replicas", "optimizer"), CASES)
def test_twenty_steps_of_every_batch_size(replicas, optimizer):
    template, single = rich(), compiled(rich(), optimizer)
    parallel = compiled(parallel_of(template, replicas), optimizer)
    start = [np.array(w) for w in template.get_weights()]
    for x, y, weights in batches(20, 3 * replicas):
        ours = parallel.train_on_batch(x, y, sample_weight=weights, return_dict=True)
        theirs = single.train_on_batch(x, y, sample_weight=weights, return_dict=True)
        assert ours.keys() == theirs.keys()
        assert gap(list(ours.values()), [theirs[key] for key in ours]) < GAP
    assert gap(template.get_weights(), single.get_weights()) < GAP
    assert gap(template.get_weights(), start) > 0.01, "nothing was trained"


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_fit_evaluate_and_predict_with_uneven_last_batches(eager):
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((23, 6)), rng.integers(0, 3, 23)
    results = []
    for replicas in (None, 3):
        keras.utils.set_random_seed(5)
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(4, "tanh", activity_regularizer="l1"),
                layers.Dense(3, "softmax"),
            ]
        )
        trained = parallel_of(model, replicas) if replicas else model
        trained.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], run_eagerly=eager)
        history = trained.fit(
            x,
            y,
            batch_size=5,
            epochs=2,
            verbose=0,
            class_weight={0: 1.0, 1: 3.0, 2: 0.5},
            validation_split=0.2,
        ).history
        results.append(
            [
                list(history.values()),
                trained.evaluate(x, y, batch_size=4, verbose=0),
                trained.predict(x, 6, verbose=0),
                model.get_weights(),
            ]
        )
    assert gap(*results) < GAP


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_gradients_of_every_batch_size(replicas):
    model = rich()
    parallel = parallel_of(model, replicas)

    @tf.function(reduce_retracing=True)
    def gradients(a, b, which):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            called = (parallel if which else model)([a, b], training=True)
            loss = sum(tf.reduce_sum(output**2) for output in called)
            loss += sum((parallel if which else model).losses)
        return loss, tape.gradient(loss, [a, b, *model.trainable_variables], unconnected_gradients="zero")

    signature = (tf.TensorSpec((None, 6), tf.float64), tf.TensorSpec((None, 4), tf.float64))
    ours = gradients.get_concrete_function(*signature, which=True)
    theirs = gradients.get_concrete_function(*signature, which=False)
    for (a, b), _, _ in batches(3 * replicas, 3 * replicas):
        args = tf.constant(a), tf.constant(b)
        assert gap(ours(*args), theirs(*args)) < GAP
        assert gap(gradients.python_function(*args, which=True), theirs(*args)) < GAP, "eager"


def test_sum_type_losses_are_declared():
    x = [np.random.default_rng(0).standard_normal((7, n)) for n in (6, 4)]
    model = rich(how="sum")
    model(x, training=True)
    expected = [float(loss) for loss in model.losses]
    for scalars, same in (("sum", True), ("mean", False)):
        parallel = parallel_of(model, 3, scalars=scalars)
        parallel(x, training=True)
        assert (gap([float(loss) for loss in parallel.losses], expected) < GAP) is same


def scalar_loss():
    keras.utils.set_random_seed(2)
    inputs = keras.Input((4,), name="x")
    out = layers.Dense(2, name="out")(inputs)
    return keras.Model(inputs, {"out": out, "loss": keras.ops.mean(keras.ops.square(out))})


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8])
def test_a_loss_computed_inside_is_trained_on(batch):
    x, y = np.random.default_rng(0).standard_normal((batch, 4)), np.zeros(())
    results = []
    for replicas in (None, 3):
        model = scalar_loss()
        trained = parallel_of(model, replicas) if replicas else model

        @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float64)])
        def step(x, trained=trained, model=model):
            with tf.GradientTape() as tape:
                loss = trained(x, training=True)["loss"]
            return loss, tape.gradient(loss, model.trainable_variables)

        results.append(step(tf.constant(x)))
    assert results[1][0].shape == y.shape
    assert gap(*results) < GAP


@pytest.mark.parametrize(
    ("replicas", "recurrent"), [(3, False), *(pytest.param(n, True, marks=pytest.mark.slow) for n in (2, 4))]
)
def test_masks_reach_the_replicas_and_the_loss(replicas, recurrent):
    rng = np.random.default_rng(0)
    x = rng.integers(1, 9, (7, 5))
    x[:, 3:] = 0
    x[2] = 0
    x[4, 1:] = 0
    y = rng.standard_normal((7, 5, 2))
    results = []
    for parallel in (False, True):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(9, 3, mask_zero=True),
                layers.LSTM(4, return_sequences=True) if recurrent else layers.Dense(4),
                layers.Dense(2),
            ]
        )
        trained = parallel_of(model, replicas) if parallel else model
        trained.compile("sgd", "mse", weighted_metrics=["mae"])
        logs = [trained.train_on_batch(x[:rows], y[:rows]) for rows in (7, 3, 1)]
        output = trained(x)
        results.append([logs, model.get_weights(), output, output._keras_mask])
    assert gap(*results) < GAP


@pytest.mark.filterwarnings(
    "ignore:.*does not support masking"
)  # the template's own: a Sequential model keeps no mask
def test_a_mask_that_comes_in_is_split():
    keras.utils.set_random_seed(1)
    inner = keras.Sequential([keras.Input((5, 3)), layers.LSTM(4), layers.Dense(2)])
    parallel = parallel_of(inner, 3)
    inputs = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(9, 3, mask_zero=True)(inputs)
    x = np.array([[1, 2, 0, 0, 0], [3, 0, 0, 0, 0], [4, 4, 4, 4, 4], [5, 6, 7, 0, 0]])
    single, nested = keras.Model(inputs, inner(embedded)), keras.Model(inputs, parallel(embedded))
    expected = single(x)
    assert gap(nested(x), expected) < GAP
    assert gap(nested.predict(x, verbose=0), expected) < GAP
    unmasked = inner(single.layers[1](x) * 1.0)
    assert gap(unmasked, expected) > 1e-3, "the mask made no difference"


def test_double_backward():
    model = rich()
    parallel = parallel_of(model, 2)
    a, b = tf.random.normal((5, 6), dtype="float64"), tf.random.normal((5, 4), dtype="float64")

    def penalty(called):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(a)
                score = tf.reduce_sum(called([a, b])[1] ** 2)
            slope = inner.gradient(score, a)
            value = tf.reduce_sum(slope**2)
        return outer.gradient(
            value, [v.value for v in model.trainable_variables], unconnected_gradients="zero"
        )

    expected = penalty(model)
    assert gap(penalty(parallel), expected) < GAP
    assert gap(tf.function(lambda: penalty(parallel))(), expected) < GAP
    assert max(float(np.abs(g).max()) for g in expected) > 1e-3


@pytest.mark.slow
def test_equal_runs_are_bitwise_equal():
    runs = []
    for _ in range(2):
        model = rich()
        parallel = compiled(parallel_of(model, 4), "Adam")
        for x, y, _ in batches(6, 9):
            parallel.train_on_batch(x, y)
        runs.append(model.get_weights())
    assert gap(*runs) == 0
