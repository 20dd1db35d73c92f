"""A training step on two CPU replicas of one process, beside two processes of DistributedDataParallel with gloo on the same rows."""

import statistics
import time

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from isobatch_torch import DataParallel  # noqa: E402

ROUNDS = 15
CASES = {
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(12800, 4)
        ),
        (64, 3, 24, 24),
    ),
    "mlp": (lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4)), (256, 64)),
}


def measure(model, x, y):
    """Seconds of the median step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds = []
    for _ in range(ROUNDS + 3):
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:])


def batch(name):
    build, shape = CASES[name]
    torch.manual_seed(0)
    return build(), torch.randn(*shape), torch.randint(4, shape[:1])


def process(rank, name, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    net, x, y = batch(name)
    seconds = measure(nn.parallel.DistributedDataParallel(net), x.chunk(2)[rank], y.chunk(2)[rank])
    if rank == 0:
        torch.save((seconds, net.state_dict()), f"{folder}/found.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_step_beside_two_processes(benchmark, name, tmp_path):
    benchmark.group = f"two replicas or two processes, {name}"
    torch.multiprocessing.spawn(process, (name, str(tmp_path)), nprocs=2)
    theirs, weights = torch.load(tmp_path / "found.pt")
    net, x, y = batch(name)
    ours = benchmark.pedantic(measure, (DataParallel(net, 2), x, y), rounds=1)
    benchmark.extra_info.update(replicas_ms=round(ours * 1e3, 2), processes_ms=round(theirs * 1e3, 2))
    for key, weight in net.state_dict().items():
        torch.testing.assert_close(weight, weights[key], rtol=1e-4, atol=1e-5)
