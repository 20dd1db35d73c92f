"""A program that tests start with torchrun, or call by itself: what comes of training goes to a file."""

import sys
from itertools import pairwise

import numpy as np
import torch
from torch import nn

import isobatch
from isobatch_torch import data_loader

X, Y = np.random.default_rng(0).standard_normal((2, 190, 4))
OWN = [[8] * 5, [5] * 3]  # rows of each step's batch in either of two processes that load their own


class Network(nn.Module):
    """With a BatchNorm that is called twice, running state of its own, and a loss among its outputs."""

    def __init__(self, norm, summed):
        super().__init__()
        self.summed = summed
        self.hidden, self.out = nn.Linear(4, 5), nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.register_buffer("level", torch.zeros(5))

    def forward(self, x):
        x = self.hidden(x)
        if self.training:
            self.level = 0.9 * self.level + 0.1 * x.detach().mean(0)
        x = self.norm(torch.tanh(self.norm(torch.stack([x, x.square()], 2)))).mean(2)
        out = self.out(x)
        return out, out.square().sum() if self.summed else out.square().mean()


class Run:
    """A parallel network, and the losses of its steps."""

    def __init__(self, cluster, *, norm=False, summed=False):
        torch.manual_seed(cluster.rank)  # rank 0's weights are everybody's
        self.cluster = cluster
        how = "sum" if summed else "mean"
        self.parallel = isobatch.data_parallel(Network(norm, summed), devices=cluster, scalars=how)
        self.optimizer = torch.optim.Adam(self.parallel.parameters(), lr=0.05)
        self.summed = summed
        self.losses = []

    def backward(self, x, y):
        out, penalty = self.parallel(torch.as_tensor(x))
        if self.summed:
            loss = nn.functional.mse_loss(out, torch.as_tensor(y), reduction="sum")
            (loss + 0.1 * penalty).backward()
            self.losses.append(self.cluster.mean(loss / max(len(x), 1), len(x)))
            return
        loss = nn.functional.mse_loss(out, torch.as_tensor(y)) + 0.1 * penalty
        loss = loss + 0.01 * self.parallel.out.weight.square().sum()
        loss.backward()
        self.losses.append(self.cluster.mean(loss, len(x)))

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, batches):
        for x, y in batches:
            self.backward(x, y)
            self.step()

    def found(self):
        state = {name: tensor.numpy().copy() for name, tensor in self.parallel.state_dict().items()}
        return {"losses": np.array(self.losses), **state}


def whole(size=21):
    """Ten batches: of 21 rows, so 11 and 10 for two processes, and at last of 1, so none for the second."""
    return [(X[start : start + size], Y[start : start + size]) for start in range(0, len(X), size)]


def own(cluster):
    """Batches that each process loads for itself, in one process those of both together."""
    stops = [np.cumsum([0, *sizes]) + 100 * rank for rank, sizes in enumerate(OWN)]
    parts = [[(X[a:b], Y[a:b]) for a, b in pairwise(s)] for s in stops]
    if cluster.size > 1:
        return list(cluster.even(parts[cluster.rank]))
    steps = [[part[i] for part in parts if i < len(part)] for i in range(5)]
    return [tuple(np.concatenate(arrays) for arrays in zip(*step, strict=True)) for step in steps]


def scenarios(cluster):
    """Yield a name and a run."""
    run = Run(cluster)
    run.train(cluster.shard(*batch) for batch in whole())
    yield "plain", run
    run = Run(cluster, norm=True)
    run.train(cluster.shard(*batch) for batch in whole())
    yield "norm", run
    run = Run(cluster, summed=True)
    run.train(cluster.shard(*batch) for batch in whole())
    yield "summed", run
    run = Run(cluster)
    no_sync = getattr(run.parallel, "no_sync", torch.enable_grad)
    for first, second in zip(whole()[::2], whole(10)[1::2], strict=False):
        with no_sync():
            run.backward(*cluster.shard(*first))
        run.backward(*cluster.shard(*second))
        run.step()
    yield "accumulated", run
    run = Run(cluster)
    loader = data_loader(
        torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y)), 27, cluster, shuffle=True
    )
    for _ in range(2):
        run.train(loader)
    yield "loaded", run
    if cluster.size <= 2:
        run = Run(cluster)
        run.train(own(cluster))
        yield "own", run


def main(where, replicas):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    cluster = isobatch.cluster(int(replicas))
    found = {f"{name}/{key}": value for name, run in scenarios(cluster) for key, value in run.found().items()}
    cluster.save(where, lambda file: np.savez(file, **found))


if __name__ == "__main__":
    main(*sys.argv[1:])
