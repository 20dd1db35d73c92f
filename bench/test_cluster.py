"""What training over two processes costs beside plain DistributedDataParallel, which carries the gradients for both."""

import math

import pytest

torch = pytest.importorskip("torch")

from torch_networks import case  # noqa: E402

NETWORKS = ("cnn", "resnet", "lstm", "transformer")


@pytest.mark.parametrize("name", NETWORKS)
def test_step_over_two_processes(contest, benchmark, peer, name):
    peers = {kind: peer("cluster_processes.py", kind, name) for kind in ("ddp", "isobatch")}
    calls = {kind: one.call("step") for kind, one in peers.items()}
    contest(f"two processes, {name}", calls, {("isobatch", "ddp"): 1.05})
    assert all(math.isfinite(call()) for call in calls.values())
    gradients = sum(p.numel() * p.element_size() for p in case(name)[0].parameters())
    sent = {kind: one.call("bytes")() for kind, one in peers.items()}
    assert sent["ddp"] > gradients  # two processes: each sends all of its gradients
    benchmark.extra_info["numbers"] = [
        ["bytes of gradients", gradients, "", None],
        *[[f"{kind}: bytes on the wire, a step, of both", count, "", None] for kind, count in sent.items()],
        ["isobatch sends more", sent["isobatch"] - sent["ddp"], "bytes", None],
    ]
