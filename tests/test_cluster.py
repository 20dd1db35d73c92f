"""Several processes of one launcher, on loopback and across network namespaces: one batch, the numbers of one process."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import isobatch
from isobatch import Cluster, ClusterError

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
GAP = 1e-13  # of numbers near 1, after ten steps in float64
QUIET = {
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONPATH": os.pathsep.join(
        str(ROOT / name) for name in ("common", "keras_backend", "torch_backend", "tests")
    ),
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def start(command, **env):
    given = {**os.environ, **QUIET, **env}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=150, check=False)


def launch(processes, *command, options=(), **env):
    return start(
        [*TORCHRUN, "--standalone", "--nproc-per-node", str(processes), *options, *map(str, command)], **env
    )


def free_port():
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


@pytest.fixture
def program(backend):
    if backend.name == "keras" and os.environ.get("KERAS_BACKEND") == "torch":
        pytest.skip("Keras trains over processes on TensorFlow")
    pytest.importorskip("torch")
    return TESTS / f"cluster_{backend.name}.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process finds with so many replicas; each is asked for once."""
    known = {}

    def found(program, replicas):
        if (program, replicas) not in known:
            where = tmp_path_factory.mktemp("alone") / "found.npz"
            done = start([sys.executable, program, where, str(replicas)])
            assert done.returncode == 0, done.stderr
            known[program, replicas] = dict(np.load(where))
        return known[program, replicas]

    return found


def assert_same(found, expected):
    assert found.keys() <= expected.keys()
    gaps = {key: float(np.abs(value - expected[key]).max(initial=0)) for key, value in found.items()}
    assert max(gaps.values()) < GAP, gaps


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "replicas"), [(2, 2), (4, 1)])
def test_processes_train_as_one_does(program, alone, tmp_path, processes, replicas):
    if processes == 4 and program.stem != "cluster_torch":
        pytest.skip("four TensorFlows on two cores take long, and two say as much")
    done = launch(processes, program, tmp_path / "found.npz", replicas)
    assert done.returncode == 0, done.stderr
    found = dict(np.load(tmp_path / "found.npz"))
    assert len({key.partition("/")[0] for key in found}) >= 3
    assert np.ptp(found["accumulated/losses"]) > 0.01  # there was something to learn
    assert_same(found, alone(program, processes * replicas))
    assert_same({key: value for key, value in found.items() if not key.startswith("norm")}, alone(program, 1))
    if program.stem == "cluster_keras":
        sides = [
            {
                key.partition("/")[2]: value
                for key, value in found.items()
                if key.startswith(f"norm in {name}/")
            }
            for name in ("keras", "torch")
        ]
        assert len(sides[0]["losses"]) == 10
        assert_same(*sides)


EXAMPLE = ROOT / "examples" / "cluster.py"
FAULTS = TESTS / "cluster_faults.py"


def epochs(done):
    return [line.partition(" over ")[::2] for line in done.stdout.splitlines() if line.startswith("epoch")]


@pytest.mark.slow
def test_example_goes_on_after_a_process_was_killed_as_if_nothing_had_been(program, backend, tmp_path):
    whole = launch(2, EXAMPLE, backend.name, "--epochs", 3, "--folder", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    command = [
        FAULTS,
        "SIGKILL",
        1,
        60,
        EXAMPLE,
        backend.name,
        "--epochs",
        3,
        "--folder",
        tmp_path / "killed",
    ]
    killed = launch(2, *command, options=["--max-restarts", "1"])
    assert killed.returncode == 0, killed.stderr
    assert "failed at" in killed.stderr
    assert len(epochs(whole)) == 3
    assert epochs(killed) == epochs(whole)  # each once: what was done was not done again
    assert {file.name for file in (tmp_path / "killed").iterdir()} == {
        file.name for file in (tmp_path / "whole").iterdir()
    }
    results = [weights(backend.name, tmp_path / name) for name in ("whole", "killed")]
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


def weights(name, folder):
    """The last weights, read without this library."""
    if name == "keras":
        import keras

        return keras.saving.load_model(folder / "epoch-3.keras").get_weights()
    import torch

    return [tensor.numpy() for tensor in torch.load(folder / "epoch-3.pt")["model"].values()]


@pytest.mark.slow
def test_files_are_read_by_another_number_of_processes_and_by_the_twin(program, backend, tmp_path):
    first = launch(2, EXAMPLE, backend.name, "--epochs", 2, "--folder", tmp_path)
    rest = start([sys.executable, EXAMPLE, backend.name, "--epochs", "3", "--folder", tmp_path])
    assert (first.returncode, rest.returncode) == (0, 0), first.stderr + rest.stderr
    assert [[name.split()[1] for name, _ in epochs(done)] for done in (first, rest)] == [["1", "2"], ["3"]]
    whole = start([sys.executable, EXAMPLE, backend.name, "--epochs", "3", "--folder", tmp_path / "whole"])
    assert whole.returncode == 0, whole.stderr
    pairs = zip(weights(backend.name, tmp_path), weights(backend.name, tmp_path / "whole"), strict=True)
    assert all(np.abs(a - b).max() < 1e-4 for a, b in pairs)  # float32, its sums in another order
    if backend.name == "keras":
        torch = pytest.importorskip("torch")
        x = np.random.default_rng(0).random((5, 64), "float32")
        parallel = isobatch.load(
            tmp_path / "epoch-2.keras", devices=["cpu:0", "cpu:1", "cpu:2"]
        )  # written by two processes
        twin = isobatch.twin(parallel.template)
        assert np.abs(twin(torch.tensor(x)).detach().numpy() - parallel.predict(x, verbose=0)).max() < 1e-4


def test_losses_that_are_no_means_are_refused_over_processes(program, backend):
    if backend.name != "keras":
        pytest.skip("torch's losses are outside of the model: scalars='sum' is for sums")
    import keras

    from isobatch_keras.cluster import ClusterModel

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    parallel = ClusterModel(model, (isobatch.Device("cpu"),), isobatch.Options(), isobatch.Device("cpu"))
    parallel.__dict__["cluster"] = Cluster(0, 2)
    with pytest.raises(ValueError, match=r"got reduction='sum'.*sum_over_batch_size"):
        parallel.compile("sgd", loss=keras.losses.MeanSquaredError(reduction="sum"))


@pytest.mark.slow
@pytest.mark.parametrize(("how", "rank", "code"), [("SIGKILL", 1, -9), ("SIGKILL", 0, -9), ("raise", 1, 1)])
def test_process_that_fails_ends_the_others(tmp_path, how, rank, code):
    pytest.importorskip("torch")
    done = launch(2, FAULTS, how, rank, 20, EXAMPLE, "torch", "--folder", tmp_path)
    seconds = time.time() - failed_at(done.stderr)
    assert done.returncode != 0
    assert seconds < 20  # half a second on a quiet machine
    cause = f"rank      : {rank} (local_rank: {rank})\n  exitcode  : {code}"
    assert cause in done.stderr.partition("Root Cause")[2]
    assert ("ValueError: planted" in done.stderr) == (how == "raise")


@pytest.mark.slow
def test_process_that_stands_still_is_named_in_time(tmp_path):
    pytest.importorskip("torch")
    code = """
cluster = isobatch.cluster(timeout=3)
model = isobatch.data_parallel(torch.nn.Linear(4, 2), devices=cluster)
for step in range(100000):
    model(torch.ones(2, 4)).sum().backward()
"""
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first, second = (
        subprocess.Popen(
            [sys.executable, FAULTS, "SIGSTOP", "1", "20", failing(tmp_path, code)],
            env={**os.environ, **QUIET, **env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    )
    try:
        _, log = first.communicate(timeout=60)
        assert f"Lost rank 1, process {second.pid} on " in log
        assert first.returncode == 1
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def failed_at(log):
    return float(log.partition("failed at ")[2].split()[0])


@pytest.fixture
def hosts():
    """Two network namespaces on one wire: commands that run a program in either, and the address of the first."""
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need Linux, iproute2 and root")
    names = [f"isobatch{os.getpid()}{side}" for side in "ab"]
    if ip("netns", "add", names[0], check=False).returncode:
        pytest.skip("this machine does not allow network namespaces")
    try:
        ip("netns", "add", names[1])
        links = [f"iso{os.getpid()}{side}" for side in "ab"]
        ip(
            "link",
            "add",
            links[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            links[1],
            "netns",
            names[1],
        )
        for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.231.0.{number}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        enter = [
            ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={link}"]
            for name, link in zip(names, links, strict=True)
        ]
        yield enter, "10.231.0.1"
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


def ip(*arguments, check=True):
    return subprocess.run([shutil.which("ip"), *arguments], capture_output=True, check=check)


@pytest.mark.slow
def test_two_hosts_train_together_until_one_is_lost_and_named(hosts, tmp_path):
    pytest.importorskip("torch")
    enter, address = hosts
    command = [
        *TORCHRUN,
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        address,
        "--master-port",
        "29555",
    ]
    script = list(map(str, [FAULTS, "SIGKILL", 1, 100, EXAMPLE, "torch", "--folder", tmp_path / "two"]))
    agents = [
        subprocess.Popen(
            [*place, *command, "--node-rank", str(rank), *script],
            env={**os.environ, **QUIET},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, place in enumerate(enter)
    ]
    (out, first), (_, second) = [agent.communicate(timeout=100) for agent in agents]
    assert time.time() - failed_at(second) < 30
    assert "ClusterError: Lost rank 1, process" in first
    assert all(agent.returncode != 0 for agent in agents)
    alone = start([sys.executable, EXAMPLE, "torch", "--epochs", "2", "--folder", tmp_path / "one"])
    losses = [
        [float(line.partition("loss ")[2].partition(",")[0]) for line in text.splitlines() if "loss" in line]
        for text in (out, alone.stdout)
    ]
    assert len(losses[0]) == 2
    np.testing.assert_allclose(*losses, rtol=1e-5)  # float32


def failing(tmp_path, code):
    script = tmp_path / "script.py"
    script.write_text(f"import isobatch, os, torch\n{code}\n", encoding="utf-8")
    return script


@pytest.mark.slow
@pytest.mark.parametrize("taken", [False, True])
def test_processes_that_do_not_meet_are_an_error(tmp_path, taken):
    pytest.importorskip("torch")
    script = failing(tmp_path, "isobatch.cluster(timeout=2)")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if taken:
            other.listen()
        port = str(other.getsockname()[1]) if taken else str(free_port())
        env = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        done = start([sys.executable, script], **env)
    assert done.returncode == 1
    assert (
        f"ClusterError: Expected 3 processes to meet at 127.0.0.1:{port} within 2 s, this one is rank 0"
        in done.stderr
    )
    assert ("address already in use" in done.stderr) == taken


@pytest.mark.slow
def test_processes_that_differ_are_an_error_before_the_first_step(tmp_path):
    pytest.importorskip("torch")
    code = """
cluster = isobatch.cluster()
for change in ("model", "torch"):
    if change == "torch" and cluster.rank: torch.__version__ = "1.0"
    model = torch.nn.Linear(4, 2 + (cluster.rank if change == "model" else 0))
    try: isobatch.data_parallel(model, devices=cluster)
    except isobatch.ClusterError as error: print(f"refused {error}\\n", end="", flush=True)
"""
    done = launch(2, failing(tmp_path, code))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused Expected every process to have the same, got") == 4
    assert (
        "weight: '(2, 4) torch.float32 trained=True' on rank 0; '(3, 4) torch.float32 trained=True' on rank 1"
        in done.stdout
    )
    assert "'1.0' on rank 1" in done.stdout


class Together:
    """A collective of processes that have said these things before."""

    def __init__(self, *others):
        self.others = others

    def exchange(self, value):
        return [value, *self.others]

    def sum(self, array):
        return array + sum(self.others)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shards_have_each_row_once(size):
    x = np.arange(20)
    for stop in (0, 1, 5, 20):
        shards = [Cluster(rank, size).shard(x[:stop]) for rank in range(size)]
        assert np.concatenate(shards).tolist() == list(range(stop))
        assert [len(Cluster(rank, size).rows(stop)) for rank in range(size)] == list(map(len, shards))


@pytest.mark.parametrize("options", [{"state": "sequential"}, {"scalars": "stack"}])
def test_options_that_processes_cannot_go_by_are_refused(options):
    with pytest.raises(ValueError, match=r"in a cluster, got '(sequential|stack)'"):
        Cluster(0, 2).check(isobatch.Options(**options))


def test_shards_of_a_dataset_are_taken_in_its_graph(program, backend):
    if backend.name != "keras":
        pytest.skip("datasets are TensorFlow's")
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((np.arange(7), {"y": np.arange(7) * 2})).batch(5)
    parts = [list(data.map(Cluster(rank, 2).shard).as_numpy_iterator()) for rank in range(2)]
    assert [[x.tolist() for x, _ in part] for part in parts] == [[[0, 1, 2], [5]], [[3, 4], [6]]]
    assert parts[1][1][1]["y"].tolist() == [12]


def test_batches_deal_every_row_once_in_an_order_of_the_epoch():
    def epoch(size, number):
        parts = [Cluster(rank, size).batches(23, 5, shuffle=True, seed=3) for rank in range(size)]
        for part in parts:
            part.epoch = number
        return [np.concatenate(step).tolist() for step in zip(*parts, strict=True)]

    assert sorted(row for step in epoch(3, 0) for row in step) == list(range(23))
    assert epoch(1, 0) == epoch(3, 0) == epoch(4, 0) != epoch(3, 1)
    batches = Cluster().batches(23, 5, shuffle=True, seed=3)
    assert [[rows.tolist() for rows in batches] for _ in range(2)] == [epoch(1, 0), epoch(1, 1)]


def test_what_differs_is_named():
    cluster = Cluster(0, 3, 0, None, Together({"keras": "'3.15'"}, {"keras": "'3.14'"}))
    with pytest.raises(ClusterError, match=r"keras: '3.15' on rank 0, 1; '3.14' on rank 2"):
        cluster.agree({"keras": "3.15"})


def test_mean_leaves_out_what_has_no_rows():
    cluster = Cluster(0, 2, 0, None, Together(np.array([3.0, 4.0])))
    assert cluster.mean(float("nan"), 0) == 0.75
    assert cluster.mean(0.5, 2) == 4 / 6


def test_file_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "model.bin"
    Cluster().save(file, lambda part: part.write_text("old"))

    def fail(part):
        part.write_text("half")
        msg = "planted"
        raise OSError(msg)

    with pytest.raises(OSError, match="planted"):
        Cluster().save(file, fail)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(ClusterError, match=r"rank 0 to write .*failed: OSError: full"):
        Cluster(1, 2, 1, None, Failed()).save(file, fail)


class Failed(Together):
    def exchange(self, value):
        return ["OSError: full", value]


@pytest.mark.parametrize(
    ("env", "match"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is None"),
        ({"WORLD_SIZE": "two", "RANK": "0", "LOCAL_RANK": "0"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}, "Expected a RANK of 0 to 1"),
    ],
)
def test_launcher_that_makes_no_sense_is_an_error(monkeypatch, env, match):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ClusterError, match=match):
        isobatch.cluster()


def test_one_process_needs_no_launcher(backend):
    model = backend.mlp()
    parallel = isobatch.data_parallel(model, devices=isobatch.cluster(["cpu:0", "cpu:1"]))
    assert len(parallel.devices) == 2
    assert len(isobatch.data_parallel(backend.mlp(), devices="cluster").devices) == 1
