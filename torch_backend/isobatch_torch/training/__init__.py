"""Keras's training in torch: optimizers, schedules, losses and metrics with Keras's meaning, as ordinary torch objects."""

from isobatch_torch.training.optimizer import KerasOptimizer
from isobatch_torch.training.optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Ftrl,
    Lion,
    Nadam,
    RMSprop,
)
from isobatch_torch.training.scaling import LossScaler
from isobatch_torch.training.schedules import KerasSchedule
from isobatch_torch.training.side import TorchSide, predict
from isobatch_torch.training.twin import TrainingTwin, from_recipe, read_state, write_state

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "KerasOptimizer",
    "KerasSchedule",
    "Lion",
    "LossScaler",
    "Nadam",
    "RMSprop",
    "TorchSide",
    "TrainingTwin",
    "from_recipe",
    "predict",
    "read_state",
    "write_state",
]
