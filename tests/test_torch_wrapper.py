"""The wrapper looks like its module, and replicas look like modules of their own."""

import copy
import functools
import gc
import io
import pickle
import warnings
from collections import OrderedDict

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import isobatch  # noqa: E402
import isobatch_torch  # noqa: E402
from isobatch import Options  # noqa: E402
from isobatch_torch import DataParallel  # noqa: E402


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Let even the smallest replicas run at once."""
    monkeypatch.setattr("isobatch_torch.engine._BRIEF", 0.0)


class Net(nn.Module):
    """A module at the top level, so that it can be pickled."""

    kind = "class attribute"

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)
        self.temperature = 2.0
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x):
        return self.head(self.body(x)) / self.temperature

    def encode(self, x, *, scale=1.0):
        return self.body(x) * scale

    @property
    def width(self):
        return self.head.in_features

    @property
    def broken(self):
        return self.no_such_name


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small operations on a busy machine wait for each other's threads
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def x():
    return torch.randn(6, 3, dtype=torch.float64)


# Names.


def test_it_is_a_data_parallel_with_its_modules_names(net):
    parallel = isobatch.data_parallel(net, devices=2)
    assert isinstance(parallel, torch.nn.DataParallel)
    assert type(parallel) is DataParallel
    assert parallel.module is net
    assert list(parallel.state_dict()) == list(net.state_dict())
    for method in ("named_parameters", "named_buffers", "named_children"):
        assert list(getattr(parallel, method)()) == list(getattr(net, method)())
    assert [name for name, _ in parallel.named_modules()] == [name for name, _ in net.named_modules()]
    assert (parallel.device_ids, parallel.dim, parallel.output_device) == ([0, 1], 0, torch.device("cpu"))
    assert "Net, cpu:0, cpu:1" in repr(parallel)
    assert {"encode", "temperature", "call_method"} <= set(dir(parallel))


def test_attributes_and_methods_are_the_modules(net, x):
    parallel = DataParallel(net, 2)
    assert (parallel.temperature, parallel.width, parallel.kind) == (2.0, 4, "class attribute")
    assert torch.equal(parallel.eval().encode(x), net.encode(x))
    assert parallel.head is net.head
    parallel.temperature = 4.0
    assert net.temperature == 4.0
    parallel.head = nn.Linear(4, 5).double()
    assert net.head.out_features == 5
    assert parallel(x).shape == (6, 5)
    parallel.note = "new"
    assert net.note == "new"
    del parallel.note
    assert not hasattr(net, "note")
    assert not hasattr(parallel, "no_such_name")
    with pytest.raises(AttributeError) as plain:
        _ = net.broken
    with pytest.raises(AttributeError, match=str(plain.value)):
        _ = parallel.broken
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'absent'"):
        _ = parallel.absent
    with pytest.raises(AttributeError):
        DataParallel.__new__(DataParallel).anything  # noqa: B018


def test_len_index_and_iteration():
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    parallel = DataParallel(layers, 2)
    assert len(parallel) == 2
    assert parallel[0] is layers[0]
    assert list(parallel) == list(layers)
    assert bool(DataParallel(nn.Linear(1, 1)))
    assert "a" in DataParallel(nn.ModuleDict({"a": nn.ReLU()}))
    with pytest.raises(TypeError, match="has no len"):
        len(DataParallel(nn.Linear(1, 1)))


def test_train_mode_is_the_modules(net):
    parallel = DataParallel(net, 2)
    for mode in (False, True):
        parallel.train(mode)
        assert net.training is net.body.training is parallel.training is mode
    net.eval()
    assert not parallel.training
    assert not DataParallel(net, 2).module.training


def test_initialisation_conversion_and_freezing_reach_the_module():
    layer = nn.Linear(3, 2)
    parallel = DataParallel(layer, 2)
    parallel.apply(lambda module: nn.init.ones_(module.weight) if isinstance(module, nn.Linear) else None)
    assert layer.weight.eq(1).all()
    parallel.double()
    assert layer.weight.dtype == torch.float64
    assert parallel(torch.ones(2, 3, dtype=torch.float64)).dtype == torch.float64
    parallel.requires_grad_(requires_grad=False)
    assert not layer.weight.requires_grad
    rnn = nn.LSTM(3, 4)
    DataParallel(rnn, 2).double()
    assert rnn._flat_weights[0] is rnn.weight_ih_l0
    assert rnn._flat_weights[0].dtype == torch.float64
    assert next(DataParallel(nn.Linear(1, 1)).to("meta").parameters()).is_meta


def test_any_method_can_be_the_parallel_one(net, x):
    parallel = DataParallel(net.eval(), 3, options=Options(broadcast=("scale",)))
    ours = parallel.call_method("encode", x, scale=torch.tensor([3.0] * 4, dtype=torch.float64))
    torch.testing.assert_close(ours, net.encode(x, scale=3.0), rtol=1e-12, atol=1e-12)
    with pytest.raises(AttributeError, match="decode"):
        parallel.call_method("decode", x)


# Files.


@pytest.mark.parametrize("prefix", ["", "module.", "module.module."])
def test_state_with_and_without_prefix_is_loaded(net, prefix):
    state = OrderedDict((prefix + key, value + 1) for key, value in net.state_dict().items())
    parallel = DataParallel(Net().double(), 2)
    assert str(parallel.load_state_dict(state)) == "<All keys matched successfully>"
    assert torch.equal(parallel.module.head.weight, net.head.weight + 1)
    outer = nn.ModuleDict({"inner": DataParallel(Net().double(), 2)})
    outer.load_state_dict({f"inner.{key}": value for key, value in state.items()})
    assert torch.equal(outer["inner"].module.body[0].bias, net.body[0].bias + 1)
    assert list(outer.state_dict()) == [f"inner.{key}" for key in net.state_dict()]
    assert list(state) == [prefix + key for key in net.state_dict()]


def test_state_saved_by_torchs_own_wrapper_is_loaded(net):
    state = nn.DataParallel(net).state_dict()
    found = DataParallel(Net().double(), 2)
    found.load_state_dict(state)
    assert torch.equal(found.module.head.weight, net.head.weight)
    found.load_state_dict(state, strict=True, assign=True)
    with pytest.raises(RuntimeError, match="Missing key"):
        found.load_state_dict({"head.weight": net.head.weight})


def test_a_child_named_module_keeps_its_name():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

    odd = Odd()
    parallel = DataParallel(odd, 2)
    assert list(parallel.state_dict()) == ["module.weight", "module.bias"]
    parallel.load_state_dict({key: value + 1 for key, value in odd.state_dict().items()})
    assert parallel.module is odd


def test_the_modules_own_ways_of_saving_are_used():
    class Own(nn.Linear):
        def get_extra_state(self):
            return {"steps": 3}

        def set_extra_state(self, state):
            self.steps = state["steps"]

    parallel = DataParallel(Own(2, 2), 2)
    state = parallel.state_dict()
    assert state["_extra_state"] == {"steps": 3}
    parallel.load_state_dict(state)
    assert parallel.steps == 3


def test_pickle_deepcopy_and_save(net, x):
    parallel = DataParallel(
        net.eval(), ["cpu:0", "cpu:1"], options=Options(policy="torch"), schedule="sequential"
    )
    parallel(x)
    file = io.BytesIO()
    torch.save(parallel, file)
    file.seek(0)
    found = [
        pickle.loads(pickle.dumps(parallel)),  # noqa: S301 - written a moment ago
        copy.deepcopy(parallel),
        torch.load(file, weights_only=False),
    ]
    for other in found:
        assert type(other) is DataParallel
        assert (other.devices, other.options, other.schedule) == (
            parallel.devices,
            parallel.options,
            "sequential",
        )
        assert other.module is not net
        assert all(a is b for a, b in zip(other.parameters(), other.module.parameters(), strict=True))
        assert torch.equal(other(x), parallel(x))
        other.head.weight.data.zero_()
        assert not net.head.weight.eq(0).any()
    assert copy.copy(parallel).module is net


def test_load_makes_a_file_parallel(net, x, tmp_path):
    path = tmp_path / "model.pt"
    torch.save(net.eval(), path)
    for found in (isobatch.load(path, devices=3, state="first"), isobatch_torch.load(path, devices=3)):
        assert len(found.devices) == 3
        torch.testing.assert_close(found(x), net(x), rtol=1e-12, atol=1e-12)
    torch.save(DataParallel(net, 2), path)
    assert type(isobatch_torch.load(path, 1).module) is Net
    torch.save(net.state_dict(), path)
    with pytest.raises(ValueError, match=r"Expected a module in .*, got OrderedDict.*load_state_dict"):
        isobatch_torch.load(path)
    with pytest.raises(FileNotFoundError):
        isobatch_torch.load(tmp_path / "absent.pt")


# Training tools.


def test_optimizers_clipping_and_averages(net, x):
    parallel = DataParallel(net, 2)
    optimizer = torch.optim.Adam(parallel.parameters())
    average = torch.optim.swa_utils.AveragedModel(parallel)
    before = net.head.weight.clone()
    for _ in range(3):
        optimizer.zero_grad()
        parallel(x).square().sum().backward()
        assert nn.utils.clip_grad_norm_(parallel.parameters(), 0.1) > 0.1
        optimizer.step()
        average.update_parameters(parallel)
    assert not torch.equal(net.head.weight, before)
    assert average.module.module is not net
    average.module.eval()
    assert average(x).shape == (6, 2)
    assert nn.utils.parameters_to_vector(parallel.parameters()).numel() == sum(
        p.numel() for p in net.parameters()
    )


def test_hooks(net, x):
    calls = []
    parallel = DataParallel(net, 3)
    parallel.register_forward_hook(
        lambda module, args, out: calls.append(("wrapper", module is parallel, len(out)))
    )
    net.register_forward_hook(lambda module, args, out: calls.append(("replica", module is net, len(out))))
    net.head.register_full_backward_hook(lambda *_: calls.append(("backward",)))
    net.head.weight.register_hook(lambda grad: calls.append(("gradient", grad.shape)))
    net.head.bias.register_post_accumulate_grad_hook(
        lambda p: calls.append(("accumulated", p is net.head.bias))
    )
    for _ in range(2):
        calls.clear()
        parallel(x).sum().backward()
    assert sorted(calls[:3]) == [("replica", False, 2)] * 3
    assert calls[3] == ("wrapper", True, 6)
    assert calls[4:].count(("backward",)) == 3
    assert calls.count(("gradient", (2, 4))) == 1
    assert calls.count(("accumulated", True)) == 1


def test_options_are_checked(net):
    for wrong in (
        {"schedule": "parallel"},
        {"options": Options(state="mix")},
        {"options": Options(policy=(1, 2, 3))},
    ):
        with pytest.raises(ValueError, match="Expected"):
            DataParallel(net, 2, **wrong)
    for devices in (0, [], ["gpu:99"], [-1], True, 1.5, "tpu:x"):
        with pytest.raises(ValueError, match="Expected"):
            DataParallel(net, devices)
    parallel = DataParallel(net, 2)
    with pytest.raises(ValueError, match="Expected schedule to be one of"):
        parallel.schedule = "fast"
    with pytest.raises(ValueError, match="not parallel yet"):
        DataParallel(nn.DataParallel(net))


# Replicas.


def inside(net, look, x=None, grad=True, devices=2):  # noqa: FBT002
    """What a function says of each replica, in the calls after the first."""
    seen = []

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net

        def forward(self, x):
            seen.append(look(self.inner))
            return x

    parallel = DataParallel(Spy(), devices)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            seen.clear()
            parallel(torch.ones(4) if x is None else x)
    return seen


@pytest.mark.parametrize("grad", [True, False])
def test_replicas_are_honest_modules(net, grad):
    names = list(net.state_dict())
    assert inside(net, lambda module: list(module.state_dict()), grad=grad) == [names] * 2
    assert (
        inside(net, lambda module: [name for name, _ in module.named_parameters()], grad=grad)
        == [[name for name, _ in net.named_parameters()]] * 2
    )
    assert (
        inside(net, lambda module: next(module.parameters()) is net.body[0].weight, grad=grad) == [True] * 2
    )
    assert inside(net, lambda module: str(next(module.parameters()).device), grad=grad) == ["cpu"] * 2
    assert inside(net, type) == [Net] * 2
    assert (
        inside(net, lambda module: (module.width, module.temperature, module.training))
        == [(4, 2.0, True)] * 2
    )
    assert len(set(inside(net, lambda module: id(module.body)))) == 2


def test_a_hook_added_inside_stays_with_its_replica(net):
    def add(module):
        module.head.register_forward_hook(lambda *_: None)
        return len(module.head._forward_hooks)

    assert inside(net, add) == [2, 2]
    assert not net.head._forward_hooks


def test_a_mode_set_inside_stays_with_its_replica(net):
    assert inside(net, lambda module: module.eval().training) == [False] * 2
    assert net.training


def test_the_next_call_sees_every_edit(net, x):
    net.eval()
    parallel = DataParallel(net, 2)

    def check():
        torch.testing.assert_close(parallel(x), net(x), rtol=1e-12, atol=1e-12)

    check()
    check()
    roots = [replica.module for replica in parallel.replicate()]
    net.temperature = 3.0
    check()
    net.head.weight.data.mul_(2)
    check()
    net.head.weight = nn.Parameter(torch.randn_like(net.head.weight))
    check()
    net.body[1].running_mean.add_(1)
    check()
    net.body[1].running_mean = torch.randn(4, dtype=torch.float64)
    check()
    net.body.append(nn.Tanh())
    check()
    del net.body[2]
    check()
    net.body[0] = nn.Linear(3, 4, bias=False).double()
    check()
    handle = net.head.register_forward_hook(lambda _, __, out: out * 2)
    check()
    handle.remove()
    check()
    nn.utils.parametrizations.weight_norm(net.head)
    check()
    net.load_state_dict({key: value * 2 for key, value in net.state_dict().items()})
    check()
    net.forward = functools.partial(Net.forward, net)
    with pytest.raises(ValueError, match="its forward is set on the object"):
        parallel(x)
    del net.forward
    check()
    assert [replica.module for replica in parallel.replicate()] == roots


class Stale(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.kept = kept(self)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize(
    ("kept", "where"),
    [
        (lambda net: [net.linear], r"template\.inner\.kept\[0\]: a Linear that is not registered"),
        (
            lambda net: {"a": (1, nn.ReLU())},
            r"template\.inner\.kept\['a'\]\[1\]: a ReLU that is not registered",
        ),
        (lambda net: net.linear.forward, r"template\.inner\.kept: a method bound to the template"),
        (
            lambda net: functools.partial(net.forward),
            r"template\.inner\.kept\[0\]: a method bound to the template",
        ),
    ],
)
def test_stale_references_are_named(kept, where):
    net = nn.ModuleDict({"inner": Stale(kept)})
    net.forward = None
    del net.forward

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net["inner"]

        def forward(self, x):
            return self.inner(x)

    x = torch.ones(4, 2)
    with pytest.raises(ValueError, match=where):
        DataParallel(Outer(), 2)(x)
    assert DataParallel(Outer(), 1)(x).shape == (4, 2)


def test_edits_in_the_middle_of_nothing_leak(net, x):
    parallel = DataParallel(net, 3)
    for _ in range(3):
        parallel(x)
    del parallel
    gc.collect()
    net.extra = nn.Linear(1, 1)
    net(x)
    assert not any("isobatch" in key for module in net.modules() for key in vars(module))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


@pytest.mark.slow
def test_ten_thousand_calls_do_not_grow():
    import resource

    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    parallel = DataParallel(net, 2)
    x = torch.randn(6, 4)

    def measure(calls):
        for _ in range(calls):
            parallel(x).sum().backward()
        gc.collect()
        return len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    measure(500)
    objects, memory = measure(500)
    after = measure(10_000)
    assert after[0] <= objects + 50
    assert after[1] <= memory + 4096  # kilobytes


def test_warnings_are_not_caused(net, x):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel = DataParallel(net, 2)
        for _ in range(3):
            parallel(x).mean().backward()


def test_modules_whose_length_is_nothing_are_replicated_too():
    class Empty(nn.Sequential):
        def forward(self, x):
            self.seen = x.shape[0]
            return x

    net = nn.Sequential(nn.Linear(3, 2), Empty())
    parallel = DataParallel(net, 2)
    x = torch.randn(4, 3)
    assert torch.equal(parallel(x), net(x))
    copies = [replica.module[1] for replica in parallel.replicate()]
    assert all(copy is not net[1] for copy in copies)
    net[0] = torch.compile(net[0], backend="eager")  # a wrapper without a length
    torch.testing.assert_close(parallel(x), net(x))


def test_tensors_and_modules_without_values_are_refused_in_words():
    with pytest.raises(isobatch.LeafTypeError, match="with values"):
        DataParallel(nn.Linear(3, 2), 2)(torch.ones(4, 3, device="meta"))
    with pytest.raises(isobatch.ModelError, match=r"to_empty\(device='cpu'\)"):
        DataParallel(nn.Linear(3, 2, device="meta"), 2)(torch.ones(4, 3))
