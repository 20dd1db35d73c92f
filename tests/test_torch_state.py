"""Running state of torch modules under the three policies."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from isobatch import Options, split_sizes  # noqa: E402
from isobatch_torch import DataParallel  # noqa: E402

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
SHAPES = {1: (4,), 2: (4, 5, 5), 3: (4, 3, 3, 3)}


@pytest.fixture(autouse=True)
def doubles():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as many as each worker has: bits depend on it
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Let even the smallest replicas run at once."""
    monkeypatch.setattr("isobatch_torch.engine._BRIEF", 0.0)


def buffers(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def run(net, x, replicas, times=3, **options):
    """Running state after some parallel calls, from a copy of a network."""
    net = copy.deepcopy(net)
    parallel = DataParallel(net, replicas, options=Options(**options))
    for _ in range(times):
        parallel(x)
    return buffers(net)


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("rows", [4, 7, 10])
def test_batch_norm_is_pooled_as_if_run_whole(axes, momentum, rows):
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes - 1](4, momentum=momentum)
    x = 3 + torch.randn(rows, *SHAPES[axes])
    single = copy.deepcopy(norm)
    for _ in range(3):
        single(x)
    for replicas in (1, 2, 3):
        if min(size for size in split_sizes(rows, replicas)) > 1 or axes > 1:
            torch.testing.assert_close(run(norm, x, replicas), buffers(single), **CLOSE)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_instance_norm_is_the_mean_over_rows(axes):
    norm = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[axes - 1](4, track_running_stats=True)
    x = 3 + torch.randn(7, 4, *[3] * axes)
    single = copy.deepcopy(norm)
    for _ in range(3):
        single(x)
    torch.testing.assert_close(run(norm, x, 3), buffers(single), **CLOSE)


def test_a_layer_called_several_times_is_pooled_call_by_call():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(x), self.norm(x * 2 + 1)

    net = Twice()
    x = torch.randn(9, 4)
    single = copy.deepcopy(net)
    for _ in range(3):
        single(x)
    torch.testing.assert_close(run(net, x, 3), buffers(single), **CLOSE)
    assert single.norm.num_batches_tracked == 6


def test_a_later_layer_is_pooled_over_what_reached_it():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.second(self.first(x).tanh() ** 3 + x)

    net = Net()
    x = torch.randn(11, 4)
    reached = torch.cat([net.first(part).tanh() ** 3 + part for part in x.split(split_sizes(11, 3))])
    single = copy.deepcopy(net.second)
    net.first.reset_running_stats()
    single(reached)
    after = run(net, x, 3, times=1)
    torch.testing.assert_close(after["second.running_var"], single.running_var, **CLOSE)
    torch.testing.assert_close(after["second.running_mean"], single.running_mean, **CLOSE)


def test_rows_that_never_reach_a_layer_do_not_count():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x):
            return self.norm(x) if x[0, 0] > 0 else x

    x = torch.randn(9, 2)
    x[:, 0] = torch.tensor([1.0, 2, 3, -1, -1, -1, 4, 5, 6])
    single = nn.BatchNorm1d(2)
    single(torch.cat([x[:3], x[6:]]))
    torch.testing.assert_close(run(Gate(), x, 3, times=1)["norm.running_var"], single.running_var, **CLOSE)


def test_eval_mode_and_untracked_layers_change_nothing():
    net = nn.Sequential(
        nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False), nn.Dropout(0.0)
    ).eval()
    before = buffers(net)
    x = torch.randn(8, 4)
    parallel = DataParallel(net, 3)
    single = copy.deepcopy(net)
    torch.testing.assert_close(parallel(x)[:3], single(x[:3]), **CLOSE)
    torch.testing.assert_close(buffers(net), before, rtol=0, atol=0)
    net[1].train()
    net[1](x)


def test_frozen_layers_in_a_training_network():
    net = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    net[0].eval()
    net[0].running_mean.fill_(0.3)
    before = buffers(net[0])
    x = torch.randn(8, 4)
    single = copy.deepcopy(net)
    single(x)
    after = run(net, x, 2, times=1)
    assert torch.equal(after["0.running_mean"], before["running_mean"])
    torch.testing.assert_close(after, buffers(single), **CLOSE)


@pytest.mark.parametrize("policy", ["merge", "first", "sequential"])
def test_gradients_and_outputs_are_those_of_a_run_shard_by_shard(policy):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
    single = copy.deepcopy(net)
    x = torch.randn(7, 3, 5, 5)
    parallel = DataParallel(net, 3, options=Options(state=policy))
    for _ in range(3):
        net.zero_grad()
        single.zero_grad()
        ours = parallel(x)
        theirs = torch.cat([single(part) for part in x.split(split_sizes(7, 3))])
        assert torch.equal(ours, theirs)
        ours.square().sum().backward()
        theirs.square().sum().backward()
        for mine, other in zip(net.parameters(), single.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)
    if policy == "sequential":
        assert all(
            torch.equal(mine, other) for mine, other in zip(net.buffers(), single.buffers(), strict=True)
        )


def test_first_is_what_the_first_replica_saw():
    net = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    single = copy.deepcopy(net)
    x = torch.randn(8, 4)
    for _ in range(3):
        single(x[:4])
    assert all(
        torch.equal(mine, other)
        for mine, other in zip(run(net, x, 2, state="first").values(), single.buffers(), strict=True)
    )


class Keeper(nn.Module):
    """Has every kind of buffer that a forward pass may update."""

    def __init__(self, update):
        super().__init__()
        self.update = update
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("constant", torch.arange(2.0))
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.update(self, x.detach())
        return x * self.constant


def in_place(self, x):
    self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
    self.count.add_(1)


def rebinding(self, x):
    self.average = self.average * 0.9 + 0.1 * x.mean(0)
    self.count = self.count + 1


def through_data(self, x):
    self.average.data.mul_(0.9).add_(x.mean(0), alpha=0.1)
    self.count.data += 1


@pytest.mark.parametrize("update", [in_place, rebinding, through_data])
@pytest.mark.parametrize("grad", [True, False])
def test_buffers_a_module_updates_itself(update, grad):
    net = Keeper(update)
    x = torch.randn(7, 2)
    single = copy.deepcopy(net)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            single(x)
        merged, first, sequential = (
            run(net, x, 2, state=state) for state in ("merge", "first", "sequential")
        )
    torch.testing.assert_close(merged, buffers(single), **CLOSE)
    half = copy.deepcopy(net)
    for _ in range(3):
        half(x[:4])
    torch.testing.assert_close(first, buffers(half), **CLOSE)
    chained = copy.deepcopy(net)
    for _ in range(3):
        chained(x[:4])
        chained(x[4:])
    torch.testing.assert_close(sequential, buffers(chained), **CLOSE)


def test_a_buffer_nobody_updates_is_shared():
    seen = []
    net = Keeper(lambda self, _: seen.append(self.constant))
    parallel = DataParallel(net, 2)
    for _ in range(2):
        parallel(torch.ones(4, 2))
    assert all(buffer is net.constant for buffer in seen[2:])
    net.constant.fill_(7)
    net.constant.data.add_(1)
    assert parallel(torch.ones(4, 2)).eq(8).all()


def test_tied_buffers_stay_tied():
    net = nn.Sequential(Keeper(in_place), Keeper(lambda *_: None))
    net[1].average = net[0].average
    x = torch.randn(6, 2)
    single = copy.deepcopy(net)
    for _ in range(3):
        single(x)
    assert single[1].average is single[0].average
    torch.testing.assert_close(run(net, x, 2), buffers(single), **CLOSE)


def test_an_update_out_of_the_blue_is_reported_once():
    class Rarely(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(1))
            self.due = False

        def forward(self, x):
            if self.due:
                self.steps.add_(1)
            return x

    net = Rarely()
    parallel = DataParallel(net, 2)
    x = torch.ones(4)
    for _ in range(3):
        parallel(x)
    net.due = True
    with pytest.warns(RuntimeWarning, match="updated steps for the first time"):
        parallel(x)
    net.steps.zero_()
    for _ in range(3):
        parallel(x)
    assert net.steps == 3


def test_state_of_rows_is_refused():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("hidden", torch.zeros(1, 2))

        def forward(self, x):
            self.hidden = x + self.hidden[:1]
            return self.hidden

    with pytest.raises(ValueError, match=r"template\.hidden.*hand it in with the next batch"):
        DataParallel(Recurrent(), 2)(torch.ones(5, 2))


def test_statistics_of_a_failed_call_are_not_kept():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x):
            out = self.norm(x)
            if x[0, 0] == 9:
                raise ValueError
            return out

    net = Net()
    parallel = DataParallel(net, 2)
    x = torch.randn(6, 2)
    parallel(x)
    before = buffers(net)
    x[3, 0] = 9
    with pytest.raises(ValueError):  # noqa: PT011 - it has no text
        parallel(x)
    torch.testing.assert_close(buffers(net), before, rtol=0, atol=0)
    assert all(replica.module.norm.momentum == 0.1 for replica in parallel.replicate())


def test_inference_mode_in_training_mode():
    net = nn.BatchNorm1d(2)
    single = copy.deepcopy(net)
    x = torch.randn(6, 2)
    with torch.inference_mode():
        for model in (DataParallel(net, 2), single):
            for _ in range(3):
                model(x)
    torch.testing.assert_close(buffers(net), buffers(single), **CLOSE)


def test_sync_batch_norm_is_answered():
    net = nn.Sequential(nn.SyncBatchNorm(2))
    x = torch.randn(4, 2)
    with pytest.raises(
        ValueError, match=r"template\.0: a SyncBatchNorm synchronises processes, not replicas"
    ):
        DataParallel(net, 2)(x)
    net.eval()
    torch.testing.assert_close(DataParallel(net, 2)(x), net(x), **CLOSE)


def test_statistics_in_float32_are_pooled_without_loss():
    norm = nn.BatchNorm1d(3).float()
    x = (1000 + torch.randn(4096, 3)).float()
    exact = copy.deepcopy(norm).double()
    exact(x.double())
    after = run(norm, x, 4, times=1)
    torch.testing.assert_close(after["running_mean"], exact.running_mean.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(after["running_var"], exact.running_var.float(), rtol=1e-5, atol=0)
    assert after["running_var"].dtype == torch.float32


def test_running_statistics_seen_by_hooks_are_the_templates():
    norm = nn.BatchNorm1d(3)
    seen = []
    norm.register_forward_hook(
        lambda module, *_: seen.append((module.momentum, float(module.running_var.sum())))
    )
    DataParallel(norm, 2)(torch.randn(8, 3))
    assert seen == [(0.1, 3.0)] * 2


def test_a_norm_with_a_forward_of_its_own_is_averaged_by_rows():
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, training=True, momentum=0.1, eps=self.eps
            )

    x = torch.randn(9, 4, dtype=torch.float64)
    parts = [Own(4, momentum=0.7).double() for _ in range(3)]
    for part, rows in zip(parts, x.split(3), strict=True):
        part(rows)
    net = Own(4, momentum=0.7).double()
    DataParallel(net, 3)(x)
    for name in ("running_mean", "running_var"):
        expected = torch.stack([getattr(part, name) for part in parts]).mean(0)
        torch.testing.assert_close(getattr(net, name), expected, rtol=0, atol=1e-12)


def test_statistics_that_are_switched_off_and_on_are_no_surprise():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    parallel = DataParallel(net, 2)
    x = torch.randn(8, 3)
    parallel(x)
    parallel(x)
    norm, kept = net[1], (net[1].running_mean, net[1].running_var)
    norm.running_mean = norm.running_var = None
    parallel(x)  # any warning fails the test
    parallel(x)
    norm.running_mean, norm.running_var = kept
    before = norm.running_mean.clone()
    parallel(x)
    assert not torch.equal(norm.running_mean, before)
