"""Two sequences, one shared LSTM: encode each on a device of its own, join them on the CPU, classify. In either framework.

    python examples/two_sequences.py keras
    python examples/two_sequences.py torch

The guide to the Keras functional API once showed it with `tf.device` around the layers; in Keras 3 that places nothing. Here the
placement says what runs where. One layer that is called twice is one part, so that the model has two names for it: two small
models that share the LSTM. On a machine with two accelerators put `gpu:0` and `gpu:1` in the placement.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

import isobatch

STEPS, WORDS, UNITS, ROWS = 28, 16, 32, 256
PLACEMENT = {"first": "cpu:0", "second": "cpu:1", "classify": "cpu:0"}


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs of sequences; the question is whether both have the same sign on average."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((ROWS, STEPS, WORDS)).astype("float32") for _ in range(2))
    shift = rng.choice([-0.5, 0.5], (2, ROWS, 1, 1)).astype("float32")
    return a + shift[0], b + shift[1], (shift[0] == shift[1])[:, 0].astype("float32")


def train_keras() -> tuple[float, float]:
    """Return the loss before and after training."""
    isobatch.virtual_devices(2)
    import keras

    keras.utils.set_random_seed(0)
    shared = keras.layers.LSTM(UNITS)

    def encoder(name: str) -> keras.Model:
        sequence = keras.Input((STEPS, WORDS))
        return keras.Model(sequence, shared(sequence), name=name)

    a, b = keras.Input((STEPS, WORDS), name="a"), keras.Input((STEPS, WORDS), name="b")
    joined = keras.layers.Concatenate()([encoder("first")(a), encoder("second")(b)])
    hidden = keras.layers.Dense(UNITS, activation="tanh", name="classify")(joined)
    model = keras.Model([a, b], keras.layers.Dense(1, activation="sigmoid")(hidden))

    placed = isobatch.device_parallel(model, PLACEMENT)
    placed.compile("adam", "binary_crossentropy")
    left, right, same = data()
    before = placed.evaluate([left, right], same, verbose=0)
    placed.fit([left, right], same, batch_size=32, epochs=8, verbose=0)
    return float(before), float(placed.evaluate([left, right], same, verbose=0))


def train_torch() -> tuple[float, float]:
    """Return the loss before and after training."""
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self, shared: nn.LSTM) -> None:
            super().__init__()
            self.lstm = shared

        def forward(self, sequence: torch.Tensor) -> torch.Tensor:
            return self.lstm(sequence)[0][:, -1]

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.LSTM(WORDS, UNITS, batch_first=True)
            self.first, self.second = Encoder(shared), Encoder(shared)
            self.classify = nn.Sequential(nn.Linear(2 * UNITS, UNITS), nn.Tanh(), nn.Linear(UNITS, 1))

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.classify(torch.cat([self.first(a), self.second(b)], dim=1))

    placed = isobatch.device_parallel(Pair(), PLACEMENT)
    optimizer = torch.optim.Adam(placed.parameters(), 1e-2)
    left, right, same = map(torch.tensor, data())
    loss_of = nn.BCEWithLogitsLoss()
    losses = []
    for _ in range(8):
        for rows in torch.arange(ROWS).split(32):
            loss = loss_of(placed(left[rows], right[rows]), same[rows])
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses[0], losses[-1]


if __name__ == "__main__":
    before, after = {"keras": train_keras, "torch": train_torch}[
        sys.argv[1] if len(sys.argv) > 1 else "keras"
    ]()
    sys.stdout.write(f"loss before {before:.3f}, after {after:.3f}\n")
