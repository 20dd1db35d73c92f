"""What a parallel module costs on two CPU replicas, beside the plain one, nn.DataParallel over stand-ins, and DistributedDataParallel."""

import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_data_parallel import Standing, standing_in  # noqa: E402
from torch_networks import CASES, case, stepper  # noqa: E402

from isobatch_torch import DataParallel  # noqa: E402

GOALS = dict.fromkeys(("cnn", "resnet", "lstm", "transformer"), 1.05) | {"mlp": 1.3}
NETWORKS = [pytest.param(name, marks=[pytest.mark.full] * (name == "xception")) for name in CASES]


@pytest.fixture(autouse=True)
def stand_ins():
    with standing_in():
        yield


@pytest.mark.parametrize("name", NETWORKS)
def test_forward(contest, name):
    net, x, _ = case(name)
    net.eval()
    parallel = DataParallel(net, 2)
    standing = Standing(net)
    calls = {
        "plain": lambda: net(x),
        "2 replicas": lambda: parallel(x),
        "nn.DataParallel": lambda: standing(x),
    }
    goals = {("2 replicas", "plain"): GOALS.get(name), ("2 replicas", "nn.DataParallel"): None}
    with torch.no_grad():
        contest(f"torch forward {name}", calls, goals, rows=len(x))
        for call in calls.values():
            torch.testing.assert_close(call(), net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_step(contest, peer, name):
    plain, other, third = case(name), case(name), case(name)
    calls = {
        "plain": stepper(*plain),
        "2 replicas": stepper(DataParallel(other[0], 2), *other[1:]),
        "nn.DataParallel": stepper(Standing(third[0]), *third[1:]),
        "DDP, 2 processes": peer("torch_networks.py", name).call("step"),
    }
    goals = {("2 replicas", "plain"): GOALS.get(name)}
    goals |= {("2 replicas", peers): 1.0 if peers.startswith("DDP") else None for peers in list(calls)[2:]}
    first = [calls["plain"](), calls["2 replicas"](), calls["nn.DataParallel"]()]
    contest(f"torch step {name}", calls, goals, rows=len(plain[1]))
    if name not in {
        "resnet",
        "xception",
        "transformer-dropout",
    }:  # whose shards have statistics and masks of their own
        assert max(first) - min(first) < 1e-4 * first[0]
    assert all(math.isfinite(call()) for call in calls.values())


@pytest.mark.full
@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_many_replicas(contest, name):
    cases = {"plain": case(name)} | {f"{count} replicas": case(name) for count in (1, 2, 4, 8, 16, 64)}
    calls = {
        title: stepper(net if title == "plain" else DataParallel(net, int(title.split()[0])), x, y)
        for title, (net, x, y) in cases.items()
    }
    contest(f"torch step {name}, many replicas", calls, seconds=3)
    assert all(math.isfinite(call()) for call in calls.values())


def test_overhead_on_a_tiny_module(contest, benchmark):
    """Four tensors, a hundred microseconds of arithmetic in all: what is timed is what each replica adds."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.randn(8, 4)
    calls = {"plain": lambda: net(x)}
    for count in (1, 2, 3, 4):
        parallel = DataParallel(net, count)
        calls[f"{count} replicas"] = lambda parallel=parallel: parallel(x)
    with torch.no_grad():
        timings = contest("torch, tiny module", calls, seconds=1)
        assert calls["4 replicas"]().shape == (8, 4)
    micro = {name: 1e6 * one.median for name, one in timings.items()}
    benchmark.extra_info["numbers"] = [
        ["one replica adds", micro["1 replicas"] - micro["plain"], "us", 15],
        ["each further one adds", (micro["4 replicas"] - micro["1 replicas"]) / 3, "us", 60],
    ]
