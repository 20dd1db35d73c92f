"""Several processes of one launcher, on loopback and across network namespaces: one batch, the numbers of one process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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
    assert_same(
        {key: value for key, value in found.items() if not key.startswith("norm/")}, alone(program, 1)
    )
