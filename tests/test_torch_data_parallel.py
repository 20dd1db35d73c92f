"""What upstream's tests of `torch.nn.DataParallel` demand, on logical CPU devices; then the cases they leave out."""

import copy
import gc
import io
import warnings
from collections import OrderedDict, namedtuple

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from isobatch import Options  # noqa: E402
from isobatch_torch import (  # noqa: E402
    DataParallel,
    data_parallel,
    gather,
    parallel_apply,
    replicate,
    scatter,
    scatter_kwargs,
)

TWO = [["cpu:0", "cpu:1"], ["cpu:1", "cpu:0"]]


@pytest.fixture(autouse=True)
def doubles():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Let even the smallest replicas run at once."""
    monkeypatch.setattr("isobatch_torch.engine._BRIEF", 0.0)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def assert_same_step(module, parallel, *args, **kwargs):
    """Outputs and every gradient are those of a deep copy that is run whole."""
    single = copy.deepcopy(module)
    assert_close(parallel(*args, **kwargs), single(*args, **kwargs))
    single(*args, **kwargs).square().sum().backward()
    parallel(*args, **kwargs).square().sum().backward()
    for (name, ours), theirs in zip(module.named_parameters(), single.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            assert_close(ours.grad, theirs.grad)


# Upstream's list.


def test_buffers_that_require_grad():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.rand(3, requires_grad=True))

        def forward(self, x):
            return self.scale * x.square()

    net = Net()
    assert gradcheck(DataParallel(net, 2), torch.rand(4, 3, requires_grad=True))
    DataParallel(net, 2)(torch.ones(4, 3)).sum().backward()
    assert_close(net.scale.grad, torch.full((3,), 4.0))


def test_rnn_that_flattens_its_weights():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 4, 1, batch_first=True)

        def forward(self, x):
            self.rnn.flatten_parameters()
            return self.rnn(x)[0]

    net = Net()
    x = torch.randn(5, 2, 3)
    parallel = DataParallel(net, 2)
    with torch.no_grad():
        assert_close(parallel(x), net(x))
    assert_same_step(net, parallel, x)
    single = copy.deepcopy(net)
    for model, run in ((net, parallel), (single, single)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        run(x).sum().backward()
        optimizer.step()
    for ours, theirs in zip(net.parameters(), single.parameters(), strict=True):
        assert_close(ours, theirs)


def test_lazy_module_says_what_to_do():
    lazy = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"template\.0: uninitialized parameters; call the template once"):
        DataParallel(lazy, 2)(torch.ones(4, 3))
    lazy(torch.ones(1, 3))
    assert DataParallel(lazy, 2)(torch.ones(4, 3)).shape == (4, 2)


def test_parallel_apply_of_different_modules():
    first, second = nn.Linear(3, 2), nn.Linear(3, 5)
    x = torch.randn(4, 3)
    for inputs in ([x, x], [(x,), [x]]):
        ours = parallel_apply([first, second], inputs, [{}, {}], ["cpu:0", "cpu:1"])
        assert torch.equal(ours[0], first(x))
        assert torch.equal(ours[1], second(x))
    with pytest.raises(ValueError, match="got 2 modules, 1 inputs"):
        parallel_apply([first, second], [x])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parallel_apply_under_autocast(dtype):
    layer = nn.Linear(3, 2).float()
    x = torch.randn(4, 3).float()
    with torch.autocast("cpu", dtype):
        ours = parallel_apply([layer, layer], [x, x])
        assert ours[0].dtype == ours[1].dtype == dtype
        assert torch.equal(ours[1], layer(x))


@pytest.mark.parametrize(
    "error",
    [KeyError("gone"), ValueError("wrong"), StopIteration(3), UnicodeDecodeError("ascii", b"x", 0, 1, "no")],
)
def test_an_exception_comes_back_as_itself(error):
    class Failing(nn.Module):
        def forward(self, x):
            if x.sum() > 1:
                raise error
            return x

    x = torch.tensor([0.0, 0.0, 2.0, 2.0])
    with pytest.raises(type(error)) as caught:
        parallel_apply([Failing(), Failing()], scatter(x, 2))
    assert caught.value is error
    parallel = DataParallel(Failing(), 2)
    with pytest.raises(type(error)) as caught:
        parallel(x)
    assert caught.value is error
    assert "in replica 1 on cpu:1, rows 2..3" in error.__notes__
    assert torch.equal(parallel(x * 0), x * 0)


@pytest.mark.parametrize("devices", [*TWO, ["cpu:0"]])
@pytest.mark.parametrize("functional", [True, False])
def test_several_inputs_a_float_and_an_optional_keyword(devices, functional):
    class Net(nn.Module):
        def forward(self, a, b, factor, extra=None):
            out = a * b.sum(1, keepdim=True) * factor
            return out if extra is None else out + extra

    net = Net()
    a, b, extra = (torch.randn(5, 3, requires_grad=True) for _ in range(3))
    for kwargs in ({}, {"extra": extra}, {"extra": None}):
        expected = net(a, b, 0.5, **kwargs)
        ours = (
            data_parallel(net, (a, b, 0.5), devices, module_kwargs=kwargs)
            if functional
            else DataParallel(net, devices)(a, b, 0.5, **kwargs)
        )
        assert_close(ours, expected)
        wanted = [a, b, *(tensor for tensor in kwargs.values() if tensor is not None)]
        pairs = (torch.autograd.grad(out.square().sum(), wanted) for out in (ours, expected))
        for mine, theirs in zip(*pairs, strict=True):
            assert_close(mine, theirs)


def test_small_back():
    layer = nn.Linear(10, 5)
    x = torch.randn(20, 10, requires_grad=True)
    assert_close(data_parallel(layer, x, [0, 1]), layer(x))


@pytest.mark.slow
def test_no_reference_cycles():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 1)
            self.norm = nn.BatchNorm1d(1)

        def forward(self, x):
            return self.norm(self.linear(x))

    parallel = DataParallel(Net(), 2)
    x = torch.rand(4, 1)
    parallel(x)
    gc.collect()
    for _ in range(3):
        parallel(x).sum().backward()
    assert gc.collect() == 0
    for _ in range(2):
        gc.collect()
        try:
            parallel(torch.rand(4, 2))
        except RuntimeError:
            found = gc.collect()
    assert found == 0
    del parallel
    assert gc.collect() == 0


@pytest.mark.parametrize("grad", [True, False])
def test_grad_mode_inside(grad):
    class Net(nn.Module):
        def forward(self, x):
            return torch.full((len(x),), torch.is_grad_enabled())

    with torch.set_grad_enabled(grad):
        assert DataParallel(Net(), 2)(torch.ones(4)).tolist() == [grad] * 4


@pytest.mark.parametrize("devices", [*TWO, 1, 2, 3, None])
def test_linear(devices):
    layer = nn.Linear(10, 5)
    assert_same_step(layer, DataParallel(layer, devices), torch.randn(20, 10))


def test_sparse_embedding():
    table = nn.Embedding(10, 3, sparse=True)
    single = copy.deepcopy(table)
    x = torch.tensor([[1, 2], [4, 5], [4, 3], [9, 1], [1, 1]])
    DataParallel(table, 2)(x).sum().backward()
    single(x).sum().backward()
    assert table.weight.grad.is_sparse
    assert_close(table.weight.grad.coalesce(), single.weight.grad.coalesce())


def test_nested_output():
    def nest(x):
        return [x, (x.sin(), x.cos(), [x.add(1)]), x, OrderedDict(a=x, b=[x.sin()])]

    class Net(nn.Module):
        def forward(self, x):
            return nest(x)

    x = torch.randn(4, 2)
    out = DataParallel(Net(), 2)(x)
    assert type(out) is list
    assert type(out[1]) is tuple
    assert type(out[3]) is OrderedDict
    torch.testing.assert_close(out, nest(x), rtol=0, atol=0)


def test_nested_input():
    class Net(nn.Module):
        def forward(self, pair):
            return pair[1][0] + pair[0]

    assert_close(DataParallel(Net(), 2)((torch.ones(4), (torch.ones(4),))), torch.full((4,), 2.0))


@pytest.mark.parametrize("devices", [1, 2, ["cpu:1"]])
def test_no_inputs_at_all(devices):
    class Net(nn.Module):
        calls = 0

        def forward(self):
            Net.calls += 1
            return torch.full((2,), 3.0)

    for out in (
        DataParallel(Net(), devices)(),
        data_parallel(Net(), None, devices),
        data_parallel(Net(), (), devices),
    ):
        assert out.tolist() == [3.0, 3.0]
    assert Net.calls == 3


def test_torch_devices_as_ids():
    parallel = DataParallel(
        nn.Linear(2, 2), [torch.device("cpu", 0), torch.device("cpu", 1)], torch.device("cpu")
    )
    assert [str(device) for device in parallel.devices] == ["cpu:0", "cpu:1"]
    assert parallel.output_device == torch.device("cpu")


def test_gradient_penalty():
    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 1)
            nn.init.constant_(self.linear.weight, 0.5)
            nn.init.constant_(self.linear.bias, 1.0)

        def forward(self, x):
            return self.linear(x)

    critic = Critic()
    parallel = DataParallel(critic, 2)

    def penalty(x):
        out = parallel(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return grad.square().mean() / 2 + out.mean() * 0

    penalty(torch.ones(4, 1, requires_grad=True)).backward()
    assert_close(critic.linear.weight.grad, torch.full((1, 1), 0.5))
    assert_close(critic.linear.bias.grad, torch.zeros(1))


def test_scatter_and_its_gradients():
    x = torch.randn(4, 4, requires_grad=True)
    parts = scatter(x, (0, 1))
    assert [part.shape for part in parts] == [(2, 4), (2, 4)]
    parts[0].sum().backward()
    assert torch.equal(x.grad, torch.tensor([[1.0], [1.0], [0.0], [0.0]]).expand(4, 4))
    assert gradcheck(lambda t: tuple(scatter(t, (0, 1))), x)
    assert gradgradcheck(lambda t: tuple(scatter(t, (0, 1))), x)
    assert [part.shape for part in scatter(x, 2, dim=-1)] == [(4, 2), (4, 2)]


def test_gather_and_its_gradients():
    parts = (torch.randn(2, 4, requires_grad=True), torch.randn(1, 4, requires_grad=True))
    assert torch.equal(gather(parts, 0), torch.cat(parts))
    assert gradcheck(lambda *t: gather(t, "cpu"), parts)
    assert gradgradcheck(lambda *t: gather(t, "cpu"), parts)
    scalars = (torch.randn((), requires_grad=True), torch.randn((), requires_grad=True))
    vector = gather(scalars, 0)
    assert torch.equal(vector, torch.stack(scalars))
    assert gradcheck(lambda *t: gather(t, 0), scalars)


def test_complex_in_complex_out():
    layer = nn.Linear(3, 2, dtype=torch.complex128)
    x = torch.randn(5, 3, dtype=torch.complex128)
    assert DataParallel(layer, 2)(x).dtype == torch.complex128
    single = copy.deepcopy(layer)
    DataParallel(layer, 2)(x).abs().sum().backward()
    single(x).abs().sum().backward()
    assert_close(layer.weight.grad, single.weight.grad)
    assert [part.shape for part in scatter(x, 2, dim=-1)] == [(5, 2), (5, 1)]


def test_gather_of_dicts_of_different_length():
    with pytest.raises(ValueError, match="the same dict on every replica at output"):
        gather(({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}), 0)


@pytest.mark.parametrize("devices", [(0, 1), [0, 1]])
def test_replicas_compute_the_same_and_share_parameters(devices):
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    x = torch.randn(4, 3)
    for replica in replicate(net, devices):
        assert torch.equal(replica(x), net(x))
        assert all(a is b for a, b in zip(replica.parameters(), net.parameters(), strict=True))
        assert not any(a is b for a, b in zip(replica.modules(), net.modules(), strict=True))
    assert not any(
        p.requires_grad for replica in replicate(net, devices, detach=True) for p in replica.parameters()
    )


def test_autocast_written_on_forward():
    class Net(nn.Linear):
        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x):
            return super().forward(x)

    assert DataParallel(Net(3, 2).float(), 2)(torch.ones(4, 3).float()).dtype == torch.bfloat16


@pytest.mark.parametrize("detach", [True, False])
def test_a_replica_can_be_saved(detach):
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    for replica in replicate(net, 2, detach):
        file = io.BytesIO()
        torch.save(replica, file)
        file.seek(0)
        found = torch.load(file, weights_only=False)
        assert_close(dict(found.state_dict()), dict(net.state_dict()))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layouts_of_gradients(layout, dtype):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).to(
        dtype=dtype, memory_format=layout
    )
    single = copy.deepcopy(net)
    parallel = DataParallel(net, 2)
    x = torch.randn(5, 3, 8, 8, dtype=dtype).to(memory_format=layout)
    for _ in range(2):
        ours, theirs = parallel(x), single(x)
        assert ours.is_contiguous(memory_format=layout)
        ours.sum().backward()
        theirs.sum().backward()
        for mine, other in zip(net.parameters(), single.parameters(), strict=True):
            assert mine.grad.stride() == other.grad.stride()
            torch.testing.assert_close(mine.grad, other.grad)


def test_parameter_list_and_dict():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.many = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(2)])
            self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(3))})

        def forward(self, x):
            assert len(self.many) == 2
            assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in [*self.many, self.named["a"]])
            return x * self.many[0] + self.many[1] * self.named["a"]

    net = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_step(net, DataParallel(net, 2), torch.randn(5, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_types(dtype):
    layer = nn.Linear(3, 2, dtype=dtype)
    x = torch.randn(4, 3, dtype=dtype)
    ours = DataParallel(layer, 2)(x)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, layer(x))


@pytest.mark.parametrize("empty", [{}, [], (), {"a": []}])
def test_keywords_only_with_an_empty_container(empty):
    class Net(nn.Module):
        def forward(self, *, x, rest):
            assert rest == empty
            return x * 2

    assert torch.equal(DataParallel(Net(), 2)(x=torch.ones(3), rest=empty), torch.full((3,), 2.0))


# What upstream leaves out.


@pytest.mark.parametrize("rows", range(10))
@pytest.mark.parametrize("policy", ["balanced", "torch", "keras"])
def test_every_batch_size_and_its_gradients(rows, policy):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    parallel = DataParallel(net, 4, options=Options(policy=policy))
    assert_same_step(net, parallel, torch.randn(rows, 3))


@pytest.mark.parametrize("positional", [1, 2])
def test_keywords_shorter_than_arguments_are_an_error(positional):
    class Net(nn.Module):
        def forward(self, *args, m=None):
            return sum(args) + m

    with pytest.raises(ValueError, match=r"args\[0\]: 4 rows.*(?s:.)*kwargs\['m'\]: 1 rows"):
        DataParallel(Net(), 2)(*[torch.ones(4, 1)] * positional, m=torch.ones(1, 1))


def test_a_flag_and_a_batch_smaller_than_the_devices():
    class Net(nn.Module):
        def forward(self, x, flag, *, label):
            return {"x": x, "flag": flag, "label": label, "none": None, "number": 3}

    out = DataParallel(Net(), 4)(torch.ones(2), flag=True, label="name")
    assert out["flag"] is True
    assert (out["label"], out["none"], out["number"]) == ("name", None, 3)
    assert torch.equal(out["x"], torch.ones(2))


def test_scatter_kwargs_has_as_many_of_one_as_of_the_other():
    args, kwargs = scatter_kwargs((torch.ones(2),), {"name": "x", "zero": torch.tensor(1.0)}, [0, 1, 2])
    assert len(args) == len(kwargs) == 2
    args, kwargs = scatter_kwargs((), {"x": torch.ones(3)}, 2)
    assert args == [(), ()]
    assert [len(kwarg["x"]) for kwarg in kwargs] == [2, 1]


def test_a_captured_tensor_gets_its_gradient():
    captured = torch.randn(3, requires_grad=True)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = torch.randn(3, requires_grad=True)

        def forward(self, x):
            return x * captured * self.kept

    net = Net()
    x = torch.randn(5, 3)
    DataParallel(net, 3)(x).sum().backward()
    assert_close(captured.grad, x.sum(0) * net.kept.detach())
    assert_close(net.kept.grad, x.sum(0) * captured.detach())


def test_tied_shared_frozen_and_parametrized_weights():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.tied = nn.Linear(4, 4)
            self.tied.weight = self.first.weight
            self.again = self.first
            self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))

        def forward(self, x):
            return self.orthogonal(self.normed(self.frozen(self.again(self.tied(self.first(x)).tanh()))))

    net = Net()
    assert_same_step(net, DataParallel(net, 3), torch.randn(7, 4))


def test_old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        net = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3)), nn.Tanh())
    x = torch.randn(5, 4)
    single_grads = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    grads = torch.autograd.grad(DataParallel(net, 2)(x).square().sum(), list(net.parameters()))
    for ours, theirs in zip(grads, single_grads, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("spectral_norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norm_iterates_once_a_call(spectral_norm):
    net = nn.Sequential(spectral_norm(nn.Linear(4, 3)))
    single = copy.deepcopy(net)
    parallel = DataParallel(net, 2)
    x = torch.randn(6, 4)
    for _ in range(3):
        assert_close(parallel(x), single(x))
    for name, buffer in net.named_buffers():
        assert_close(buffer, dict(single.named_buffers())[name])


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5))
            self.outer = nn.Linear(4, 2)

        def forward(self, x):
            return self.outer(checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant))

    net = Net()
    parallel = DataParallel(net, 2)
    x = torch.randn(5, 4)
    grads = []
    for model in (parallel, DataParallel(nn.Sequential(net.inner, net.outer), 2)):
        torch.manual_seed(3)
        net.zero_grad()
        model(x.clone()).sum().backward()
        grads.append([p.grad.clone() for p in net.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        assert_close(ours, theirs)


def test_scripted_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        net = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    assert_same_step_of_script(net)


def assert_same_step_of_script(net):
    x = torch.randn(5, 3)
    assert_close(DataParallel(net, 2)(x), net(x))


def test_traced_graph_module():
    net = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    assert_same_step(net, DataParallel(net, 2), torch.randn(5, 3))


def test_mean_loss_inside_counts_rows():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, x, y):
            return F.mse_loss(self.linear(x), y)

    net = Net()
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    assert_same_step(net, DataParallel(net, 2), x, y)
    stacked = DataParallel(net, 2, options=Options(scalars="stack"))(x, y)
    assert stacked.shape == (2,)


def test_named_tuples_of_every_kind():
    Pair = namedtuple("Pair", "left right")
    Empty = namedtuple("Empty", "")

    class Net(nn.Module):
        def forward(self, pair, empty):
            assert isinstance(empty, Empty)
            return Pair(pair.right, pair.left)

    out = DataParallel(Net(), 2)(Pair(torch.zeros(3), torch.ones(3)), Empty())
    assert isinstance(out, Pair)
    assert torch.equal(out.left, torch.ones(3))
