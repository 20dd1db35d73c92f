"""A program: two processes train one network, by plain DistributedDataParallel or by isobatch over it, a step whenever it is told to.

Usage: python cluster_processes.py ddp|isobatch NETWORK; words on standard input, JSON on standard output.
"""

import json
import os
import socket
import sys
from pathlib import Path

import torch
from torch import nn
from torch_networks import case, stepper

import isobatch
from isobatch.timing import keep_memory

STEPS = 20


def wire():
    """Bytes that this machine has sent to itself."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    numbers = next(line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(numbers[8])


def serve(kind, name):
    keep_memory()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    net, x, y = case(name)
    cluster = isobatch.cluster()
    if kind == "ddp":
        torch.distributed.init_process_group("gloo") if not torch.distributed.is_initialized() else None
        model = nn.parallel.DistributedDataParallel(net)
    else:
        model = isobatch.data_parallel(net, devices=cluster)
    step = stepper(model, x.chunk(2)[rank], y.chunk(2)[rank])
    word = torch.zeros(1)
    while True:
        line = "" if rank else sys.stdin.readline().strip()
        word.fill_({"": 0, "bytes": STEPS}.get(line, 1))
        torch.distributed.broadcast(word, 0)
        if not word.item():
            break
        before = wire()
        losses = [step() for _ in range(int(word.item()))]
        if rank == 0:
            answer = {"hello": "ready", "bytes": (wire() - before) / STEPS}.get(line, losses[-1])
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    other = os.fork()
    os.environ.update(
        RANK="0" if other else "1",
        LOCAL_RANK="0" if other else "1",
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    serve(*sys.argv[1:])
    if not other:
        os._exit(0)
    os.waitpid(other, 0)
