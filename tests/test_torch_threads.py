"""What reaches the replicas of a thread's state, in which order gradients are added, and what happens when things go wrong."""

import contextvars
import copy
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import isobatch  # noqa: E402
from isobatch import Options  # noqa: E402
from isobatch_torch import DataParallel, current_replica  # noqa: E402


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Let even the smallest replicas run at once."""
    monkeypatch.setattr("isobatch_torch.engine._BRIEF", 0.0)


class Probe(nn.Module):
    """Keeps what a function says inside of each replica."""

    def __init__(self, look):
        super().__init__()
        self.look = look
        self.seen = {}

    def forward(self, x):
        self.seen[current_replica().rank] = self.look(x)
        return x


def probe(look, devices=3, rows=6, schedule="threads"):
    net = Probe(look)
    parallel = DataParallel(net, devices, schedule=schedule)
    for _ in range(2):  # one after another, then at once
        net.seen.clear()
        parallel(torch.ones(rows, 1, device="cpu"))
    return [net.seen[rank] for rank in sorted(net.seen)]


# Thread state.


def test_each_rank_has_its_own_thread_and_keeps_it():
    threads = probe(lambda _: threading.current_thread().name)
    assert threads == ["isobatch-0", "isobatch-1", "isobatch-2"]
    assert (
        probe(lambda _: threading.current_thread(), schedule="sequential") == [threading.current_thread()] * 3
    )


@pytest.mark.parametrize("brief", [0.0, 10.0])
@pytest.mark.parametrize("grad", [False, True])
def test_by_itself_it_runs_where_that_is_faster(monkeypatch, brief, grad):
    monkeypatch.setattr("isobatch_torch.engine._BRIEF", brief)
    with torch.set_grad_enabled(grad):
        found = probe(lambda _: (threading.current_thread().name, torch.get_num_threads()), schedule="auto")
    here = 3 if grad or brief else 1  # the caller takes the first replica where no gradients are recorded
    caller = threading.current_thread().name
    assert [name for name, _ in found] == [caller] * here + [f"isobatch-{rank}" for rank in range(here, 3)]
    total = torch.get_num_threads()
    assert {threads for _, threads in found} == {total if grad else max(1, total // 3)}


def test_what_a_replica_switches_in_the_callers_thread_is_switched_back():
    def look(_):
        found = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        torch.set_grad_enabled(mode=False)
        torch.set_autocast_enabled("cpu", True)  # noqa: FBT003 - torch takes it by position only
        return found

    assert probe(look, schedule="sequential") == [(True, False)] * 3
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()


def test_a_replica_knows_where_it_is():
    found = probe(lambda _: current_replica(), rows=5)
    assert [(shard.rank, str(shard.device), shard.rows, shard.total) for shard in found] == [
        (0, "cpu:0", range(2), 5),
        (1, "cpu:1", range(2, 4), 5),
        (2, "cpu:2", range(4, 5), 5),
    ]
    assert probe(lambda _: current_replica().rows, devices=1) == [range(6)]
    assert current_replica() is None


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_grad_and_inference_mode(mode):
    with mode():
        wanted = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        assert probe(lambda _: (torch.is_grad_enabled(), torch.is_inference_mode_enabled())) == [wanted] * 3
    assert probe(lambda _: torch.is_grad_enabled()) == [True] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [True, False])
def test_autocast_with_its_dtype_and_cache_flag(dtype, cache):
    def look(_):
        return (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )

    with torch.no_grad(), torch.autocast("cpu", dtype, cache_enabled=cache):
        assert probe(look) == [(True, dtype, cache)] * 3
    assert [on for on, _, _ in probe(look)] == [False] * 3


def test_autocast_gradients_do_not_depend_on_who_casts_first():
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    x = torch.randn(9, 16)
    grads = []
    for schedule in ("threads", "threads", "threads", "sequential"):
        parallel = DataParallel(net, 3, schedule=schedule)
        for _ in range(3):
            net.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=schedule == "threads"):
                parallel(x).float().square().sum().backward()
            grads.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert all(torch.equal(grads[0], other) for other in grads)


def test_default_device():
    with torch.device("meta"):
        assert probe(lambda _: torch.empty(1).device.type) == ["meta"] * 3
    assert probe(lambda _: torch.empty(1).device.type) == ["cpu"] * 3
    torch.set_default_device("meta")
    try:
        net = Probe(lambda _: torch.empty(1).device.type)
        DataParallel(net, 2)(torch.ones(2, 1, device="cpu"))
        assert net.seen == {0: "meta", 1: "meta"}
    finally:
        torch.set_default_device(None)


def test_context_variables_come_in_and_stay_in():
    variable = contextvars.ContextVar("variable", default="default")
    variable.set("caller's")

    def look(_):
        found = variable.get()
        variable.set("replica's")
        return found

    assert probe(look) == ["caller's"] * 3
    assert variable.get() == "caller's"


def test_what_a_replica_leaves_switched_does_not_reach_the_next_call():
    def look(_):
        found = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)  # noqa: FBT003 - torch takes it so
        return found

    assert probe(look) == [(True, False)] * 3
    assert torch.is_grad_enabled()


def test_intra_op_threads_are_shared_out_and_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert probe(lambda _: torch.get_num_threads(), devices=2) == [2, 2]
        assert probe(lambda _: torch.get_num_threads(), devices=3) == [1, 1, 1]
        assert torch.get_num_threads() == 4
        started = []
        thread = threading.Thread(target=lambda: started.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert started == [4]
    finally:
        torch.set_num_threads(before)


def test_replicas_that_are_over_at_once_take_turns(monkeypatch):
    monkeypatch.setattr("isobatch_torch.engine._BRIEF", 10.0)
    running = []

    def look(_):
        running.append(1)
        time.sleep(0.01)
        running.pop()
        return len(running), threading.current_thread().name

    assert probe(look) == [(0, "isobatch-0"), (0, "isobatch-1"), (0, "isobatch-2")]


# What only the caller's thread has.


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))

    def forward(self, x):
        return self.layers(x)


@pytest.fixture
def pair():
    torch.manual_seed(1)
    net = Net().double()
    parallel = DataParallel(net, 2)
    x = torch.randn(5, 3).double()
    for _ in range(2):
        parallel(x)
    return net, parallel, x


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_function_transforms(pair):
    net, parallel, x = pair

    def loss(model):
        return lambda x: model(x).square().sum()

    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(torch.func.grad(loss(parallel))(x), torch.func.grad(loss(net))(x), **close)
    for ours, theirs in zip(
        torch.func.jvp(parallel, (x,), (x,)), torch.func.jvp(net, (x,), (x,)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, **close)
    batch = torch.stack([x, x + 1])
    torch.testing.assert_close(torch.vmap(parallel)(batch), torch.vmap(net)(batch), **close)
    torch.testing.assert_close(torch.func.jacrev(parallel)(x), torch.func.jacrev(net)(x), **close)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_forward_mode_differentiation(pair):
    import torch.autograd.forward_ad as fwad

    net, parallel, x = pair
    with fwad.dual_level():
        dual = fwad.make_dual(x, torch.ones_like(x))
        ours, theirs = fwad.unpack_dual(parallel(dual)).tangent, fwad.unpack_dual(net(dual)).tangent
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_saved_tensor_hooks_reach_the_replicas(pair):
    net, parallel, x = pair
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        net(x)
        single = len(packed)
        packed.clear()
        parallel(x)
    assert len(packed) >= 2 * single
    with torch.autograd.graph.save_on_cpu():
        parallel(x).sum().backward()
    assert net.layers[0].weight.grad is not None


def test_dispatch_modes_and_fake_tensors(pair):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.calls += "addmm" in str(func)
            return func(*args, **(kwargs or {}))

    _, parallel, x = pair
    with Count():
        parallel(x)
    assert Count.calls == 4
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert parallel(mode.from_tensor(x)).shape == (5, 2)


def test_export_and_compile_of_the_template(pair):
    net, parallel, x = pair
    assert torch.equal(torch.export.export(parallel.module, (x,)).module()(x), net(x))
    exported = torch.export.export(parallel, (x,), strict=False).module()
    torch.testing.assert_close(exported(x), net(x), rtol=1e-12, atol=1e-12)
    compiled = torch.compile(net, backend="eager")
    again = DataParallel(compiled, 2)
    torch.testing.assert_close(again(x), net(x), rtol=1e-12, atol=1e-12)
    assert list(again.state_dict()) == list(compiled.state_dict())


def test_compile_around_the_wrapper_leaves_it_alone(pair):
    net, parallel, x = pair
    compiled = torch.compile(parallel, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-12, atol=1e-12)
    compiled(x).sum().backward()
    assert net.layers[0].weight.grad is not None
    assert probe(lambda _: threading.current_thread().name)[1] == "isobatch-1"


def test_compiled_norm_keeps_its_state_in_the_template():
    norm = nn.BatchNorm1d(2).double()
    single = copy.deepcopy(norm)
    parallel = DataParallel(torch.compile(norm, backend="eager"), 2)
    x = torch.randn(6, 2).double()
    for _ in range(2):
        parallel(x)
        single(x)
    torch.testing.assert_close(
        dict(norm.named_buffers()), dict(single.named_buffers()), rtol=1e-12, atol=1e-12
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tracing(pair):
    net, parallel, x = pair
    traced = torch.jit.trace(parallel, (x,))
    torch.testing.assert_close(traced(x), net(x), rtol=1e-12, atol=1e-12)


# The order of gradients.


def gradients(parallel, x):
    parallel.zero_grad()
    parallel(x).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in parallel.parameters()])


def explicit(net, x, replicas):
    """The same from a plain loop over the shards."""
    net.zero_grad()
    sizes = isobatch.split_sizes(len(x), replicas)
    torch.cat([net(part) for part in x.split(sizes)]).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as many as each worker has: bits depend on it
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("replicas", [3, 4, 7])
def test_gradients_are_those_of_a_loop_over_the_shards_bit_by_bit(replicas):
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())])
    parallel = DataParallel(net, replicas)
    x = torch.randn(23, 8)
    wanted = explicit(net, x, replicas)
    other = DataParallel(nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)]), 4)
    for rows in (23, 2, 5, 1, 3, 0, 23, 6):
        gradients(parallel, x[:rows])  # fewer replicas run: their workers get ahead
        gradients(other, x)
        assert torch.equal(gradients(parallel, x), wanted)
    sequential = DataParallel(net, replicas, schedule="sequential")
    assert all(torch.equal(gradients(sequential, x), wanted) for _ in range(3))


def test_gradients_of_captured_and_broadcast_tensors_are_ordered_too():
    shared = torch.randn(64, requires_grad=True)

    class Capturing(nn.Module):
        def forward(self, x, table):
            return (x * shared * table).sin()

    x, table = torch.randn(9, 64), torch.randn(64, requires_grad=True)
    parallel = DataParallel(Capturing(), 4, options=Options(broadcast=("table",)))
    found = []
    for rows in (9, 9, 2, 9, 3, 9):
        shared.grad = table.grad = None
        parallel(x[:rows], table).square().sum().backward()
        if rows == 9:
            found.append((shared.grad, table.grad))
    assert all(torch.equal(a, b) for one in found for a, b in zip(found[0], one, strict=True))


def test_a_longer_forward_pass_than_ever_before_is_still_right():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(0.9, dtype=torch.float64))
            self.steps = 3

        def forward(self, x):
            for _ in range(self.steps):
                x = (x * self.weight).sin()
            return x

    net = Deep()
    parallel = DataParallel(net, 3)
    x = torch.rand(6, 1, dtype=torch.float64)
    for steps in (3, 40, 400, 3):
        net.steps = steps
        assert gradients(parallel, x) == pytest.approx(float(explicit(net, x, 3)), rel=1e-12)


# Randomness.


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.linear(x)) + torch.rand_like(x)


def test_random_numbers_repeat_and_differ_between_replicas():
    net = Noisy()
    x = torch.ones(6, 4)
    outputs = []
    for schedule in ("threads", "threads", "sequential"):
        parallel = DataParallel(net, 3, schedule=schedule)
        for _ in range(3):
            torch.manual_seed(7)
            outputs.append(parallel(x))
    assert all(torch.equal(outputs[0], output) for output in outputs)
    shards = outputs[0].split(2)
    assert not torch.equal(shards[0], shards[1])
    assert not torch.equal(shards[1], shards[2])


def test_a_generator_kept_by_the_module_is_shared_in_order():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x):
            return x + torch.rand(x.shape, generator=self.generator)

    net = Own()
    parallel = DataParallel(net, 3)
    x = torch.zeros(6, 1000)
    outputs = []
    for _ in range(5):
        net.generator.manual_seed(0)
        outputs.append(parallel(x))
    assert all(torch.equal(outputs[0], output) for output in outputs)
    assert not torch.equal(outputs[0][0], outputs[0][2])


def test_one_replica_draws_what_the_module_draws():
    net = Noisy()
    x = torch.ones(3, 4)
    draws = []
    for model in (net, DataParallel(net, 1)):
        torch.manual_seed(7)
        draws.append((model(x), torch.rand(1)))
    assert torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])


def test_numbers_drawn_unexpectedly_are_reported_once():
    class Later(nn.Module):
        noise = False

        def forward(self, x):
            return x + torch.rand_like(x) if Later.noise else x

    parallel = DataParallel(Later(), 2, schedule="threads")
    x = torch.ones(4)
    for _ in range(3):
        parallel(x)
    Later.noise = True
    with pytest.warns(RuntimeWarning, match="drew random numbers for the first time"):
        parallel(x)
    outputs = []
    for _ in range(5):
        torch.manual_seed(0)
        outputs.append(parallel(x))
    assert all(torch.equal(outputs[0], output) for output in outputs)


def test_train_and_eval_have_habits_of_their_own():
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    parallel = DataParallel(net, 2)
    x = torch.ones(4, 4)
    for mode in (False, True, False, True):
        parallel.train(mode)
        outputs = []
        for _ in range(3):
            torch.manual_seed(0)
            outputs.append(parallel(x))
        assert all(torch.equal(outputs[0], output) for output in outputs)


# Failures.


class Failing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        if x[0] in (1, 2):
            raise self.error[int(x[0])]
        return x * self.weight


@pytest.mark.parametrize("schedule", ["threads", "sequential"])
@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_the_lowest_failing_replica_is_heard(kind, schedule):
    errors = [None, kind("first"), kind("second")]
    parallel = DataParallel(Failing(errors), 4, schedule=schedule)
    good, bad = torch.zeros(4), torch.tensor([0.0, 1.0, 2.0, 0.0])
    for warm in (0, 2):
        for _ in range(warm):
            parallel(good)
        with pytest.raises(kind) as caught:
            parallel(bad)
        assert caught.value is errors[1]
        assert caught.value.__notes__ == ["in replica 1 on cpu:1, rows 1..1"]
        assert caught.traceback[-1].name == "forward"
    assert torch.equal(parallel(good), good)


def test_one_row_in_batch_norm_is_explained_and_avoided():
    norm = nn.BatchNorm1d(2)
    x = torch.randn(5, 2)
    with pytest.raises(ValueError, match="more than 1 value") as caught:
        DataParallel(norm, 3)(x)
    assert caught.value.__notes__ == [
        "in replica 2 on cpu:2, rows 4..4",
        "The replicas got 2, 2, 1 rows; min_rows=2 uses fewer replicas rather than give one a single row.",
    ]
    assert norm.num_batches_tracked == 0
    DataParallel(norm, 3, options=Options(min_rows=2))(x)
    assert norm.num_batches_tracked == 1


def test_interrupted_wait_leaves_a_working_model():
    class Slow(nn.Module):
        seconds = 0.0

        def forward(self, x):
            time.sleep(Slow.seconds)
            return x

    parallel = DataParallel(Slow(), 2)
    x = torch.ones(4)
    parallel(x)
    Slow.seconds = 3.0
    start = time.monotonic()
    timer = threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    # A shell has what it starts in the background ignore this signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            parallel(x)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 2.0
    Slow.seconds = 0.0
    assert torch.equal(parallel(x), x)


@pytest.mark.parametrize("trial", range(3))
def test_several_threads_in_eval_mode(trial):
    torch.manual_seed(trial)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double().eval()
    parallel = DataParallel(net, 3)
    wrong = []

    def serve(seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(40):
                x = torch.randn(7, 8, generator=generator, dtype=torch.float64)
                if not torch.allclose(parallel(x), net(x), rtol=1e-12, atol=1e-12):
                    wrong.append(seed)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_parallel_inside_of_parallel():
    inner = nn.Linear(3, 3).double()
    net = nn.Sequential(DataParallel(inner, 2), nn.Tanh(), nn.DataParallel(nn.Linear(3, 2).double()))
    x = torch.randn(5, 3).double()
    single = copy.deepcopy(nn.Sequential(inner, nn.Tanh(), net[2].module))
    parallel = DataParallel(net, 2)
    for _ in range(2):
        torch.testing.assert_close(parallel(x), single(x), rtol=1e-12, atol=1e-12)
    assert [key.removeprefix("2.module.") for key in parallel.state_dict()] == [
        "0.weight",
        "0.bias",
        "weight",
        "bias",
    ]
    with pytest.raises(ValueError, match=r"not parallel yet, got DataParallel; pass its \.module"):
        DataParallel(parallel)


def test_parallel_reached_from_inside_of_a_replica():
    helper = DataParallel(nn.Linear(2, 2), 3)

    class Uses(nn.Module):
        def forward(self, x):
            return helper(x)

    parallel = DataParallel(Uses(), 3)
    x = torch.randn(6, 2)
    for _ in range(2):
        torch.testing.assert_close(parallel(x), helper.module(x))


def waited(child):
    """The exit code of a process that is not to hang."""
    for _ in range(200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return pytest.fail("the child hangs")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_workers_start_anew_after_fork():
    parallel = DataParallel(nn.Linear(2, 2), 2)
    x = torch.ones(4, 2)
    with torch.no_grad():
        expected = parallel(x)
        parallel(x)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        with torch.no_grad():
            os._exit(0 if torch.equal(parallel(x), expected) else 1)
    assert waited(child) == 0
    assert torch.equal(parallel(x), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_fork_while_another_thread_is_in_a_call():
    entered, leave = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, x):
            if not leave.is_set():
                entered.set()
                leave.wait()
            return x

    parallel = DataParallel(Waiting(), 2)
    x = torch.ones(2)
    thread = threading.Thread(target=parallel, args=(x,))
    thread.start()
    entered.wait()
    child = os.fork()
    if child == 0:
        leave.set()
        os._exit(0 if torch.equal(parallel(x), x) else 1)
    leave.set()
    thread.join()
    assert waited(child) == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_data_loader_workers():
    from torch.utils.data import DataLoader, Dataset

    parallel = DataParallel(nn.Linear(2, 2), 2)
    parallel(torch.ones(4, 2))

    class Data(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            with torch.no_grad():
                return parallel(torch.full((2, 2), float(index)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = list(DataLoader(Data(), num_workers=1, multiprocessing_context="fork"))
    assert len(batches) == 4
    assert torch.equal(batches[3][0], parallel(torch.full((2, 2), 3.0)).detach())


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "threading.Thread(target=lambda: p(x)).start()"])
def test_interpreter_exit(end):
    code = (
        "import torch, threading; from isobatch_torch import DataParallel\n"
        "p, x = DataParallel(torch.nn.Linear(2, 2), 4), torch.ones(8, 2)\n"
        "for _ in range(5): p(x).sum().backward()\n" + end
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("draw", [lambda: float(np.random.rand()), random.random], ids=["numpy", "python"])  # noqa: NPY002
def test_numbers_drawn_from_other_generators_repeat(draw):
    class Noisy(nn.Module):
        def forward(self, x):
            time.sleep(1e-3 * (1 + x[0, 0].item() % 2))  # long enough to run at once, and in another order
            for _ in range(200):
                x = x @ torch.eye(64)
            return x + draw()

    net = DataParallel(Noisy(), 3)
    x = torch.arange(6.0)[:, None].expand(6, 64)
    seen = []
    for _ in range(5):
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        seen.append(net(x))
    assert all(torch.equal(seen[0], one) for one in seen)
