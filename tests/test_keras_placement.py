"""Each replica's work, forward and backward, runs on its own device: read from the graphs that TensorFlow ran."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("keras_placement.py")
NETWORKS = {
    "dense": {"MatMul", "BiasAddGrad", "ReluGrad"},
    "convolution": {"Conv2DBackpropFilter", "DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropInput", "MaxPool", "MaxPoolGrad", "RsqrtGrad"},
    "lstm": {"MatMul", "Sigmoid", "SigmoidGrad", "Tanh", "TanhGrad", "TensorListStack"},
    "embedding": {"GatherV2", "MatMul"},
    "attention": {"Einsum", "BatchMatMulV2", "Softmax", "RsqrtGrad"},
    "gru": {"MatMul", "Sigmoid", "SigmoidGrad", "Tanh", "TanhGrad", "TensorListStack"},
}  # fmt: skip


def start(cpus, networks):
    path = [str(root) for root in sys.path if root]
    return subprocess.Popen(
        [sys.executable, PROGRAM, str(cpus), *networks],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )


@pytest.fixture(scope="module")
def traces():
    """What ran with two logical CPUs, and the control with one."""
    programs = {2: start(2, ["towers", *NETWORKS]), 1: start(1, ["dense", "convolution"])}
    found = {}
    for cpus, program in programs.items():
        out, err = program.communicate(timeout=300)
        assert program.returncode == 0, err
        found[cpus] = json.loads(out)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_every_operation_runs_on_its_replicas_device(traces, network):
    operations, _ = traces[2][network]
    assert {kind for kind, _, _ in operations} >= NETWORKS[network]
    for rank in (0, 1):
        own = [(name, device) for _, name, device in operations if f"replica_{rank}" in name]
        assert any("gradient" in name for name, _ in own), "no backward work was found"
        assert any("gradient" not in name for name, _ in own), "no forward work was found"
        assert {device.rpartition("/device:")[2] for _, device in own} == {f"CPU:{rank}"}
    assert [name for _, name, _ in operations if "replica_" not in name] == []


@pytest.mark.slow
@pytest.mark.parametrize("network", ["dense", "convolution"])
def test_control_with_one_device_is_unplaced(traces, network):
    operations, _ = traces[1][network]
    assert any("replica_1" in name for _, name, _ in operations)
    assert {device.rpartition("/device:")[2] for _, _, device in operations} == {"CPU:0"}


@pytest.mark.slow
def test_every_operation_runs_on_its_parts_device(traces):
    operations, _ = traces[2]["towers"]
    assert {kind for kind, _, _ in operations} >= {
        "MatMul",
        "BiasAddGrad",
        "SigmoidGrad",
        "TanhGrad",
        "TensorListStack",
    }
    for part, device in {"left_lstm": 0, "left_out": 0, "right_lstm": 1, "right_out": 1, "head": 0}.items():
        own = [(name, where) for _, name, where in operations if f"place_{part}_cpu{device}" in name]
        assert any("gradient" in name for name, _ in own), "no backward work was found"
        assert any("gradient" not in name for name, _ in own), "no forward work was found"
        assert {where.rpartition("/device:")[2] for _, where in own} == {f"CPU:{device}"}
    assert [name for _, name, _ in operations if "place_" not in name] == []


@pytest.mark.slow
def test_nothing_travels_but_over_the_edges_that_are_cut(traces):
    _, transfers = traces[2]["towers"]
    # Signals to wait for an operation or to go on with a loop, and the learning rate: single numbers.
    signals = re.compile("ControlEdges|merge/|loop_body_control|sgd")
    found = [(name, start, end) for name, start, end in transfers if not signals.search(name)]
    batch = [one for one in found if "IteratorGetNext" in one[0]]
    assert len(batch) == 1
    assert len(found) == 3, found
    forward, backward = sorted(
        (one for one in found if one not in batch), key=lambda one: "gradient" in one[0]
    )
    assert "right_out/" in forward[0].replace("_1/", "/")
    assert forward[1:] == ("CPU:1", "CPU:0")
    assert "concatenate" in backward[0]
    assert backward[1:] == ("CPU:0", "CPU:1")
