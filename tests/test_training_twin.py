"""The torch side of a compiled Keras model takes the same steps: every optimizer, loss, schedule and metric, in float64."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
keras = pytest.importorskip("keras")

import isobatch  # noqa: E402
from isobatch.errors import ModelError, SpecError  # noqa: E402
from isobatch.recipe import LOSSES, Recipe  # noqa: E402
from isobatch_keras.training import to_recipe  # noqa: E402

L, optimizers, schedules = keras.layers, keras.optimizers, keras.optimizers.schedules

pytestmark = [
    # Keras's own, wherever it turns a variable into a numpy array.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.usefixtures("keras_float64"),
    pytest.mark.skipif(
        keras.config.backend() != "tensorflow", reason="Keras's optimizers are held to TensorFlow's forms"
    ),
]

RNG = np.random.default_rng(0)
X = RNG.standard_normal((11, 6, 5, 2))
Y = RNG.random((11, 3))
CLASSES = RNG.integers(0, 3, 11)
GAP = 1e-9


def network(last=None):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((6, 5, 2)),
            L.Conv2D(4, 3, padding="same", use_bias=False, name="conv"),
            L.BatchNormalization(momentum=0.9, name="norm"),
            L.ReLU(),
            L.Flatten(),
            L.Dense(3, activation=last, name="out"),
        ]
    )


def both(model, x, y, steps=6, **weights):
    """Train in Keras and in torch from one state; return both sides' losses, and their weights by key."""
    torch_side = isobatch.training_twin(model)
    batches = [slice(0, 4), slice(4, 8), slice(8, 11)]
    pairs = []
    for step in range(steps):
        part = batches[step % 3]
        taken = {name: value[part] for name, value in weights.items()}
        ours = torch_side.train_on_batch(x[part], y[part], **taken)
        theirs = model.train_on_batch(x[part], y[part], **taken)
        pairs.append((ours, float(theirs if np.isscalar(theirs) or np.ndim(theirs) == 0 else theirs[0])))
    return torch_side, pairs


def gaps(model, torch_side, pairs):
    """Greatest differences of losses and of weights, scaled; running losses of Keras are means since the model was compiled."""
    from isobatch_keras.spec import to_spec
    from isobatch_torch.spec import to_tensors

    found, wanted = to_tensors(torch_side.module), to_spec(model).tensors
    assert all(np.isfinite(found[key]).all() for key in wanted)  # no NaN is greater than another number
    weights = max(np.abs(found[key] - wanted[key]).max() / (np.abs(wanted[key]).max() or 1) for key in wanted)
    running = [np.mean([ours for ours, _ in pairs[: i + 1]]) for i in range(len(pairs))]
    return weights, running


OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "sgd momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "sgd nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.01),
    "rmsprop centered": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "adam": lambda: optimizers.Adam(0.01),
    "adam amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True, global_clipnorm=0.5),
    "adam clipvalue ema": lambda: optimizers.Adam(
        0.01, clipvalue=0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4
    ),
    "adam accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "adamax": lambda: optimizers.Adamax(0.01),
    "nadam": lambda: optimizers.Nadam(0.01),
    "lion": lambda: optimizers.Lion(0.001),
    "ftrl": lambda: optimizers.Ftrl(
        0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.01, beta=0.1
    ),
    "loss scale": lambda: optimizers.SGD(0.1, loss_scale_factor=8.0),
    "dynamic loss scale": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01), initial_scale=64.0, dynamic_growth_steps=2
    ),
    "schedule": lambda: optimizers.SGD(schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True)),
    "cosine": lambda: optimizers.Adam(schedules.CosineDecay(0.01, 4, warmup_target=0.02, warmup_steps=2)),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in {"sgd", "rmsprop", "adam"} else pytest.param(name, marks=pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_every_optimizer_takes_the_same_steps_from_the_middle_of_training(name):
    model = network()
    model.compile(OPTIMIZERS[name](), "mse")
    for _ in range(3):
        model.train_on_batch(X, Y)
    torch_side, pairs = both(model, X, Y)
    assert gaps(model, torch_side, pairs)[0] < GAP
    assert torch_side.optimizer.iterations == 9


SPARSE = {"sparse_categorical_crossentropy", "categorical_generalized_cross_entropy"}
FUNCTIONS = {"categorical_generalized_cross_entropy": keras.losses.CategoricalGeneralizedCrossEntropy}


@pytest.mark.slow
@pytest.mark.parametrize("last", ["softmax", None])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_the_same_value_and_gradient(name, last):
    if last is None and name in {"kl_divergence", "poisson", "categorical_generalized_cross_entropy"}:
        last = "sigmoid"  # they are about probabilities
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), L.Dense(3, activation=last, kernel_regularizer="l1l2")])
    model.compile(optimizers.SGD(0.1), FUNCTIONS[name]() if name in FUNCTIONS else name)
    targets = CLASSES if name in SPARSE else np.eye(3)[CLASSES] * 0.85 + 0.05
    x, weight = X.reshape(11, -1)[:, :4], RNG.random(11)
    torch_side = isobatch.training_twin(model)
    ours = torch_side.train_on_batch(x, targets, weight)
    theirs = float(model.train_on_batch(x, targets, sample_weight=weight))
    assert abs(ours - theirs) < GAP * max(1, abs(theirs))
    assert gaps(model, torch_side, [])[0] < GAP


ULP = np.finfo("float32").eps * 0.3  # of the greatest rate
SCHEDULES = [
    schedules.ExponentialDecay(0.1, 3, 0.5),
    schedules.InverseTimeDecay(0.1, 3, 0.5, staircase=True),
    schedules.PiecewiseConstantDecay([2, 5], [0.3, 0.2, 0.1]),
    schedules.PolynomialDecay(0.1, 4, 0.01, power=2.0, cycle=True),
    schedules.CosineDecay(0.1, 5, alpha=0.1, warmup_target=0.3, warmup_steps=3),
    schedules.CosineDecayRestarts(0.1, 3, t_mul=2.0, m_mul=0.8, alpha=0.1),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: type(one).__name__)
def test_every_schedule_has_the_same_rate_at_every_step(schedule):
    from isobatch_torch.training.schedules import rate_at

    model = keras.Sequential([keras.Input((4,)), L.Dense(1)])
    model.compile(optimizers.SGD(schedule), "mse")
    part = to_recipe(model).learning_rate
    for step in range(15):
        assert abs(rate_at(part, step) - float(keras.ops.convert_to_numpy(schedule(step)))) <= ULP, step


def test_metrics_and_weights_of_several_outputs():
    keras.utils.set_random_seed(0)
    x = keras.Input((4,))
    h = L.Dense(5, "tanh")(x)
    model = keras.Model(x, [L.Dense(3, "softmax", name="kind")(h), L.Dense(1, name="size")(h)])
    model.compile(
        "adam",
        ["sparse_categorical_crossentropy", "mae"],
        loss_weights=[0.3, 2.0],
        metrics=[["accuracy"], ["mse", keras.metrics.RootMeanSquaredError()]],
    )
    torch_side = isobatch.training_twin(model)
    rows, targets = X.reshape(11, -1)[:, :4], [CLASSES, Y[:, :1]]
    torch_side.fit(rows, targets, batch_size=7)
    logs = model.fit(rows, targets, batch_size=7, shuffle=False, verbose=0).history
    assert gaps(model, torch_side, [])[0] < GAP
    for name, value in torch_side.metrics.items():
        assert abs(value - logs[name][0]) < GAP, name
    assert len(torch_side.metrics) == 3


@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_over_replicas_with_batch_statistics(replicas):
    """Keras over replicas and torch over as many, batches that do not divide: the same steps."""
    devices = [f"cpu:{rank}" for rank in range(replicas)]
    template = network("softmax")
    parallel = isobatch.data_parallel(template, devices)
    parallel.compile(optimizers.RMSprop(0.01), "categorical_crossentropy")
    torch_side = isobatch.training_twin(parallel)
    torch_side.module = isobatch.data_parallel(torch_side.module, devices)
    targets = np.eye(3)[CLASSES]
    for part in (slice(0, 7), slice(7, 11), slice(0, 5)) * 2:
        torch_side.train_on_batch(X[part], targets[part])
        parallel.train_on_batch(X[part], targets[part])
    torch_side.module = torch_side.module.module
    assert gaps(template, torch_side, [])[0] < GAP


@pytest.mark.slow
def test_words_recurrent_networks_and_attention():
    keras.utils.set_random_seed(0)
    words = keras.Input((6,), dtype="int32")
    h = L.Embedding(9, 8)(words)
    # Without biases: the gradient of a key's is zero but for rounding, of which Adam makes full steps.
    h = L.LayerNormalization()(h + L.MultiHeadAttention(2, 4, use_bias=False)(h, h))
    h = L.LSTM(5, return_sequences=True)(h)
    h = L.Bidirectional(L.GRU(4))(h)
    model = keras.Model(words, L.Dense(3)(h))
    model.compile(optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows = RNG.integers(0, 9, (11, 6))
    torch_side, _ = both(model, rows, CLASSES, steps=20)
    assert gaps(model, torch_side, [])[0] < GAP


def test_what_is_frozen_stays():
    model = network()
    model.get_layer("norm").trainable = False
    model.get_layer("conv").trainable = False
    model.compile("adam", "mse")
    torch_side, pairs = both(model, X, Y)
    assert gaps(model, torch_side, pairs)[0] < GAP
    assert not torch_side.module.conv.weight.requires_grad


@pytest.mark.parametrize(
    ("spoil", "layer"),
    [
        (lambda side: side.optimizer.param_groups[0].update(epsilon=1e-8), "out"),
        (lambda side: side.optimizer.param_groups[0].update(lr=0.0011), "out"),
        (lambda side: setattr(side.module.norm, "momentum", 0.5), "norm"),
    ],
)
def test_a_wrong_setting_shows(spoil, layer):
    model = network()
    model.compile("adam", "mse")
    torch_side = isobatch.training_twin(model)
    spoil(torch_side)
    for _ in range(3):
        torch_side.train_on_batch(X, Y)
        model.train_on_batch(X, Y)
    assert gaps(model, torch_side, [])[0] > 1e3 * GAP


def test_a_recipe_is_text():
    model = network("softmax")
    model.compile(
        optimizers.AdamW(schedules.CosineDecay(0.1, 5), clipnorm=1.0),
        "categorical_crossentropy",
        metrics=["accuracy", "auc"],
    )
    recipe = to_recipe(model)
    assert Recipe.from_json(recipe.to_json()) == recipe
    with pytest.raises(SpecError, match="of version 1, got 2"):
        Recipe.from_json(recipe.to_json().replace('"version": 1', '"version": 2'))
    with pytest.raises(SpecError, match="optimizer 'magic'"):
        Recipe.from_json(recipe.to_json().replace('"adamw"', '"magic"'))
    with pytest.raises(SpecError, match="recipe as JSON"):
        Recipe.from_json(recipe.to_json()[:-20])


def test_all_that_has_no_words_is_listed_at_once():
    class Mine(optimizers.SGD):
        pass

    model = keras.Sequential(
        [keras.Input((4,)), L.Dense(3, kernel_constraint=keras.constraints.NonNeg(), name="out")]
    )
    model.compile(Mine(), lambda y, p: keras.ops.mean(y - p))
    with pytest.raises(SpecError) as caught:
        isobatch.training_twin(model)
    for part in ("Mine", "loss", "constraint NonNeg"):
        assert part in str(caught.value)
    with pytest.raises(ModelError, match="not\\. Cure: model\\.compile"):
        isobatch.training_twin(network())


def words():
    """Embedding, GRU with its two biases, batch statistics."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            L.Embedding(9, 4),
            L.GRU(5),
            L.BatchNormalization(),
            L.Dense(3, name="out"),
        ]
    )


ROWS = RNG.integers(0, 9, (11, 6))
STATES = {
    "adam": lambda: optimizers.Adam(schedules.ExponentialDecay(0.05, 3, 0.5), amsgrad=True),
    "nadam": lambda: optimizers.Nadam(0.05),
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.9, use_ema=True, gradient_accumulation_steps=2),
    "ftrl": lambda: optimizers.Ftrl(0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
def test_training_goes_on_in_the_other_framework_and_comes_back(name, tmp_path):
    whole, first, last = words(), words(), words()
    for model in (whole, first, last):
        model.compile(STATES[name](), "mse")
    targets = RNG.random((11, 3))

    def steps(side, count, start=0):
        for step in range(start, start + count):
            side.train_on_batch(ROWS[step % 3 :], targets[step % 3 :])

    steps(whole, 9)
    steps(first, 3)
    training = isobatch.training_twin(first)  # Keras, then torch, then Keras again
    steps(training, 3, 3)
    isobatch.TrainingState.of(training).save(tmp_path / "state.safetensors")
    state = isobatch.TrainingState.load(tmp_path / "state.safetensors")
    state.put_into(last)
    steps(last, 3, 6)
    found, wanted = (isobatch.TrainingState.of(model) for model in (last, whole))
    assert found.iterations == wanted.iterations == 9
    assert found.slots.keys() == wanted.slots.keys() != set()
    for ours, theirs in [
        (found.weights, wanted.weights),
        *((found.slots[s], wanted.slots[s]) for s in wanted.slots),
    ]:
        assert len(ours) == len(theirs)
        for (key, array), one in zip(
            theirs.items(), ours.values(), strict=True
        ):  # both in the network's order
            assert np.abs(one - array).max() <= GAP * max(1.0, np.abs(array).max()), key
    isobatch.TrainingState.of(whole).put_into(training)  # and into a twin that was elsewhere
    steps(training, 2, 9)
    steps(whole, 2, 9)
    pairs = zip(*(isobatch.TrainingState.of(one).weights.values() for one in (training, whole)), strict=True)
    assert all(np.abs(a - b).max() < GAP for a, b in pairs)


def test_states_of_other_trainings_and_broken_files_change_nothing(tmp_path):
    model, other = words(), network()
    model.compile("adam", "mse")
    other.compile("adam", "mse")
    model.train_on_batch(ROWS, RNG.random((11, 3)))
    state = isobatch.TrainingState.of(model)
    path = tmp_path / "state.safetensors"
    state.save(path)
    before = [variable.numpy() for variable in other.variables]
    with pytest.raises(SpecError, match=r"embedding.*expected none"):
        state.put_into(other)
    again = words()
    again.compile("sgd", "mse")
    with pytest.raises(SpecError, match=r"optimizer 'adam', expected 'sgd'"):
        state.put_into(again)
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, other.variables, strict=True))
    whole = path.read_bytes()
    for cut in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(SpecError, match=r"state\.safetensors"):
            isobatch.TrainingState.load(path)
    from safetensors.numpy import save_file

    save_file({"x": np.ones(1)}, path)
    with pytest.raises(SpecError, match="another file"):
        isobatch.TrainingState.load(path)
    with pytest.raises(FileNotFoundError):
        isobatch.TrainingState.load(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"compiled keras\.Model"):
        isobatch.TrainingState.of(network())


def test_steps_that_overflow_are_left_out_as_in_keras():
    model = network()
    model.compile(
        optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=2.0**20, dynamic_growth_steps=3),
        "mse",
    )
    torch_side = isobatch.training_twin(model)
    huge = X.copy()
    huge[0] = np.inf
    for x in (X, huge, X, X, X, X):
        torch_side.train_on_batch(x, Y)
        model.train_on_batch(x, Y)
        model.get_layer("norm").moving_mean.assign(
            np.zeros(4)
        )  # statistics of infinities are none, and stay so
        model.get_layer("norm").moving_variance.assign(np.ones(4))
        torch_side.module.norm.running_mean.zero_()
        torch_side.module.norm.running_var.fill_(1)
    assert torch_side.scaler.factor == float(model.optimizer.dynamic_scale.numpy()) == 2.0**20
    assert torch_side.optimizer.iterations == int(model.optimizer.inner_optimizer.iterations.numpy()) == 5
    assert gaps(model, torch_side, [])[0] < GAP
    assert isobatch.TrainingState.of(torch_side).once == isobatch.TrainingState.of(model).once


@pytest.mark.parametrize("replicas", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_outputs_with_masks_count_where_they_are_not_masked(replicas):
    keras.utils.set_random_seed(0)
    words = keras.Input((6,), dtype="int32")
    h = L.LSTM(5, return_sequences=True)(L.Embedding(9, 4, mask_zero=True)(words))
    model = keras.Model(words, [L.Dense(3, name="tags")(h), L.GlobalAveragePooling1D(name="mean")(h)])
    model.compile(
        optimizers.SGD(0.1),
        [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"],
        metrics=[["sparse_categorical_accuracy"], ["mae"]],
    )
    template = model
    if replicas is not None:
        from isobatch_keras.mirror import adopt_compilation

        devices = [f"cpu:{rank}" for rank in range(replicas)]
        model = isobatch.data_parallel(template, devices)
        adopt_compilation(model, template)
    torch_side = isobatch.training_twin(template)
    if replicas is not None:
        torch_side.module = isobatch.data_parallel(torch_side.module, devices)
    rows = RNG.integers(0, 9, (11, 6))
    rows[:, 0], rows[2, 1:] = 1, 0  # most of a row masked
    targets = [RNG.integers(0, 3, (11, 6)), RNG.random((11, 5))]
    for _ in range(4):
        torch_side.reset_metrics()
        ours = torch_side.train_on_batch(rows, targets)
        theirs = model.train_on_batch(rows, targets, return_dict=True)
    torch_side.module = torch_side.network
    assert gaps(template, torch_side, [])[0] < GAP
    for name, value in torch_side.metrics.items():
        assert abs(value - theirs[name]) < GAP, name
    assert abs(ours - theirs["loss"]) < GAP


@pytest.mark.parametrize("one_hot", [False, True])
def test_class_weights_and_averages_in_fit(one_hot):
    model = network("softmax")
    loss = "categorical_crossentropy" if one_hot else "sparse_categorical_crossentropy"
    model.compile(optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), loss, weighted_metrics=["accuracy"])
    torch_side = isobatch.training_twin(model)
    targets = np.eye(3)[CLASSES] if one_hot else CLASSES
    settings = {"batch_size": 4, "epochs": 2, "class_weight": {0: 0.5, 2: 3.0}}
    ours = torch_side.fit(X, targets, **settings)
    theirs = model.fit(X, targets, shuffle=False, verbose=0, **settings).history
    assert gaps(model, torch_side, [])[0] < GAP
    np.testing.assert_allclose(ours, theirs["loss"], rtol=GAP)
    assert abs(torch_side.metrics["accuracy"] - theirs["accuracy"][-1]) < GAP
    with pytest.raises(ValueError, match="got sample weights too"):
        torch_side.fit(X, targets, sample_weight=np.ones(11), class_weight={0: 1.0})


def test_states_of_the_same_weights_but_another_beginning():
    plain, amsgrad, started, fresh = network(), network(), network(), network()
    for model, optimizer in (
        (plain, optimizers.Adam()),
        (amsgrad, optimizers.Adam(amsgrad=True)),
        (started, "adam"),
        (fresh, "adam"),
    ):
        model.compile(optimizer, "mse")
    for model in (plain, amsgrad, started):
        model.train_on_batch(X, Y)
    before = [np.asarray(variable.numpy()) for variable in (*amsgrad.variables, *started.variables)]
    with pytest.raises(SpecError, match="velocity_hat"):
        isobatch.TrainingState.of(plain).put_into(amsgrad)
    with pytest.raises(SpecError, match="compile anew"):
        isobatch.TrainingState.of(fresh).put_into(started)
    after = [np.asarray(variable.numpy()) for variable in (*amsgrad.variables, *started.variables)]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    training = isobatch.training_twin(started)
    isobatch.TrainingState.of(fresh).put_into(training)  # torch begins anew
    training.train_on_batch(X, Y)
    fresh.train_on_batch(X, Y)
    assert gaps(fresh, training, [])[0] < GAP


def test_no_rows_have_a_loss_of_nothing_to_go_back_from():
    """As a process of several has it that got none of a batch."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    training = isobatch.training_twin(model)
    before = [p.detach().clone() for p in training.module.parameters()]
    assert training.train_on_batch(np.zeros((0, 3)), np.zeros((0, 2))) == 0.0
    assert all(map(torch.equal, before, training.module.parameters()))


def test_norm_of_a_twin_has_its_weights_where_replicas_of_torch_have_them():
    """`nn.DataParallel` takes parameters out of a replica and leaves tensors in their places."""
    norm = isobatch.twin(keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()]))
    x = torch.tensor([[1.0, 2.0, 3.0], [2.0, 2.0, 5.0]])
    expected = norm(x)
    layer = next(module for module in norm.modules() if "weight" in module._parameters)
    for name in ("weight", "bias"):
        tensor = layer._parameters.pop(name).detach()
        object.__setattr__(layer, name, tensor)
    assert torch.equal(norm(x), expected)
