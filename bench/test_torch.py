"""What a parallel module costs on two CPU replicas, beside the plain one and beside two processes of DistributedDataParallel."""

import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_networks import CASES, case, stepper  # noqa: E402

from isobatch_torch import DataParallel  # noqa: E402

GOALS = {name: 1.05 for name in CASES if name != "transformer-dropout"} | {"mlp": 1.3}


@pytest.mark.parametrize("name", CASES)
def test_forward(contest, name):
    net, x, _ = case(name)
    net.eval()
    parallel = DataParallel(net, 2)
    calls = {"plain": lambda: net(x), "2 replicas": lambda: parallel(x)}
    with torch.no_grad():
        contest(f"torch forward {name}", calls, {("2 replicas", "plain"): GOALS.get(name)}, rows=len(x))
        torch.testing.assert_close(parallel(x), net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_step(contest, peer, name):
    plain, other = case(name), case(name)
    calls = {
        "plain": stepper(*plain),
        "2 replicas": stepper(DataParallel(other[0], 2), *other[1:]),
        "DDP, 2 processes": peer("torch_networks.py", name).call("step"),
    }
    goals = {("2 replicas", "plain"): GOALS.get(name), ("2 replicas", "DDP, 2 processes"): 1.0}
    contest(f"torch step {name}", calls, goals, rows=len(plain[1]))
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


@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "grad"])
def test_a_hundred_layers(contest, benchmark, grad):
    """What a call costs before and after the replicas run: they do nothing here."""
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(100)])
    net.__class__ = type("Idle", (nn.Sequential,), {"forward": lambda self, x: self[0](x)})
    x = torch.randn(8, 4)
    parallel = DataParallel(net, 2)
    with torch.set_grad_enabled(grad):
        timings = contest(
            f"torch, a hundred layers, {'grad' if grad else 'no grad'}",
            {"2 replicas": lambda: parallel(x)},
            seconds=1,
        )
        assert parallel(x).shape == (8, 4)
    benchmark.extra_info["numbers"] = [
        ["a call", 1e3 * timings["2 replicas"].median, "ms", 1.5 if grad else 0.3]
    ]
