"""Replicas on several memories: on accelerators where there are some, and their bookkeeping on torch's meta device everywhere."""

import contextlib
import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from isobatch import Device, Options  # noqa: E402
from isobatch_torch import DataParallel, gather, scatter  # noqa: E402
from isobatch_torch.accelerators import current, torch_text, visible  # noqa: E402
from isobatch_torch.engine import Engine  # noqa: E402

CARDS = [device for device in visible() if device.kind != "cpu"]
needs_card = pytest.mark.skipif(not CARDS, reason="needs an accelerator; torch sees none here")
needs_two = pytest.mark.skipif(len(CARDS) < 2, reason=f"needs two accelerators; torch sees {len(CARDS)} here")
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
CPU, META = Device("cpu"), Device("meta")


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)
    ).double()


# On the meta device: where tensors go, not what is in them.


def test_a_replica_elsewhere_gets_copies_that_are_kept_until_a_weight_changes():
    net = network().eval()
    engine = Engine(net, [CPU, META, META])
    with torch.no_grad():
        here, there, same = (replica.module for replica in engine.replicate())
        first = [p.data_ptr() or id(p) for p in there.parameters()]
        assert [p.device.type for p in here.parameters()] == ["cpu"] * 6
        assert [p.device.type for p in there.parameters()] == ["meta"] * 6
        assert all(isinstance(p, nn.Parameter) for p in there.parameters())
        assert all(a is b for a, b in zip(there.parameters(), same.parameters(), strict=True))
        engine.replicate()
        assert [p.data_ptr() or id(p) for p in there.parameters()] == first
        before = there[4].weight
        net[4].weight.add_(1)
        engine.replicate()
        assert there[4].weight is not before
        assert id(there[0].weight) == first[0]
    assert all(p.device.type == "cpu" for p in net.parameters())


def test_gradients_lead_back_from_elsewhere():
    net = nn.LSTM(3, 4)
    there = Engine(net, [CPU, META]).replicate()[1].module
    assert all(p.requires_grad and p.grad_fn is not None for p in there.parameters())
    assert [name for name, _ in there.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert all(a is b for a, b in zip(there._flat_weights, there.parameters(), strict=True))
    assert there(torch.ones(2, 1, 3, device="meta"))[0].device.type == "meta"


@pytest.mark.parametrize("state", ["merge", "first", "sequential"])
def test_buffers_are_where_their_replica_is(state):
    net = network().eval()
    engine = Engine(net, [CPU, META])
    x = torch.randn(4, 3, 5, 5).double()
    seen = {}
    net[1].register_forward_hook(
        lambda module, _, out: seen.update({out.device.type: module.running_mean.device.type})
    )
    shards = [
        shard for shard, device in zip(DataParallel(net, 2).scatter((x,), {}), [CPU, META], strict=True)
    ]
    moved = [
        type(shard)(shard.rank, device, shard.rows, 4, (shard.args[0].to(device.kind),), {})
        for shard, device in zip(shards, [CPU, META], strict=True)
    ]
    with torch.no_grad():
        for _ in range(2):
            if state == "sequential":
                engine.habits.clear()
            with contextlib.suppress(NotImplementedError):  # nothing can be merged with what has no data
                engine.run("__call__", moved, state)
    assert seen == {"cpu": "cpu", "meta": "meta"}


def test_the_template_has_to_be_on_the_first_device():
    engine = Engine(nn.Linear(1, 1, device="meta"), [CPU, META])
    with pytest.raises(
        ValueError,
        match=r"parameters on cpu:0, the first of its devices, got them on meta; there they have no values",
    ):
        engine.replicate()


def test_tensors_in_plain_attributes_cannot_follow():
    net = nn.Sequential(nn.Linear(1, 1))
    net[0].scale = torch.ones(1)
    Engine(net, [CPU, CPU]).replicate()
    with pytest.raises(
        ValueError, match=r"template\.0\.scale: a tensor in a plain attribute; use register_buffer"
    ):
        Engine(net, [CPU, META]).replicate()
    with pytest.warns(FutureWarning):
        normed = nn.utils.weight_norm(nn.Linear(2, 2))
    Engine(normed, [CPU, META]).replicate()


def test_a_context_for_a_cpu_device_is_nothing():
    with current(Device("cpu", 5)):
        assert torch_text(Device("cpu", 5)) == "cpu"


# On accelerators, also the same one twice.


def layouts():
    if not CARDS:
        return [()]
    return [
        tuple(CARDS[:1]),
        (CARDS[0], CARDS[0]),
        *([tuple(CARDS[:2]), tuple(CARDS[1::-1])] if len(CARDS) > 1 else []),
    ]


@needs_card
@pytest.mark.parametrize("devices", layouts(), ids=lambda devices: "+".join(map(str, devices)))
@pytest.mark.parametrize("rows", [0, 1, 3, 8])
def test_training_steps_on_cards_equal_those_on_one(devices, rows):
    net = network().eval().to(torch_text(devices[0]))
    single = copy.deepcopy(net)
    parallel = DataParallel(net, devices)
    x = torch.randn(rows, 3, 5, 5, dtype=torch.float64)
    for _ in range(3):
        ours, theirs = parallel(x), single(x.to(torch_text(devices[0])))
        assert ours.device == theirs.device
        torch.testing.assert_close(ours, theirs, **CLOSE)
        ours.square().sum().backward()
        theirs.square().sum().backward()
    for mine, other in zip(net.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, **CLOSE)


@needs_card
@pytest.mark.parametrize("devices", layouts(), ids=lambda devices: "+".join(map(str, devices)))
def test_statistics_of_cards_are_pooled(devices):
    net = network().to(torch_text(devices[0]))
    single = copy.deepcopy(net)[:2]
    parallel = DataParallel(net, devices)
    x = torch.randn(9, 3, 5, 5, dtype=torch.float64, device=torch_text(devices[0]))
    for _ in range(3):
        parallel(x)
        single(x)
    torch.testing.assert_close(net[1].running_var, single[1].running_var, **CLOSE)
    torch.testing.assert_close(net[1].running_mean, single[1].running_mean, **CLOSE)


@needs_card
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_on_cards(dtype):
    net = nn.Linear(4, 4).to(torch_text(CARDS[0]))
    parallel = DataParallel(net, [CARDS[0], CARDS[0]])
    with torch.autocast(torch.device(torch_text(CARDS[0])).type, dtype):
        assert parallel(torch.ones(4, 4)).dtype == dtype


@needs_card
def test_outputs_where_they_are_asked_for():
    net = nn.Linear(4, 4).to(torch_text(CARDS[0]))
    out = DataParallel(net, [CARDS[0], CARDS[0]], output_device="cpu")(torch.ones(5, 4))
    assert out.device.type == "cpu"
    torch.testing.assert_close(out, net(torch.ones(5, 4, device=net.weight.device)).cpu())


@needs_two
def test_scatter_and_gather_between_cards():
    x = torch.randn(5, 2, requires_grad=True)
    parts = scatter(x, CARDS[:2])
    assert [str(part.device) for part in parts] == [torch_text(device) for device in CARDS[:2]]
    whole = gather(parts, CARDS[1])
    assert str(whole.device) == torch_text(CARDS[1])
    whole.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


@needs_two
def test_unequal_cards_and_streams_of_random_numbers():
    seen = []
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).to(torch_text(CARDS[0]))
    net.register_forward_hook(lambda _, __, out: seen.append(len(out)))
    parallel = DataParallel(net, CARDS[:2], options=Options(policy=(3, 1)))
    torch.manual_seed(0)
    first = parallel(torch.ones(64, 2))
    assert sorted(seen) == [16, 48]
    torch.manual_seed(0)
    assert torch.equal(parallel(torch.ones(64, 2)), first)
    assert not torch.equal(first[:16], first[48:])
