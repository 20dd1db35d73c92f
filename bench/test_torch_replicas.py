"""What a parallel module costs beside the plain one, on two CPU replicas. Run: pytest bench --benchmark-only.

Compare the medians within a group; on a machine that does other work, compare the minima.
"""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from isobatch_torch import DataParallel  # noqa: E402


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 64, 2, batch_first=True)
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 4),
    )


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        *[Residual(32) for _ in range(4)],
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 4),
    )


def transformer(dropout=0.0):
    layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=dropout, batch_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.LazyLinear(4)
    )


def mlp():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))


CASES = {
    "cnn": (cnn, (64, 3, 24, 24)),
    "resnet": (resnet, (32, 3, 24, 24)),
    "lstm": (Recurrent, (64, 32, 32)),
    "transformer": (transformer, (64, 32, 32)),
    "transformer-dropout": (lambda: transformer(0.1), (64, 32, 32)),
    "mlp": (mlp, (256, 32)),
}


@pytest.fixture(params=CASES)
def case(request):
    build, shape = CASES[request.param]
    torch.manual_seed(0)
    x = torch.randn(*shape)
    net = build()
    net(x[:2])  # makes lazy weights
    return request.param, net, x


@pytest.fixture(params=["plain", "parallel"])
def kind(request):
    return request.param


def test_forward(benchmark, case, kind):
    name, net, x = case
    net.eval()
    benchmark.group = f"forward {name}"
    run = DataParallel(net, 2) if kind == "parallel" else net
    with torch.no_grad():
        run(x)
        out = benchmark(run, x)
        torch.testing.assert_close(out, net(x), rtol=1e-4, atol=1e-5)


def test_training_step(benchmark, case, kind):
    name, net, x = case
    benchmark.group = f"step {name}"
    run = DataParallel(net, 2) if kind == "parallel" else net
    y = torch.randint(4, (len(x),))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()
        return loss

    step()
    assert torch.isfinite(benchmark(step))


@pytest.mark.parametrize("replicas", [0, 1, 2, 3, 4])
def test_overhead_on_a_tiny_module(benchmark, replicas):
    """Zero replicas: the bare module."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.randn(8, 4)
    benchmark.group = "overhead"
    run = DataParallel(net, replicas) if replicas else net
    with torch.no_grad():
        run(x)
        assert benchmark(run, x).shape == (8, 4)


@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "grad"])
def test_overhead_on_a_hundred_layers(benchmark, grad):
    """What a call costs before and after the replicas run: they do nothing here."""
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(100)])
    net.__class__ = type("Idle", (nn.Sequential,), {"forward": lambda self, x: self[0](x)})
    x = torch.randn(8, 4)
    benchmark.group = f"hundred layers, {'grad' if grad else 'no grad'}"
    run = DataParallel(net, 2, schedule="sequential")
    with torch.set_grad_enabled(grad):
        run(x)
        assert benchmark(run, x).shape == (8, 4)
