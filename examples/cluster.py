"""Train a small network on handwritten digits over all processes of a launcher, in Keras or in torch; go on where it stopped.

    python examples/cluster.py torch                                 # one process
    torchrun --nproc-per-node 2 --max-restarts 3 examples/cluster.py keras

Every epoch is written to a file, whole or not at all. Started again, by hand or by the launcher, the script goes on from there and
takes the steps it would have taken.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import isobatch
from isobatch.digits import load_digits

BATCH = 100  # rows of all processes together; the last batch of an epoch has 38


class Keras:
    """The network and its optimizer in Keras; the file is the model's own."""

    suffix = ".keras"

    def __init__(self, cluster: isobatch.Cluster, file: Path | None) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import keras

        if file is not None:
            self.model = isobatch.load(file, devices=cluster)
            return
        keras.utils.set_random_seed(0)
        layers = [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        self.model = isobatch.data_parallel(keras.Sequential(layers), devices=cluster)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(keras.optimizers.Adam(1e-3), loss)

    def step(self, x: Any, y: Any) -> float:
        return float(self.model.train_on_batch(x, y))

    def predict(self, x: Any) -> Any:
        return self.model.predict(x, verbose=0)

    def save(self, file: Path) -> None:
        self.model.save(file)


class Torch:
    """The network and its optimizer in torch."""

    suffix = ".pt"

    def __init__(self, cluster: isobatch.Cluster, file: Path | None) -> None:
        import torch
        from torch import nn

        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.cluster = cluster
        self.model: Any = isobatch.data_parallel(network, devices=cluster)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        if file is not None:
            found = torch.load(file)
            self.model.load_state_dict(found["model"])
            self.optimizer.load_state_dict(found["optimizer"])

    def step(self, x: Any, y: Any) -> float:
        import torch

        self.model.train()
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(torch.tensor(x)), torch.tensor(y))
        loss.backward()
        self.optimizer.step()
        return float(self.cluster.mean(loss, len(x)))

    def predict(self, x: Any) -> Any:
        import torch

        with torch.inference_mode():
            return self.model.eval()(torch.tensor(x)).numpy()

    def save(self, file: Path) -> None:
        import torch

        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)


def main() -> None:
    """Train, from the last file on if there is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("framework", choices=["keras", "torch"])
    parser.add_argument(
        "--folder", type=Path, default=Path("run"), help="where files go; all processes must see it"
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--replicas", type=int, help="in each process; without it one, on its own GPU if there is any"
    )
    args = parser.parse_args()

    cluster = isobatch.cluster(args.replicas)
    digits = load_digits()
    x, test = (images.reshape(len(images), -1) for images in (digits.train, digits.test))
    args.folder.mkdir(parents=True, exist_ok=True)
    kind = {"keras": Keras, "torch": Torch}[args.framework]
    files = [args.folder / f"epoch-{epoch}{kind.suffix}" for epoch in range(args.epochs + 1)]
    done = max((epoch for epoch, file in enumerate(files) if file.exists()), default=0)
    run = kind(cluster, files[done] if done else None)

    batches = cluster.batches(len(x), BATCH, shuffle=True)
    batches.epoch = done
    for epoch in range(done + 1, args.epochs + 1):
        losses = [run.step(x[rows], digits.train_labels[rows]) for rows in batches]
        cluster.save(files[epoch], run.save)
        hits = cluster.shard(run.predict(test).argmax(1) == digits.test_labels)
        accuracy = cluster.mean(hits.mean(), len(hits))
        if cluster.rank == 0:
            print(
                f"epoch {epoch} of {args.epochs} over {cluster.size}: loss {losses[-1]:.12f}, accuracy {accuracy:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
