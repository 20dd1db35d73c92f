"""Each replica's work, forward and backward, runs on its own device: read from the graphs that TensorFlow ran."""

import json
import os
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
    programs = {2: start(2, NETWORKS), 1: start(1, ["dense", "convolution"])}
    found = {}
    for cpus, program in programs.items():
        out, err = program.communicate(timeout=300)
        assert program.returncode == 0, err
        found[cpus] = json.loads(out)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_every_operation_runs_on_its_replicas_device(traces, network):
    operations = traces[2][network]
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
    operations = traces[1][network]
    assert any("replica_1" in name for _, name, _ in operations)
    assert {device.rpartition("/device:")[2] for _, _, device in operations} == {"CPU:0"}
