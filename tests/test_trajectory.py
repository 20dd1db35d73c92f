"""Training step by step in both frameworks: the same losses, gradients and weights, and faults that are found and named."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
keras = pytest.importorskip("keras")

from test_training_twin import OPTIMIZERS  # noqa: E402

import isobatch  # noqa: E402
import isobatch.digits  # noqa: E402
from isobatch.errors import SpecError  # noqa: E402
from isobatch.testing import assert_training_parity  # noqa: E402

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


def batches(x, y, count=20):
    """Batches of 7 rows, each third one with 5."""
    for step in range(count):
        rows = RNG.permutation(len(x))[: 5 if step % 3 == 2 else 7]
        yield x[rows], y[rows]


def digits(optimizer="adam", dropout=0.0):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            L.Conv2D(4, 3, use_bias=False, name="conv"),
            L.BatchNormalization(momentum=0.9, name="norm"),
            L.ReLU(),
            L.Flatten(),
            L.Dropout(dropout, name="drop"),
            L.Dense(10, "softmax", name="out"),
        ]
    )
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


def images():
    found = isobatch.digits.load_digits(0)
    return found.train[:100].astype("float64"), found.train_labels[:100]


def xception():
    """Cut to one middle block; trained as the old example of multi_gpu_model was."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((16, 16, 3))
    x = L.BatchNormalization()(L.Conv2D(8, 3, strides=2, use_bias=False)(x))
    x = L.Activation("relu")(x)
    residual = x
    for _ in range(3):
        x = L.Activation("relu")(x)
        x = L.BatchNormalization()(L.SeparableConv2D(8, 3, padding="same", use_bias=False)(x))
    x = L.GlobalAveragePooling2D()(L.Add()([x, residual]))
    model = keras.Model(inputs, L.Dense(5, "softmax")(x))
    model.compile(optimizers.RMSprop(1e-3), "categorical_crossentropy")
    return model, (RNG.random((40, 16, 16, 3)), np.eye(5)[RNG.integers(0, 5, 40)])


def recurrent():
    keras.utils.set_random_seed(0)
    words = keras.Input((6,), dtype="int32")
    x = L.LSTM(5, return_sequences=True, name="lstm")(L.Embedding(9, 4, name="embed")(words))
    x = L.Dropout(0.3, name="drop")(L.Bidirectional(L.GRU(4))(x))
    model = keras.Model(words, L.Dense(1, "sigmoid", name="out")(x))
    model.compile(optimizers.Adam(1e-2), "binary_crossentropy")
    return model, (RNG.integers(0, 9, (40, 6)), RNG.integers(0, 2, (40, 1)).astype("float64"))


def transformer():
    keras.utils.set_random_seed(0)
    words = keras.Input((6,), dtype="int32")
    x = L.Embedding(9, 8)(words)
    # Without biases: the gradient of a key's is zero but for rounding, of which Adam makes full steps.
    x = L.LayerNormalization()(
        x + L.Dropout(0.2, name="drop_1")(L.MultiHeadAttention(2, 4, use_bias=False)(x, x))
    )
    x = L.LayerNormalization()(x + L.Dense(8)(L.Dropout(0.2, name="drop_2")(L.Dense(16, "gelu")(x))))
    model = keras.Model(words, L.Dense(3)(L.GlobalAveragePooling1D()(x)))
    model.compile(optimizers.AdamW(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, (RNG.integers(0, 9, (40, 6)), RNG.integers(0, 3, 40))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_the_same_twenty_steps_over_replicas(name):
    x, y = images()
    found = assert_training_parity(digits(OPTIMIZERS[name]()), batches(x, y), replicas=2)
    assert found.steps == 20


def test_steps_over_replicas_are_those_of_the_shards_one_after_another():
    """The reference of contract line 7: each shard normalised by itself, gradients weighted by rows, statistics of all rows."""
    x, y = images()
    taken = list(batches(x, y, 5))
    model = digits(optimizers.SGD(0.1))
    reference = isobatch.training_twin(model)
    assert_training_parity(model, taken, replicas=4)
    net = reference.module.train()
    for batch in taken:
        rows, labels = map(torch.tensor, batch)
        reference.optimizer.zero_grad()
        norm = net.norm
        before = norm.running_mean.clone(), norm.running_var.clone()
        with torch.no_grad():
            seen = net.conv(rows).flatten(0, 2)
        for part, targets in zip(rows.tensor_split(4), labels.tensor_split(4), strict=True):
            loss = torch.nn.functional.nll_loss(net(part).log(), targets)
            (loss * len(part) / len(rows)).backward()
        reference.optimizer.step()
        norm.running_mean.copy_(0.9 * before[0] + 0.1 * seen.mean(0))
        norm.running_var.copy_(0.9 * before[1] + 0.1 * seen.var(0, correction=0))
    found, wanted = (isobatch.TrainingState.of(one).weights for one in (model, reference))
    for key, array in wanted.items():
        np.testing.assert_allclose(found[key], array, rtol=1e-9, atol=1e-12, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [None, 2, 4])
@pytest.mark.parametrize("build", [xception, recurrent, transformer])
def test_twenty_steps_are_the_same(build, replicas):
    model, (x, y) = build()
    found = assert_training_parity(model, batches(x, y), replicas=replicas, dropout_seed=3)
    assert found.steps == 20
    assert set(found.gaps) == {"loss", "gradients", "weights"}


@pytest.mark.slow
@pytest.mark.parametrize("build", [recurrent, transformer])
def test_without_batch_statistics_replicas_change_nothing(build):
    """Dropout included: its units are counted by the row of the whole batch."""
    _, (x, y) = build()
    losses = []
    for replicas in (None, 2, 4):
        model, _ = build()
        taken = [(x[step : step + 7], y[step : step + 7]) for step in range(5)]
        losses.append(assert_training_parity(model, taken, replicas=replicas, dropout_seed=3).losses[1])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-9)


@pytest.mark.parametrize("replicas", [None, 2])
def test_dropout_is_the_same_when_asked(replicas):
    x, y = images()
    found = assert_training_parity(digits(dropout=0.5), batches(x, y, 6), replicas=replicas, dropout_seed=1)
    again = assert_training_parity(digits(dropout=0.5), batches(x, y, 1), replicas=replicas, dropout_seed=2)
    assert found.losses[0][0] != again.losses[0][0]
    with pytest.raises(AssertionError, match=r"part at step 1, loss"):
        assert_training_parity(digits(dropout=0.5), batches(x, y, 2))


def test_other_random_layers_are_refused():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), L.GaussianNoise(0.1, name="noise"), L.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(SpecError, match=r"noise \(gaussian_noise\)"):
        assert_training_parity(model, [(np.ones((2, 4)), np.ones((2, 1)))], dropout_seed=0)


class StockAdam(torch.optim.Adam):
    """What people write: Keras's names, torch's meaning."""

    iterations = 0
    once = ()


def stock_adam(training):
    training.optimizer = StockAdam(training.network.parameters(), lr=1e-3, eps=1e-7)


def coupled_decay(training):
    for group in training.optimizer.param_groups:
        group["weight_decay"] = None
    before = training.loss.forward

    def loss(*args):
        return before(*args) + 0.05 * sum(p.square().sum() for p in training.network.parameters())

    training.loss.forward = loss


def unbiased_variance(training):
    norm = training.network.norm
    native = torch.nn.BatchNorm2d(4, eps=norm.eps, momentum=norm.momentum, dtype=torch.float64)
    native.load_state_dict(norm.state_dict())

    def forward(x, mask=None):
        y = native(x.movedim(-1, 1)).movedim(1, -1)
        norm.running_mean.copy_(native.running_mean)
        norm.running_var.copy_(native.running_var)
        return y

    for name in ("weight", "bias"):
        setattr(native, name, getattr(norm, name))
    norm.forward = forward


def schedule_off_by_one(training):
    training.schedule.seek(training.optimizer.iterations + 1)


FAULTS = {
    "stock adam": (
        digits,
        stock_adam,
        r"step 1, weights, (conv\.kernel|norm\.(gamma|beta)|out\.(kernel|bias))",
    ),
    "coupled decay": (
        lambda: digits(optimizers.SGD(0.1, weight_decay=0.1)),
        coupled_decay,
        r"step 1, loss, loss",
    ),
    "unbiased variance": (
        lambda: digits("sgd"),
        unbiased_variance,
        r"step 1, weights, norm\.moving_variance",
    ),
    "schedule": (
        lambda: digits(optimizers.SGD(schedules.PiecewiseConstantDecay([2], [0.1, 0.01]))),
        schedule_off_by_one,
        r"step 3, weights",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(fault):
    build, plant, named = FAULTS[fault]
    model = build()
    x, y = images()
    training = isobatch.training_twin(model)
    plant(training)
    with pytest.raises(AssertionError, match=f"torch and keras part at {named}"):
        assert_training_parity(model, batches(x, y, 5), training=training)


def test_a_second_bias_that_is_trained_is_found_and_named():
    model, (x, y) = recurrent()
    training = isobatch.training_twin(model)
    lstm = training.network.lstm
    lstm.bias_hh_l0.requires_grad_()
    training.optimizer.add_param_group({"params": [lstm.bias_hh_l0]})
    before = training.optimizer.step

    def step():
        before()
        with torch.no_grad():  # where torch keeps the sum of both
            lstm.bias_ih_l0 += lstm.bias_hh_l0
            lstm.bias_hh_l0.zero_()

    training.optimizer.step = step
    with pytest.raises(AssertionError, match=r"part at step 1, weights, lstm\.bias"):
        assert_training_parity(model, batches(x, y, 3), training=training, dropout_seed=1)
