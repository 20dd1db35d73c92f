"""Twins as torch people use them, and weights both ways."""

import copy
import pickle
import re
import shutil

import keras
import numpy as np
import pytest
import torch
from torch import nn
from twin_cases import batch_for, scramble

import isobatch
import isobatch_torch
from isobatch.errors import DataError, ModelError, SpecError
from isobatch.operations import Operation, register_operation
from isobatch.spec import Spec
from isobatch.verdict import judge
from isobatch_keras.spec import load_tensors, to_spec
from isobatch_keras.spec import register_layer as register_keras_layer
from isobatch_torch.spec import from_spec, register_layer, to_tensors

L = keras.layers


def convnet(name="net", **last):
    image = keras.Input((12, 10, 3), name="image")
    x = L.Conv2D(4, 3, strides=2, padding="same", use_bias=False, name="conv1")(image)
    x = L.BatchNormalization(name="bn1")(x)
    x = L.ReLU(name="relu1")(x)
    y = L.SeparableConv2D(4, 3, padding="same", name="sep")(x)
    x = L.Add(name="sum")([x, y])
    x = L.MaxPooling2D(2, name="pool")(x * 2.0)
    x = L.Flatten(name="flat")(x)
    x = L.Dropout(0.5, name="drop")(x)
    x = L.Dense(5, activation="gelu", name="hidden")(x)
    return scramble(keras.Model(image, L.Dense(3, name="logits", **last)(x), name=name))


class Handwritten(nn.Module):
    """The same network as someone else wrote it: other names, another order, channels first."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.body = nn.ModuleDict({"z": nn.Linear(24, 5), "point": nn.Conv2d(4, 4, 1)})
        self.depth = nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False)
        self.norm = nn.BatchNorm2d(4, eps=1e-3)
        self.first = nn.Conv2d(3, 4, 3, stride=2, bias=False)

    def forward(self, image):
        x = torch.relu(self.norm(self.first(nn.functional.pad(image, (0, 1, 0, 1)))))
        x = 2 * (x + self.body["point"](self.depth(x)))
        x = nn.functional.max_pool2d(x, 2).flatten(1)
        return self.head(nn.functional.gelu(self.body["z"](x)))


def images(rows=3):
    return np.random.default_rng(0).standard_normal((rows, 12, 10, 3)).astype("float32")


def test_children_have_the_names_of_the_keras_layers_and_torch_has_its_own_parameter_names():
    twin = isobatch.twin(convnet())
    children = dict(twin.named_children())
    names = [
        re.sub(r"^multiply_\d+$", "multiply", name) for name in children
    ]  # Keras numbers what has no name
    assert names == [
        "conv1",
        "bn1",
        "relu1",
        "sep",
        "sum",
        "multiply",
        "pool",
        "flat",
        "drop",
        "hidden",
        "hidden_activation",
        "logits",
    ]
    assert {"conv1.weight", "bn1.running_mean", "bn1.weight", "sep.depthwise.weight", "logits.bias"} <= set(
        twin.state_dict()
    )
    assert "(conv1): Conv2d(3, 4, kernel_size=(3, 3), stride=(2, 2)" in str(twin)
    assert "(logits): Linear(in_features=5, out_features=3, bias=True)" in str(twin)
    assert type(twin).__name__ == "net"


@pytest.mark.parametrize("layout", ["channels_last", "channels_first"])
def test_layouts(layout):
    image = keras.Input((12, 10, 3))
    x = L.Conv2D(4, 3, activation="relu")(image)
    model = scramble(keras.Model(image, {"map": x, "vector": L.Dense(2)(L.Flatten()(x))}))
    twin = isobatch.twin(model, layout=layout)
    batch = torch.tensor(images())
    found = twin(batch if layout == "channels_last" else batch.movedim(-1, 1))
    expected = model(images())
    moved = found["map"] if layout == "channels_last" else found["map"].movedim(1, -1)
    np.testing.assert_allclose(moved.detach(), expected["map"], atol=1e-5)
    np.testing.assert_allclose(found["vector"].detach(), expected["vector"], atol=1e-4)
    assert judge(model, twin, images()).passed


def test_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="channels_last or channels_first"):
        isobatch.twin(convnet(), layout="NCHW")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_precisions(dtype):
    twin = isobatch.twin(convnet()).to(dtype)
    assert twin(torch.tensor(images()).to(dtype)).dtype == dtype


def test_copies_and_pickles():
    twin = isobatch.twin(convnet())
    batch = torch.tensor(images())
    for other in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):  # noqa: S301 - our own bytes
        assert torch.equal(other(batch), twin(batch))
        assert to_tensors(other).keys() == to_tensors(twin).keys()


@pytest.mark.slow
def test_exports_and_compiles():
    twin = isobatch.twin(convnet())
    batch = torch.tensor(images())
    exported = torch.export.export(twin, (batch,)).module()
    torch.testing.assert_close(exported(batch), twin(batch))
    compiled = torch.compile(twin, backend="aot_eager")
    torch.testing.assert_close(compiled(batch), twin(batch))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler")
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # by inductor itself
def test_compiles_to_machine_code():
    x = keras.Input((6, 4))
    y = L.Masking()(L.Dense(4, activation="gelu")(x))
    y = L.MultiHeadAttention(2, 3)(y, y)
    twin = isobatch.twin(scramble(keras.Model(x, L.Dense(2)(L.LayerNormalization()(y)))))
    batch = torch.rand(3, 6, 4)
    compiled = torch.compile(twin, backend="inductor")
    torch.testing.assert_close(compiled(batch), twin(batch))


def test_layers_may_be_named_as_what_a_module_has():
    x = keras.Input((3,), name="class")
    y = x
    for name in ("training", "forward", "weight", "_modules", "1st layer"):
        y = L.Dense(3, name=name)(y)
    model = scramble(keras.Model(x, y))
    assert judge(model, isobatch.twin(model), batch_for(model)).word == "PASS"


def test_no_rows_give_no_rows_in_a_twin_and_no_verdict():
    x = keras.Input((6, 4))
    y = L.BatchNormalization()(L.MultiHeadAttention(2, 3)(x, x))
    model = keras.Model(x, L.LSTM(3)(L.GroupNormalization(2)(L.Conv1D(4, 3)(y))))
    twin = isobatch.twin(model)
    assert twin(torch.zeros(0, 6, 4)).shape == (0, 3)
    with pytest.raises(DataError, match="at least one row"):
        judge(model, twin, np.zeros((0, 6, 4)))


def test_a_subclassed_model_says_how_it_gets_a_graph():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.norm = L.Dense(4, activation="relu"), L.BatchNormalization()
            self.head = L.Dense(2)

        def call(self, x, *, training=False):
            y = self.hidden(x)
            return self.head(self.norm(y, training=training) + y)

    model, batch = Net(), np.random.default_rng(0).standard_normal((3, 5)).astype("float32")
    model(batch)
    with pytest.raises(ModelError, match=re.escape("keras.Model(x, model.call(x))")):
        to_spec(model)
    x = keras.Input((5,))
    graph = keras.Model(x, model.call(x))
    assert judge(graph, isobatch.twin(graph), batch).word == "PASS"
    np.testing.assert_allclose(
        isobatch.twin(graph)(torch.tensor(batch)).detach(), model(batch), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_of_a_mixed_model_the_twin_has_the_float32_weights(policy):
    x = keras.Input((8, 8, 3))
    y = L.Conv2D(4, 3, dtype=policy)(x)
    y = L.ReLU(dtype=policy)(L.BatchNormalization(dtype=policy)(y))
    model = scramble(keras.Model(x, L.Dense(3, dtype="float32")(L.Flatten(dtype=policy)(y))))
    twin = isobatch.twin(model)
    assert {one.dtype for one in twin.parameters()} == {torch.float32}
    verdict = judge(model, twin, batch_for(model))
    assert verdict.word == "PASS"
    assert (
        verdict.closeness.keras > 1e-4 > 100 * verdict.closeness.torch
    )  # what the policy costs, on Keras's side only


@pytest.mark.parametrize(
    "layers",
    [
        lambda form: [
            L.Conv2D(4, 3, strides=2, padding="same", data_format=form),
            L.BatchNormalization(axis=1 if form == "channels_first" else -1),
        ],
        lambda form: [
            L.DepthwiseConv2D(3, depth_multiplier=2, data_format=form),
            L.MaxPooling2D(2, data_format=form),
        ],
        lambda form: [
            L.SeparableConv2D(4, 3, data_format=form),
            L.AveragePooling2D(3, 2, "same", data_format=form),
        ],
        lambda form: [
            L.Conv2DTranspose(4, 3, 2, data_format=form),
            L.ZeroPadding2D(((1, 0), (0, 2)), data_format=form),
            L.GlobalAveragePooling2D(form),
        ],
        lambda form: [
            L.UpSampling2D(2, data_format=form),
            L.Conv2D(2, 3, groups=1, dilation_rate=2, data_format=form),
            L.Flatten(data_format=form),
        ],
    ],
    ids=["conv-norm", "depthwise-pool", "separable-pool", "transpose-pad-global", "upsample-flatten"],
)
def test_layers_with_channels_first_are_those_with_channels_last(layers):
    """TensorFlow's CPU runs no convolution with channels first, so the network with channels last says what is right."""
    first, last = (
        keras.Sequential([keras.Input(shape), *layers(form)])
        for form, shape in (("channels_first", (3, 9, 8)), ("channels_last", (9, 8, 3)))
    )
    scramble(last)
    first.set_weights(last.get_weights())
    batch = np.random.default_rng(0).standard_normal((2, 9, 8, 3)).astype("float32")
    found = isobatch.twin(first)(torch.tensor(batch).movedim(-1, 1)).detach().numpy()
    expected = last(batch).numpy()
    if expected.ndim == 4:
        expected = np.moveaxis(expected, -1, 1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_trains_as_keras_does():
    """Three steps of plain gradient descent in float64, BatchNorm in training mode."""
    with_64 = {"dtype": "float64"}
    image = keras.Input((12, 10, 3), dtype="float64")
    x = L.Conv2D(4, 3, padding="same", **with_64)(image)
    x = L.BatchNormalization(momentum=0.9, name="bn", **with_64)(x)
    x = L.Flatten(**with_64)(L.ReLU(**with_64)(x))
    model = scramble(keras.Model(image, L.Dense(3, name="logits", **with_64)(x)))
    twin = isobatch.twin(model).double().train()
    x, y = images().astype("float64"), np.eye(3)
    model.compile(
        keras.optimizers.SGD(0.0625), keras.losses.MeanSquaredError(dtype="float64")
    )  # exact in the float32 that Keras keeps it in
    optimizer = torch.optim.SGD(twin.parameters(), 0.0625)
    for _ in range(3):
        model.train_on_batch(x, y)
        optimizer.zero_grad()
        nn.functional.mse_loss(twin(torch.tensor(x)), torch.tensor(y)).backward()
        optimizer.step()
    expected = to_spec(model).tensors
    for key, tensor in to_tensors(twin).items():
        np.testing.assert_allclose(tensor, expected[key], rtol=0, atol=1e-9, err_msg=key)


def test_weights_go_to_keras_and_back():
    model, other = convnet(), convnet(name="other")
    scramble(other, seed=5)
    twin = isobatch.twin(model)
    isobatch.copy_weights(other, twin)
    assert judge(other, twin, images()).passed
    assert judge(model, twin, images()).word == "FAIL"
    isobatch.copy_weights(twin, model)
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_go_to_a_handwritten_module_and_back():
    model, module = convnet(), Handwritten().eval()
    pairs = isobatch.copy_weights(model, module)
    assert pairs == {
        "conv1": "first",
        "bn1": "norm",
        "sep.depthwise": "depth",
        "sep.pointwise": "body.point",
        "hidden": "body.z",
        "logits": "head",
    }
    verdict = judge(model, module, images(), layout="channels_first")
    assert verdict.passed, str(verdict)
    module.register_forward_hook(lambda _module, _args, y: y * (1 + 1e-5))  # no layer is wrong
    off = judge(model, module, images(), layout="channels_first")
    assert (off.word, off.wrong) == ("FAIL", ())
    other = convnet()
    scramble(other, seed=7)
    assert isobatch.copy_weights(module, other)["body.z"] == "hidden"
    for a, b in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_layers_of_the_same_shape_are_told_apart_by_the_graph():
    x = keras.Input((4,))
    h = L.Dense(4, activation="relu", name="one")(x)
    h = L.Dense(4, activation="relu", name="two")(h)
    model = scramble(keras.Model(x, L.Dense(4, name="three")(h)))

    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return self.one(torch.relu(self.two(torch.relu(self.three(x)))))

    module = Backwards()
    assert isobatch.copy_weights(model, module) == {"one": "three", "two": "two", "three": "one"}
    assert judge(model, module, np.ones((2, 4))).passed


def test_what_cannot_be_paired_is_listed_and_nothing_changes():
    module = Handwritten()
    module.extra = nn.Linear(7, 2)
    module.head = nn.Linear(5, 4)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(SpecError, match=r"\['logits'\] of the source, .*head.*extra"):
        isobatch.copy_weights(convnet(), module)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    with pytest.raises(ModelError, match="on one side at least"):
        isobatch.copy_weights(module, module)


def test_spec_on_disk_builds_the_twin(tmp_path):
    model = convnet()
    to_spec(model).save(tmp_path)
    assert judge(model, from_spec(tmp_path), images()).passed


def test_shared_and_nested_models_are_one_module_each():
    inner = keras.Sequential(
        [keras.Input((4,)), L.Dense(4, name="d"), L.LayerNormalization(name="n")], name="inner"
    )
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    shared = L.Dense(4, activation="tanh", name="shared")
    model = scramble(keras.Model({"a": a, "b": b}, [inner(shared(a)), inner(shared(inner(b)))]))
    twin = isobatch.twin(model)
    assert {"shared.weight", "inner.d.weight", "inner.n.bias"} <= set(twin.state_dict())
    assert len(list(twin.parameters())) == 6
    verdict = judge(model, twin, batch_for(model))
    assert verdict.passed, str(verdict)
    rows = torch.ones(2, 4)
    assert torch.equal(twin(a=rows, b=rows)[0], twin(rows, rows)[0])
    twin.inner.n.eps = 1e-5
    assert {layer.layer for layer in judge(model, twin, batch_for(model)).wrong} == {"inner.n"}


def test_a_nested_encoder_hands_on_its_mask():
    encoder = keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            L.Embedding(11, 4, mask_zero=True),
            L.LSTM(5, return_sequences=True),
        ]
    )
    x = keras.Input((7,), dtype="int32")
    model = scramble(keras.Model(x, L.GRU(3)(encoder(x))))
    verdict = judge(model, isobatch.twin(model), batch_for(model))
    assert verdict.passed, str(verdict)
    assert verdict.closeness.gap < 1e-5


def test_all_unsupported_layers_are_listed_in_one_error():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            L.Lambda(lambda x: x, name="first"),
            L.Dense(3),
            L.Lambda(lambda x: x, name="second"),
        ]
    )
    with pytest.raises(SpecError, match=r"these 2 have none: first: .*Lambda; second: .*register_layer"):
        to_spec(model)


def test_a_model_without_a_graph_is_refused():
    class Plain(keras.Model):
        def call(self, x):
            return x

    with pytest.raises(ModelError, match="no graph"):
        to_spec(Plain())
    with pytest.raises(ModelError, match=r"keras\.Model"):
        isobatch.twin(nn.Linear(2, 2))


def test_a_layer_of_ones_own():
    """As docs/parity.md shows it."""

    @keras.saving.register_keras_serializable("isobatch_tests")
    class LayerScale(L.Layer):
        def build(self, shape):
            self.gamma = self.add_weight(shape=(shape[-1],), initializer="ones", name="gamma")

        def call(self, x):
            return x * self.gamma

    model = scramble(keras.Sequential([keras.Input((4,)), L.Dense(3), LayerScale(name="mine")]))
    register_operation("my_layer_scale", Operation("x * gamma", weights={"gamma": "(channels,)"}))
    register_keras_layer(
        LayerScale, lambda at, layer, x: at.add("my_layer_scale", x, weights={"gamma": layer.gamma})
    )

    class Scale(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(channels))

        def forward(self, x):
            return x * self.gamma

    register_layer("my_layer_scale", lambda attributes, shapes: Scale(shapes["gamma"][0]))
    twin = isobatch.twin(model)
    assert isinstance(twin.mine, Scale)
    assert judge(model, twin, np.ones((2, 4))).passed


def test_names_that_torch_has_for_something_else():
    model = scramble(keras.Sequential([keras.Input((4,)), L.Dense(3, name="train"), L.Dense(3, name="a.b")]))
    twin = isobatch.twin(model)
    assert "train_" in dict(twin.named_children())
    assert judge(model, twin, np.ones((2, 4))).passed


def test_a_list_of_one_output_is_that_output():
    x = keras.Input((3,))
    model = keras.Model([x], [L.Dense(2)(x)])
    assert isobatch.twin(model)(torch.ones(4, 3)).shape == (4, 2)
    assert judge(model, isobatch.twin(model), [np.ones((4, 3))], replicas=(2,)).passed


def test_names_that_python_has_for_something_else():
    a, b = keras.Input((3,), name="in"), keras.Input((3,), name="lambda")
    tower = keras.Sequential([keras.Input((3,)), L.Dense(2, name="class")], name="for")
    model = keras.Model({"in": a, "lambda": b}, L.Add(name="del")([tower(a), tower(b)]), name="import")
    net = isobatch.twin(model)
    assert [name for name, _ in net.named_parameters()] == ["for_.class_.weight", "for_.class_.bias"]
    assert judge(model, net, {"in": np.ones((2, 3)), "lambda": np.zeros((2, 3))}).passed


def test_loading_other_tensors_is_refused():
    model = convnet()
    tensors = dict(to_spec(model).tensors)
    with pytest.raises(SpecError, match=r"only in one: \['logits.bias'\]"):
        load_tensors(model, {key: value for key, value in tensors.items() if key != "logits.bias"})
    with pytest.raises(SpecError, match=r"logits.bias: \(7,\), expected \(3,\)"):
        load_tensors(model, {**tensors, "logits.bias": np.zeros(7)})


def test_hostile_shapes_give_our_error():
    spec = to_spec(convnet())
    with pytest.raises(SpecError, match="logits"):
        from_spec(
            Spec(
                spec.name,
                spec.inputs,
                spec.nodes,
                spec.outputs,
                {**spec.tensors, "logits.kernel": np.zeros(3)},
                spec.signature,
            )
        )


def test_public_names():
    assert isobatch_torch.from_spec is from_spec


def test_replicas_of_a_twin_pool_their_statistics_as_those_of_keras_do():
    image = keras.Input((4, 3, 2), dtype="float64")
    model = keras.Model(image, L.BatchNormalization(momentum=0.9, name="bn", dtype="float64")(image))
    twin = isobatch.twin(model).double()
    devices = ["cpu:0", "cpu:1"]
    x = np.random.default_rng(0).standard_normal((5, 4, 3, 2))
    isobatch.data_parallel(model, devices)(x, training=True)
    isobatch.data_parallel(twin, devices).train()(torch.tensor(x))
    np.testing.assert_allclose(twin.bn.running_mean, model.get_layer("bn").moving_mean.numpy(), atol=1e-12)
    np.testing.assert_allclose(twin.bn.running_var, model.get_layer("bn").moving_variance.numpy(), atol=1e-12)
