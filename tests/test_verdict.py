"""The verdict can fail: each trap is planted in a twin, and the verdict names the layer it was planted in, and no other."""

import keras
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from twin_cases import batch_for, image, masked, scramble, sequence

import isobatch
from isobatch.testing import assert_parity
from isobatch.verdict import judge

L = keras.layers


def convnet(layer):
    """Convolution, the layer under test, convolution."""
    x = image(10, 8, 4)
    return keras.Model(
        x, L.Conv2D(3, 3, name="after")(layer(L.Conv2D(4, 3, padding="same", name="before")(x)))
    )


def mlp(layer, shape=(6, 5)):
    x = keras.Input(shape)
    return keras.Model(x, L.Dense(3, name="after")(layer(L.Dense(shape[-1], name="before")(x))))


def words(layer):
    return masked(lambda x: L.Dense(3, name="after")(layer(x)))


class Instead(nn.Module):
    """A function in place of a layer; it is also given the layer, with whose copies it goes."""

    def __init__(self, function, layer, *, channels_first=False):
        super().__init__()
        self.function, self.layer, self.channels_first = function, layer, channels_first

    def forward(self, *args, **kwargs):
        if self.channels_first:
            return self.function(self.layer, args[0].movedim(-1, 1)).movedim(1, -1)
        return self.function(self.layer, *args, **kwargs)


def transposed_as_usual(layer, x):
    return F.conv_transpose2d(x, layer.weight, layer.bias, stride=2, padding=1, output_padding=1)


def set_(**values):
    def plant(twin):
        for name, value in values.items():
            setattr(twin.planted, name, value)

    return plant


def swap(make):
    def plant(twin):
        twin.planted = make(twin.planted)

    return plant


def instead(function):
    return swap(lambda layer: Instead(function, layer))


def first(function):
    """In place of a layer, and of channels first."""
    return swap(lambda layer: Instead(function, layer, channels_first=True))


def permute(name, order, blocks):
    """The parameter's blocks in another order."""

    def plant(twin):
        parameter = getattr(twin.planted, name)
        parts = parameter.detach().chunk(blocks)
        parameter.data = torch.cat([parts[number] for number in order])

    return plant


def depthwise_order(twin):
    weight = twin.planted.weight  # (in * 2, 1, h, w), in the order in * 2 + j
    weight.data = weight.detach().unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1).contiguous()


def inverted(layer, *xs, **masks):
    return layer(*xs, **{name: ~mask for name, mask in masks.items()})


def unbiased(layer):
    class Norm(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x.movedim(-1, 1)).movedim(1, -1)

    norm = Norm(layer.num_features, layer.eps, layer.momentum)
    norm.load_state_dict(layer.state_dict())
    return norm


def old_reset(layer):
    """`nn.GRU` with a hidden bias of zero, in place of a GRU that resets before the product."""
    native = nn.GRU(layer.weight_ih_l0.shape[1], layer.hidden_size, batch_first=True)
    native.load_state_dict({**layer.state_dict(), "bias_hh_l0": torch.zeros_like(native.bias_hh_l0)})
    return Instead(lambda gru, x: gru(x)[0][:, -1], native)


def both_last(twin):
    """The last step of both directions' outputs, which for the backward one is its first."""
    reversed_ = twin.planted.backward_lstm
    reversed_.settings = {**reversed_.settings, "return_sequences": True}
    twin.planted.backward_lstm = Instead(lambda layer, x: layer(x)[:, 0], reversed_)


def zero_row(twin):
    twin.planted.weight.data[0] = 0


TRAPS = {
    "batchnorm-eps": (lambda: convnet(L.BatchNormalization(name="planted")), set_(eps=1e-5)),
    "batchnorm-momentum": (lambda: convnet(L.BatchNormalization(name="planted")), set_(momentum=0.99)),
    "batchnorm-unbiased": (lambda: convnet(L.BatchNormalization(name="planted")), swap(unbiased)),
    "layernorm-eps": (lambda: mlp(L.LayerNormalization(name="planted")), set_(eps=1e-5)),
    "groupnorm-eps": (lambda: convnet(L.GroupNormalization(2, name="planted")), set_(eps=1e-5)),
    "rmsnorm-eps": (
        lambda: mlp(L.RMSNormalization(name="planted")),
        set_(eps=torch.finfo(torch.float64).eps),
    ),
    "same-shifted": (
        lambda: convnet(L.Conv2D(4, 3, strides=2, padding="same", name="planted")),
        first(lambda conv, x: F.conv2d(x, conv.weight, conv.bias, stride=2, padding=1)),
    ),
    "same-even": (
        lambda: convnet(L.Conv2D(4, 4, padding="same", name="planted")),
        first(lambda conv, x: F.conv2d(x, conv.weight, conv.bias, padding=2)),
    ),
    "causal-as-same": (lambda: mlp(L.Conv1D(5, 3, padding="causal", name="planted")), set_(same="same")),
    "depthwise-order": (
        lambda: convnet(L.DepthwiseConv2D(3, depth_multiplier=2, name="planted")),
        depthwise_order,
    ),
    "transposed": (
        lambda: convnet(L.Conv2DTranspose(4, 3, strides=2, padding="same", name="planted")),
        first(transposed_as_usual),
    ),
    "avgpool-counted": (
        lambda: convnet(L.AveragePooling2D(3, 2, "same", name="planted")),
        first(lambda _, x: F.avg_pool2d(F.pad(x, (0, 1, 0, 1)), 3, 2)),
    ),
    "maxpool-shifted": (
        lambda: convnet(L.MaxPooling2D(3, 2, "same", name="planted")),
        first(lambda _, x: F.max_pool2d(x, 3, 2, padding=1)),
    ),
    "flatten-order": (
        lambda: mlp(L.Flatten(name="planted")),
        instead(lambda _, x: x.movedim(-1, 1).flatten(1)),
    ),
    "softmax-axis": (lambda: mlp(L.Softmax(name="planted")), set_(axes=[1])),
    "gelu-tanh": (lambda: mlp(L.Activation("gelu", name="planted")), set_(approximate="tanh")),
    "leaky-slope": (lambda: mlp(L.LeakyReLU(name="planted")), set_(negative_slope=0.01)),
    "hard-sigmoid-of-keras-2": (
        lambda: mlp(L.Activation("hard_sigmoid", name="planted")),
        instead(lambda _, x: (0.2 * x + 0.5).clamp(0, 1)),
    ),
    "elu-alpha": (lambda: mlp(L.ELU(0.7, name="planted")), set_(alpha=1.0)),
    "softplus-threshold": (lambda: mlp(L.Activation("softplus", name="planted")), set_(threshold=1.0)),
    "lstm-gates": (lambda: mlp(L.LSTM(5, name="planted")), permute("weight_ih_l0", (1, 0, 2, 3), 4)),
    "lstm-second-bias": (
        lambda: mlp(L.LSTM(5, name="planted")),
        lambda twin: twin.planted.bias_hh_l0.data.fill_(0.1),
    ),
    "gru-gates": (lambda: mlp(L.GRU(5, name="planted")), permute("weight_hh_l0", (1, 0, 2), 3)),
    "gru-reset": (lambda: mlp(L.GRU(5, reset_after=False, name="planted")), swap(old_reset)),
    "lstm-unmasked": (
        lambda: words(L.LSTM(5, return_sequences=True, name="planted")),
        instead(lambda layer, x, mask: layer(x)),
    ),
    "lstm-packed": (
        lambda: words(L.LSTM(5, return_sequences=True, name="planted")),
        instead(lambda layer, x, mask: layer(x, mask=mask) * mask[..., None]),
    ),
    "bidirectional-last": (lambda: mlp(L.Bidirectional(L.LSTM(5, name="lstm"), name="planted")), both_last),
    "embedding-zero-row": (
        lambda: keras.Sequential(
            [keras.Input((7,), dtype="int32"), L.Embedding(11, 4, mask_zero=True, name="planted")]
        ),
        zero_row,
    ),
    "attention-mask": (
        lambda: words(lambda x: L.MultiHeadAttention(2, 3, name="planted")(x, x)),
        instead(inverted),
    ),
    "attention-causal": (
        lambda: mlp(lambda x: L.MultiHeadAttention(2, 3, name="planted")(x, x, use_causal_mask=True)),
        set_(causal=False),
    ),
    "attention-groups": (
        lambda: mlp(lambda x: L.GroupQueryAttention(3, 4, 2, name="planted")(x, x)),
        instead(lambda layer, *xs: layer(*xs).flip(-1)),
    ),
    "align-corners": (
        lambda: convnet(L.UpSampling2D(2, interpolation="bilinear", name="planted")),
        first(lambda _, x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)),
    ),
    "nearest": (
        lambda: convnet(L.Resizing(7, 5, interpolation="nearest", name="planted")),
        first(lambda _, x: F.interpolate(x, (7, 5), mode="nearest")),
    ),
    "bicubic": (
        lambda: convnet(L.UpSampling2D(2, interpolation="bicubic", name="planted")),
        first(lambda _, x: F.interpolate(x, scale_factor=2, mode="bicubic")),
    ),
    "antialias": (lambda: convnet(L.Resizing(5, 6, antialias=True, name="planted")), set_(antialias=False)),
    "padding-side": (
        lambda: convnet(L.ZeroPadding2D(((0, 1), (0, 1)), name="planted")),
        first(lambda _, x: F.pad(x, (1, 0, 1, 0))),
    ),
    "unit-of-one-weight": (
        lambda: mlp(L.Dense(5, name="planted")),
        lambda twin: twin.planted.weight.data[2, 3].mul_(1 + 1e-7),
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_planted_trap_is_named(name):
    build, plant = TRAPS[name]
    model = scramble(build())
    twin, batch = isobatch.twin(model), batch_for(model)
    assert judge(model, twin, batch, precision=None).passed
    plant(twin)
    verdict = judge(model, twin, batch, precision=None)
    assert verdict.word == "FAIL"
    assert [layer.layer for layer in verdict.wrong] == ["planted"], str(verdict)


def test_several_wrong_layers_are_named_in_one_pass():
    x = sequence(6, 5)
    y = L.LayerNormalization(name="first")(x)
    y = L.Dense(5, activation="gelu", name="second")(y)
    model = scramble(keras.Model(x, L.LayerNormalization(name="third")(y)))
    twin = isobatch.twin(model)
    twin.first.eps = twin.third.eps = 1e-5
    assert {layer.layer for layer in judge(model, twin, batch_for(model)).wrong} == {"first", "third"}


def test_wrong_wiring_is_found_where_every_layer_is_right():
    x = keras.Input((5,))
    a, b = L.Dense(5, name="a")(x), L.Dense(5, name="b")(x)
    model = scramble(keras.Model(x, L.Subtract(name="difference")([a, b])))
    twin = isobatch.twin(model)
    node = next(node for node in twin.graph.nodes if node.name == "difference")
    node.args = node.args[::-1]
    twin.recompile()
    verdict = judge(model, twin, batch_for(model))
    assert (verdict.word, verdict.wrong) == ("FAIL", ())
    assert "outputs differ" in str(verdict)


@pytest.mark.parametrize(("activation", "fault"), [("relu", 1e-10), ("gelu", 1e-6)])
def test_a_small_fault_between_right_layers_is_found(activation, fault):
    """A thousand floors would allow 1e-9 and 1e-4; what the layers' own gaps come to is less."""
    x = keras.Input((6, 5))
    y = L.Dense(5, name="planted")(L.Dense(5, activation=activation)(x))
    model = scramble(keras.Model(x, L.Dense(3)(L.LayerNormalization()(y))))
    twin, batch = isobatch.twin(model), batch_for(model)
    assert judge(model, twin, batch).word == "PASS"
    node = next(node for node in twin.graph.nodes if node.target == "planted")
    with twin.graph.inserting_after(node):
        scaled = twin.graph.call_function(torch.add, (node.args[0], fault))
    node.prepend(scaled)
    node.args = (scaled,)
    twin.recompile()
    verdict = judge(model, twin, batch)
    assert (verdict.word, verdict.wrong) == ("FAIL", ())
    assert verdict.whole.scaled < fault * 100


def test_rounding_that_grows_on_the_way_is_no_fault():
    """Differences of near neighbours, amplified: right layers, and a gap at the end far above a clean layer's floor."""
    x = keras.Input((8,))
    y = L.Dense(8, activation="tanh", name="first")(x)
    for _ in range(4):
        y = L.LayerNormalization(epsilon=1e-12)(y * 1e-3 + 1.0) * 1e3
    model = scramble(keras.Model(x, L.Dense(3)(y)))
    verdict = judge(model, isobatch.twin(model), batch_for(model))
    assert (verdict.word, verdict.whole.passed) == ("PASS", True)
    assert verdict.whole.allowed > 1e-12


def test_a_wrong_epsilon_that_every_float32_tolerance_passes():
    """The measured example of docs/parity.md."""
    model = scramble(convnet(L.BatchNormalization(name="planted")))
    twin, batch = isobatch.twin(model), batch_for(model)
    model.get_layer("planted").moving_variance.assign([700.0, 900, 800, 1000])
    twin.planted.running_var.copy_(torch.tensor([700.0, 900, 800, 1000]))
    twin.planted.eps = 1e-5
    with torch.no_grad():
        ours = twin(torch.tensor(batch, dtype=torch.float32))
    torch.testing.assert_close(ours, torch.tensor(model(batch).numpy()), rtol=1.3e-6, atol=1e-5)
    verdict = judge(model, twin, batch)
    assert [layer.layer for layer in verdict.wrong] == ["planted"]
    assert verdict.wrong[0].check.scaled > 1e5 * verdict.wrong[0].check.allowed


def test_closeness_states_the_gap_beside_both_rounding_errors():
    model = scramble(convnet(L.BatchNormalization()))
    closeness = judge(model, isobatch.twin(model), batch_for(model)).closeness
    assert closeness.gap < 1e-5
    assert 0 < closeness.keras < 1e-5
    assert 0 < closeness.torch < 1e-5
    assert closeness.ratio < 4


@keras.saving.register_keras_serializable("isobatch_tests")
class Stubborn(L.Dense):
    """A layer that stays in float32 whatever it is told."""

    def __init__(self, units, **kwargs):
        super().__init__(units, **{**kwargs, "dtype": "float32"})


class Unregistered(L.Dense):
    def __init__(self, units, secret, **kwargs):
        super().__init__(units, **kwargs)
        self.secret = secret


@pytest.mark.parametrize(
    ("layer", "reason"), [(Stubborn(3, name="odd"), "float32"), (Unregistered(3, 7, name="odd"), "rebuilt")]
)
def test_a_layer_that_is_not_float64_is_inconclusive_and_named(layer, reason):
    model = keras.Sequential([keras.Input((4,)), L.Dense(4), layer])
    verdict = judge(model, isobatch.twin(model), np.ones((2, 4)))
    assert verdict.word == "INCONCLUSIVE"
    assert "odd" in verdict.reason
    assert reason in verdict.reason
    assert "factory" in str(verdict)


def test_a_factory_cures_what_cannot_be_rebuilt():
    def build():
        return keras.Sequential([keras.Input((4,)), L.Dense(4), Unregistered(3, 7)])

    model = scramble(build())
    twin, batch = isobatch.twin(model), np.ones((2, 4))
    assert judge(model, twin, batch, factory=build).passed
    twin.get_submodule(next(iter(dict(twin.named_children())))).bias.data.add_(1e-6)
    assert judge(model, twin, batch, factory=build).word == "FAIL"


def test_parallel_runs_are_part_of_the_verdict():
    model = scramble(convnet(L.BatchNormalization()))
    verdict = judge(model, isobatch.twin(model), batch_for(model), replicas=(1, 2))
    assert verdict.passed, str(verdict)
    assert [(run.replicas, run.sizes) for run in verdict.parallel] == [(1, (3,)), (2, (2, 1))]
    assert set(verdict.parallel[0].checks) == {"keras", "torch", "keras-torch"}


class Port(nn.Module):
    """A hand-written port of a small network, with a fault or without."""

    def __init__(self, *, eps=1e-3, shifted=False):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2, padding=1 if shifted else 0)
        self.norm = nn.BatchNorm2d(4, eps=eps)
        self.head = nn.Linear(4 * 6 * 5, 3)

    def forward(self, image):
        if not self.stem.padding[0]:
            image = F.pad(image, (0, 1, 0, 1))
        return self.head(F.relu(self.norm(self.stem(image))).flatten(1))


def ported():
    x = image(12, 10, 3)
    y = L.Conv2D(4, 3, strides=2, padding="same", name="conv")(x)
    y = L.ReLU()(L.BatchNormalization(name="bn")(y))
    return scramble(keras.Model(x, L.Dense(3, name="logits")(L.Flatten()(y))))


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [({}, []), ({"eps": 1e-5}, ["bn = norm"]), ({"shifted": True}, ["conv = stem"])],
)
def test_a_handwritten_port_is_judged_and_its_wrong_layers_are_named(fault, wrong):
    model, port = ported(), Port(**fault)
    isobatch.copy_weights(model, port)
    verdict = judge(model, port, batch_for(model), layout="channels_first")
    assert verdict.word == ("FAIL" if wrong else "PASS"), str(verdict)
    assert [layer.layer for layer in verdict.wrong] == wrong


def test_assert_parity_shows_the_worst_layer_first():
    model = ported()
    twin = isobatch.twin(model)
    assert assert_parity(model, twin, batch_for(model)).parallel[1].replicas == 2
    twin.bn.eps = 1e-5
    twin.logits.weight.data[0, 0] += 0.5
    with pytest.raises(AssertionError, match=r"FAIL: 2 of \d+ layers differ\n  logits .*\n  bn "):
        assert_parity(model, twin, batch_for(model), replicas=())


def test_a_wrong_batch_norm_in_training_shows_in_the_text():
    model = scramble(convnet(L.BatchNormalization(name="planted")))
    twin = isobatch.twin(model)
    twin.planted.momentum = 0.99
    assert "planted (batch_norm, after one step of training)" in str(
        judge(model, twin, batch_for(model), precision=None)
    )
