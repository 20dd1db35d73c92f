"""The wrapper is a `keras.Model`: names and structures are the template's, and all of training works."""

import gc
import weakref

import numpy as np
import pytest

keras = pytest.importorskip("keras")
import tensorflow as tf  # noqa: E402

import isobatch  # noqa: E402

layers = keras.layers


def parallel_of(model, replicas=2, **options):
    return isobatch.data_parallel(model, [f"cpu:{rank}" for rank in range(replicas)], **options)


def gap(a, b):
    pairs = zip(keras.tree.flatten(a), keras.tree.flatten(b), strict=True)
    return max(float(np.abs(np.asarray(x, float) - np.asarray(y, float)).max(initial=0)) for x, y in pairs)


def both_calls(model, *args):
    """A model's output, called eagerly and through a traced `predict`."""
    yield model(*args)
    yield keras.tree.map_structure(tf.convert_to_tensor, model.predict(*args, batch_size=5, verbose=0))


def mlp(units=3, seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((4,), name="x"), layers.Dense(5, "tanh", name="hidden"), layers.Dense(units, name="out")]
    )


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


# Inputs and outputs.


def dictionary():
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    return keras.Model(
        {"a": a, "b": b},
        {"sum": layers.Add()([layers.Dense(2)(a), layers.Dense(2)(b)]), "left": layers.Dense(1)(a)},
    )


def nested():
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    return keras.Model(
        [a, {"b": b}], ((layers.Dense(2)(a), {"deep": layers.Dense(1)(b)}), layers.Dense(3)(a))
    )


def through():
    a = keras.Input((4,), name="a")
    dense = layers.Dense(2, name="d")(a)
    return keras.Model(a, [dense, a, dense])


def siamese():
    left, right = keras.Input((4,), name="left"), keras.Input((4,), name="right")
    shared = keras.Sequential([keras.Input((4,)), layers.Dense(3)], name="nested")
    one, two = shared(left), shared(right)
    return keras.Model([left, right], [layers.Add(name="add")([one, two]), one, two])


@keras.saving.register_keras_serializable("isobatch_tests")
class Table(layers.Layer):
    """Returns its weights beside its output: a table without a batch axis."""

    def build(self, _shape):
        self.table = self.add_weight(name="table", shape=(4, 2))

    def call(self, x):
        return x @ self.table, keras.ops.sum(self.table, axis=1)


def flat_table():
    x = keras.Input((4,))
    return keras.Model(x, list(Table()(x)))


STRUCTURES = {
    "dictionary": (dictionary, lambda n: {"a": numbers(n, 4), "b": numbers(n, 3)}),
    "nested": (nested, lambda n: [numbers(n, 4), {"b": numbers(n, 3)}]),
    "through": (through, lambda n: numbers(n, 4)),
    "siamese": (siamese, lambda n: [numbers(n, 4), numbers(n, 4, seed=1)]),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_structures_are_the_templates(kind):
    build, batch = STRUCTURES[kind]
    model = build()
    parallel = parallel_of(model, 3)
    assert parallel.output_names == model.output_names
    for rows in (7, 2):
        expected = model(batch(rows))
        for output in both_calls(parallel, batch(rows)):
            keras.tree.assert_same_structure(output, expected)
            assert gap(output, expected) < 1e-6


def test_an_output_without_a_batch_axis_is_kept_once():
    model = flat_table()
    parallel = parallel_of(model, 3)
    rows, table = parallel(numbers(7, 4))
    assert (rows.shape, table.shape) == ((7, 2), (4,))
    rows, table = tf.function(parallel, input_signature=[tf.TensorSpec((None, 4))])(numbers(2, 4))
    assert (rows.shape, table.shape) == ((2, 2), (4,))
    assert gap(table, keras.ops.sum(model.weights[0], axis=1)) < 1e-6


def test_an_output_without_a_batch_axis_on_which_replicas_disagree_is_refused():
    x = keras.Input((4,))
    parallel = parallel_of(keras.Model(x, keras.ops.sum(x, axis=0)), 2)
    with pytest.raises(isobatch.StructureError, match=r"(?s)the same value on every replica.*replica 1"):
        parallel(numbers(4, 4))
    with pytest.raises(tf.errors.InvalidArgumentError, match="every replica to return the same"):
        tf.function(parallel, input_signature=[tf.TensorSpec((None, 4))])(numbers(4, 4))


def test_losses_and_targets_by_the_templates_names():
    results = []
    for replicas in (None, 2):
        keras.utils.set_random_seed(0)
        x = keras.Input((4,))
        hidden = layers.Dense(3, name="first")(x)
        model = keras.Model(x, [hidden, layers.Dense(2, name="second")(hidden)])
        trained = parallel_of(model, replicas) if replicas else model
        trained.compile(
            "sgd",
            {"first": "mse", "second": "mae"},
            loss_weights={"first": 2.0, "second": 1.0},
            metrics={"second": "mse"},
        )
        results.append(
            trained.fit(numbers(8, 4), {"first": numbers(8, 3), "second": numbers(8, 2)}, verbose=0).history
        )
    assert set(results[0]) == set(results[1]) == {"loss", "first_loss", "second_loss", "second_mse"}
    assert (
        gap([results[0][key] for key in sorted(results[0])], [results[1][key] for key in sorted(results[0])])
        < 1e-6
    )


def test_targets_of_an_output_that_is_an_input_or_comes_twice():
    x, targets = numbers(8, 4), [numbers(8, 2), numbers(8, 4), numbers(8, 2)]
    histories = []
    for replicas in (None, 2):
        keras.utils.set_random_seed(0)
        model = through()
        trained = parallel_of(model, replicas) if replicas else model
        trained.compile("sgd", ["mse", "mae", "mae"])
        histories.append(trained.fit(x, targets, verbose=0).history)
    assert set(histories[0]) == set(histories[1])
    assert gap([histories[0]["loss"]], [histories[1]["loss"]]) < 1e-6


def test_dictionary_targets():
    model = dictionary()
    parallel = parallel_of(model, 3)
    parallel.compile("sgd", {"sum": "mse", "left": "mae"}, metrics={"left": "mse"})
    x = {"a": numbers(8, 4), "b": numbers(8, 3)}
    history = parallel.fit(x, {"sum": numbers(8, 2), "left": numbers(8, 1)}, verbose=0).history
    assert set(history) == {"loss", "left_loss", "sum_loss", "left_mse"}


@pytest.mark.parametrize("given", [True, False])
def test_optional_inputs(given):
    @keras.saving.register_keras_serializable("isobatch_tests")
    class Perhaps(layers.Layer):
        def call(self, a, b=None):
            return a if b is None else a + b

        def compute_output_spec(self, a, b=None):
            return keras.KerasTensor(a.shape, a.dtype)

    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b", optional=True)
    model = keras.Model({"a": a, "b": b}, Perhaps()(a, b))
    parallel = parallel_of(model, 3)
    x = {"a": numbers(7, 4), "b": numbers(7, 4, seed=1) if given else None}
    assert gap(parallel(x), model(x)) == 0
    assert gap(tf.function(lambda: parallel(x))(), model(x)) == 0


def test_names_that_collide():
    x = keras.Input((4,), name="replica_0")
    model = keras.Model(
        x, layers.Dense(2, name="merge")(layers.Dense(3, name="rows")(x)), name="slice_replica_0_0"
    )
    parallel = parallel_of(model, 2)
    assert parallel.output_names == ["merge"]
    assert gap(parallel(numbers(3, 4)), model(numbers(3, 4))) < 1e-6


def test_several_wrappers_of_one_template_and_a_wrapper_inside_a_model():
    model = mlp()
    two, three = parallel_of(model, 2), parallel_of(model, 3)
    two.compile("sgd", "mse")
    two.fit(numbers(8, 4), numbers(8, 3), verbose=0)
    assert gap(three(numbers(5, 4)), model(numbers(5, 4))) < 1e-6
    inputs = keras.Input((4,))
    outer = keras.Model(inputs, layers.Dense(2)(two(inputs)))
    outer.compile("sgd", "mse")
    before = [v.numpy() for v in model.trainable_variables]
    outer.fit(numbers(8, 4), numbers(8, 2), verbose=0)
    assert all(
        not np.array_equal(a, v.numpy()) for a, v in zip(before, model.trainable_variables, strict=True)
    )
    assert [v.path for v in two.variables] == [v.path for v in model.variables]


def test_a_gan_of_shared_models():
    keras.utils.set_random_seed(0)
    generator = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    critic = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    z = keras.Input((4,))
    gan = keras.Model(z, critic(generator(z)))
    critic.trainable = False
    both = parallel_of(gan, 2)
    both.compile("sgd", "mse")
    critic_before, generator_before = critic.get_weights(), generator.get_weights()
    both.fit(numbers(8, 4), np.ones((8, 1)), verbose=0)
    assert gap(critic.get_weights(), critic_before) == 0
    assert gap(generator.get_weights(), generator_before) > 0


@pytest.mark.parametrize("broadcast", ["table", 1])
def test_a_broadcast_input_reaches_every_replica_whole(broadcast):
    x, table = keras.Input((4,), name="x"), keras.Input(batch_shape=(4, 2), name="table")
    model = keras.Model([x, table], keras.ops.matmul(x, table))
    parallel = parallel_of(model, 3, broadcast=(broadcast,))
    inputs = [numbers(7, 4), numbers(4, 2)]
    assert gap(parallel(inputs), model(inputs)) < 1e-6


def test_another_batch_axis():
    hidden = keras.Input(batch_shape=(2, None, 3), name="hidden")
    x = keras.Input((4,), name="x")
    model = keras.Model([x, hidden], layers.Dense(3)(x) + keras.ops.sum(hidden, axis=0))
    parallel = parallel_of(model, 3, axis={"hidden": 1})
    inputs = [numbers(7, 4), numbers(2, 7, 3)]
    assert gap(parallel(inputs), model(inputs)) < 1e-6


# Kinds of data.


def test_strings_integers_and_doubles_pass_the_slices():
    words = keras.Input((), dtype="string", name="words")
    ids = layers.StringLookup(vocabulary=["a", "b", "c"])(words)
    model = keras.Model(words, layers.Embedding(4, 2)(ids))
    parallel = parallel_of(model, 3)
    x = tf.constant(["a", "c", "b", "zzz", "a"])
    for traced in (False, True):
        call = (
            tf.function(parallel, input_signature=[tf.TensorSpec((None,), tf.string)]) if traced else parallel
        )
        for rows in (5, 2):
            assert gap(call(x[:rows]), model(x[:rows])) == 0
    number = keras.Input((3,), dtype="int64")
    assert parallel_of(keras.Model(number, number * 2), 2)(np.full((3, 3), 2**40)).numpy()[0, 0] == 2**41
    double = keras.Input((3,), dtype="float64")
    halved = keras.Model(double, layers.Rescaling(0.5, dtype="float64")(double))
    assert parallel_of(halved, 2)(np.full((3, 3), 1 + 2**-40)).numpy()[0, 0] == 0.5 + 2**-41


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, dtype=policy), layers.Dense(1, dtype=policy)]
    )
    model.dtype_policy = keras.DTypePolicy(policy)
    parallel = parallel_of(model, 2)
    parallel.compile("adam", "mse")
    assert parallel(numbers(3, 4)).dtype == policy.removeprefix("mixed_")
    assert type(parallel.optimizer).__name__ == (
        "LossScaleOptimizer" if policy == "mixed_float16" else "Adam"
    )
    assert {v.dtype for v in parallel.trainable_variables} == {"float32"}
    history = parallel.fit(numbers(32, 4), numbers(32, 1), batch_size=7, epochs=3, verbose=0).history["loss"]
    assert history[-1] < history[0]


def test_ragged_and_sparse_are_refused():
    x = keras.Input((4,), sparse=True)
    with pytest.raises(isobatch.ModelError, match=r"sparse input .*Make it dense"):
        parallel_of(keras.Model(x, layers.Dense(2)(x)))


# Training.


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = slice(6 * index, 6 * index + 6 if index < 3 else 20)
        return numbers(24, 4)[rows], numbers(24, 3, seed=1)[rows]


def test_arrays_datasets_and_sequences_train_alike():
    x, y = numbers(24, 4)[:20], numbers(24, 3, seed=1)[:20]
    results = []
    for data in ((x, y), (tf.data.Dataset.from_tensor_slices((x, y)).batch(6),), (Sequence(),)):
        for replicas in (None, 3):
            model = mlp()
            trained = parallel_of(model, replicas) if replicas else model
            trained.compile("sgd", "mse")
            options = {"batch_size": 6} if len(data) == 2 else {}
            trained.fit(*data, shuffle=False, verbose=0, **options)
            results.append(model.get_weights())
    assert all(gap(results[0], other) < 1e-6 for other in results[1:])


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 3}, {}])
def test_ways_to_run_a_step(options):
    results = []
    for replicas in (None, 3):
        model = mlp()
        trained = parallel_of(model, replicas) if replicas else model
        trained.compile("sgd", "mse", **options)
        trained.fit(numbers(25, 4), numbers(25, 3, seed=1), batch_size=4, shuffle=False, verbose=0)
        results.append([model.get_weights(), trained.evaluate(numbers(7, 4), numbers(7, 3), verbose=0)])
    assert gap(*results) < 1e-6


def test_jit_compile_is_answered_honestly():
    parallel = parallel_of(mlp())
    parallel.compile("sgd", "mse")
    assert not parallel.jit_compile
    with pytest.warns(UserWarning, match="jit_compile"):
        parallel.compile("sgd", "mse", jit_compile=True)
    assert not parallel.jit_compile


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # Keras's own, in LearningRateScheduler
def test_callbacks(tmp_path):
    model = mlp()
    parallel = parallel_of(model)
    parallel.compile("sgd", "mse")
    rates = []

    class Setting(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))
            if epoch == 0:
                self.model.set_weights([np.zeros_like(w) for w in self.model.get_weights()])

    stopping = keras.callbacks.EarlyStopping("loss", patience=0, restore_best_weights=True, mode="max")
    history = parallel.fit(
        numbers(8, 4),
        numbers(8, 3),
        epochs=3,
        verbose=0,
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
            Setting(),
            stopping,
            keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        ],
    )
    assert np.allclose(rates, [0.1, 0.05, 0.1 / 3][: len(rates)])
    assert len(history.history["loss"]) == len(rates)
    assert len((tmp_path / "log.csv").read_text().splitlines()) == len(rates) + 1


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # Keras's own, in the TensorBoard callback
def test_tensorboard_histograms(tmp_path):
    pytest.importorskip("tensorboard")
    parallel = parallel_of(mlp())
    parallel.compile("sgd", "mse")
    board = keras.callbacks.TensorBoard(str(tmp_path), histogram_freq=1)
    parallel.fit(numbers(8, 4), numbers(8, 3), verbose=0, callbacks=[board])
    (events,) = tmp_path.rglob("events*.v2")
    tags = {
        value.tag
        for event in tf.compat.v1.train.summary_iterator(str(events))
        for value in event.summary.value
    }
    assert any("hidden" in tag and "histogram" in tag for tag in tags)


def test_freezing_after_wrapping():
    model = mlp()
    parallel = parallel_of(model)
    parallel.get_layer("hidden").trainable = False
    parallel.compile("sgd", "mse")
    before = model.get_weights()
    parallel.fit(numbers(8, 4), numbers(8, 3), verbose=0)
    after = model.get_weights()
    assert gap(before[:2], after[:2]) == 0
    assert gap(before[2:], after[2:]) > 0
    parallel.get_layer("hidden").trainable = True
    parallel.compile("sgd", "mse")
    parallel.fit(numbers(8, 4), numbers(8, 3), verbose=0)
    assert gap(before[:2], model.get_weights()[:2]) > 0


def test_a_compiled_template_keeps_its_own_metrics():
    model = mlp()
    model.compile("sgd", "mse", metrics=["mae"])
    parallel = parallel_of(model)
    parallel.compile("sgd", "mse", metrics=["mse"])
    assert set(parallel.fit(numbers(8, 4), numbers(8, 3), verbose=0).history) == {"loss", "mse"}
    assert set(model.fit(numbers(8, 4), numbers(8, 3), verbose=0).history) == {"loss", "mae"}


# Looking like the template.


def test_attributes_are_the_templates():
    model = mlp()
    parallel = parallel_of(model)
    assert isinstance(parallel, keras.Model)
    assert isinstance(parallel, keras.Sequential)
    assert parallel.layers == model.layers
    assert parallel.get_layer("out") is model.get_layer("out")
    assert parallel.count_params() == model.count_params()
    assert [v.path for v in parallel.weights] == [v.path for v in model.weights]
    assert repr(parallel) == f"<Parallel of {model!r} on cpu:0, cpu:1>"
    with pytest.raises(AttributeError, match="nothing_like_it"):
        parallel.nothing_like_it  # noqa: B018


def test_summary_shows_slices_replicas_and_merge(capsys):
    lines = []
    keras.utils.set_random_seed(0)
    model = keras.applications.MobileNetV3Small(
        (32, 32, 3), weights=None, classes=3, include_preprocessing=False
    )
    parallel_of(model, 8).summary(print_fn=lambda line, **_: lines.append(line))
    text = "\n".join(lines)
    assert all(f"replica_{rank}" in text for rank in range(8))
    assert "Lambda" in text
    assert "merge (Merge)" in text
    assert len(text.splitlines()) < 100


def test_call_method_runs_any_method():
    keras.utils.set_random_seed(0)

    class Coder(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x):
            return self.encode(x)["code"]

        def encode(self, x, scale=1.0):
            return {"code": self.dense(x) * scale, "note": "as it is"}

    model = Coder()
    x = numbers(7, 4)
    model(x)
    parallel = parallel_of(model, 3)
    output = parallel.call_method("encode", x, scale=2.0)
    assert gap(output["code"], 2 * model(x)) < 1e-6
    assert output["note"] == "as it is"


def test_wrapping_leaves_nothing_behind():
    model = mlp()
    parallel = parallel_of(model)
    parallel(numbers(3, 4))
    gone = weakref.ref(parallel)
    del parallel
    gc.collect()
    assert gone() is None
    assert len(model.layers[0]._inbound_nodes) == 1


# Subclassed models.


@keras.saving.register_keras_serializable("isobatch_tests")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(5, "tanh")
        self._norm = layers.BatchNormalization()
        self.heads = [layers.Dense(2), layers.Dense(3)]
        self.steps = 0

    def call(self, x, training=None):
        x = self._norm(self.hidden(x), training=training)
        return {"a": self.heads[0](x), "b": (self.heads[1](x),)}

    def train_step(self, data):
        self.steps += 1
        return super().train_step(data)


def subclassed():
    keras.utils.set_random_seed(0)
    model = Subclassed()
    model(numbers(2, 4))
    return model


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_subclassed_model(replicas):
    model = subclassed()
    parallel = parallel_of(model, replicas)
    assert isinstance(parallel, Subclassed)
    for rows in range(2 * replicas + 2):
        expected = model(numbers(rows, 4))
        output = parallel(numbers(rows, 4))
        keras.tree.assert_same_structure(output, expected)
        assert gap(output, expected) < 1e-6
    predicted = parallel.predict(numbers(11, 4), batch_size=3, verbose=0)
    assert gap(predicted, model.predict(numbers(11, 4), verbose=0)) < 1e-6


def test_a_subclassed_model_trains_as_on_one_device():
    results = []
    for replicas in (None, 3):
        model = subclassed()
        model._norm.trainable = False
        trained = parallel_of(model, replicas) if replicas else model
        trained.compile("sgd", {"a": "mse", "b": ("mae",)})
        trained.fit(
            numbers(11, 4),
            {"a": numbers(11, 2), "b": (numbers(11, 3),)},
            batch_size=4,
            shuffle=False,
            verbose=0,
        )
        assert trained.steps > 0, "its own train_step was passed over"
        results.append(model.get_weights())
    assert gap(*results) < 1e-6


def test_an_axis_is_asked_for_by_name_then_by_position():
    from isobatch import Options
    from isobatch_keras.template import functional_of, split_axes

    a, b, c = (keras.Input((3, 4), name=name) for name in "abc")
    model = keras.Model([[a, b], c], layers.Concatenate()([a, b, c]))
    assert split_axes(functional_of(model), Options(axis={1: 2})) == [0, 0, 2]
    assert split_axes(functional_of(model), Options(axis={0: 1, "b": 2})) == [1, 2, 0]
    assert split_axes(functional_of(model), Options(broadcast=("b",))) == [0, None, 0]
