"""The networks that the torch benches time, with a batch for each; as a program, DistributedDataParallel with gloo on the same work."""

import json
import os
import sys
import tempfile

import torch
from torch import nn

from isobatch.timing import keep_memory


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 64, 2, batch_first=True)
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def cnn():
    body = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(512, 4))


def resnet():
    body = [Residual(32) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 32, 3), *body, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 4))


def transformer(dropout=0.0):
    layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=dropout, batch_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(1024, 4)
    )


def mlp():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))


def xception():
    """The one of keras.applications, as its torch twin."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import isobatch

    isobatch.virtual_devices(2)  # other benches of this process want them
    import keras

    keras.utils.set_random_seed(0)
    shape = CASES["xception"][1][1:]
    return isobatch.twin(
        keras.applications.Xception(weights=None, input_shape=shape, classes=4, classifier_activation=None)
    )


CASES = {
    "cnn": (cnn, (64, 3, 24, 24)),
    "resnet": (resnet, (32, 3, 24, 24)),
    "lstm": (Recurrent, (64, 32, 32)),
    "transformer": (transformer, (64, 32, 32)),
    "transformer-dropout": (lambda: transformer(0.1), (64, 32, 32)),
    "mlp": (mlp, (256, 32)),
    "xception": (xception, (8, 96, 96, 3)),
}


def case(name):
    """A network, its inputs and its targets."""
    build, shape = CASES[name]
    torch.manual_seed(0)
    return build(), torch.randn(*shape), torch.randint(4, shape[:1])


def stepper(model, x, y):
    """A training step that returns its loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def process(rank, name, folder):
    """One of two processes: the first takes a step when it is told to, the other one with it."""
    keep_memory()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    net, x, y = case(name)
    step = stepper(nn.parallel.DistributedDataParallel(net), x.chunk(2)[rank], y.chunk(2)[rank])
    word = torch.zeros(1)
    while True:
        line = "" if rank else sys.stdin.readline()
        word.fill_(bool(line))
        torch.distributed.broadcast(word, 0)
        if not word.item():
            break
        loss = step()
        if rank == 0:
            sys.stdout.write(json.dumps("ready" if line == "hello\n" else loss) + "\n")
            sys.stdout.flush()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as meeting_place:
        other = os.fork()
        process(0 if other else 1, sys.argv[1], meeting_place)
        if not other:
            os._exit(0)
        os.waitpid(other, 0)
