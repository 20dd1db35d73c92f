"""Placed modules: what only torch has, such as tied weights, hooks, other methods and the generator's order."""

import copy
import pickle

import pytest
import torch
from kits import numbers
from torch import nn

from isobatch import ModelError, device_parallel
from isobatch_torch import DataParallel, DeviceParallel
from isobatch_torch.stages import Together


class Coder(nn.Module):
    """Tied embedding and output weights, two towers, dropout, batch statistics."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.towers = nn.ModuleDict(
            {
                "a": nn.LSTM(5, 5, batch_first=True),
                "b": nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(6), nn.Dropout(0.4)),
            }
        )
        self.out = nn.Linear(5, 9, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        sequence, (last, _) = self.towers["a"](x)
        return {"scores": self.out(sequence + self.towers["b"](x)), "last": last}

    def encode(self, tokens):
        return self.towers["a"](self.embed(tokens))[0]


PLACEMENT = {"embed": "cpu:0", "towers.a": "cpu:1", "towers.b.*": "cpu:2", "out": "cpu:3"}
TOKENS = torch.tensor(numbers(7, 6)).abs().mul(3).long()


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Coder()


def trained(module, steps=20):
    torch.manual_seed(5)
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        output = module(TOKENS[: 7 - step % 2])
        (output["scores"].square().mean() + output["last"].sum()).backward()
        optimizer.step()
    return list(module.state_dict().items())


def assert_equal(found, expected):
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True))


def test_twenty_steps_with_dropout_and_running_state_are_those_of_the_unplaced_module(model):
    placed = device_parallel(copy.deepcopy(model), PLACEMENT)
    assert_equal(trained(placed), trained(model))
    assert placed.out.weight is placed.embed.weight  # tied weights stay tied


def test_it_is_the_module_to_its_user(model):
    placed = DeviceParallel(model, PLACEMENT)
    assert placed.embed is model.embed
    assert torch.equal(placed.call_method("encode", TOKENS), model.encode(TOKENS))
    assert placed.eval().module.training is False
    assert "cpu:2" in repr(placed)
    again = pickle.loads(pickle.dumps(copy.deepcopy(placed)))  # noqa: S301 - written here
    assert dict(again.placement) == dict(placed.placement)
    assert torch.equal(again(TOKENS)["scores"], model(TOKENS)["scores"])
    model.load_state_dict(again.state_dict())


def test_each_part_is_entered_on_its_device_once_a_call(model, monkeypatch):
    from isobatch_torch import stages

    entered = []

    def current(device):
        entered.append(str(device))
        return before(device)

    before = stages.current
    monkeypatch.setattr(stages, "current", current)
    device_parallel(model, PLACEMENT)(TOKENS)
    assert entered == ["cpu:0", "cpu:1", "cpu:2", "cpu:2", "cpu:2", "cpu:3"]


def test_each_tensor_is_sent_to_a_device_once(monkeypatch):
    """The way of a machine with accelerators, with a stand-in for one and for sending."""
    from isobatch_torch import stages

    sent = []
    monkeypatch.setattr(stages, "KIND", "meta")
    monkeypatch.setattr(
        stages, "memory", lambda device: torch.device("meta") if device.index else torch.device("cpu")
    )

    def send(tensor, place):
        sent.append(place.type)
        return tensor.to(place)

    monkeypatch.setattr(stages, "send", send)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            x = self.stem(x)
            return self.left(x) + self.right(x) + self.left(x)

    placed = DeviceParallel(Two(), {"stem": "cpu:0", "left": "cpu:1", "right": "cpu:1"})
    assert placed.left.weight.is_meta
    assert not placed.stem.weight.is_meta
    assert placed(torch.ones(2, 3)).is_meta
    assert sent == ["meta"]  # three uses, one edge cut


def test_tensors_come_together_where_torch_wants_them():
    here, there = torch.ones(2, 2), torch.ones(2, 2, device="meta")
    weight = nn.Parameter(torch.ones(2, 2))
    with Together(torch.device("meta")):
        assert torch.mm(there, weight).is_meta  # a weight comes to the activation
        assert torch.add(here, there).is_meta  # activations go to the output device
        with pytest.raises(RuntimeError, match="shape"):
            torch.mm(here, torch.ones(3, 2))


def test_hooks_compiled_templates_and_other_threads(model):
    seen = []
    model.out.register_forward_hook(lambda _module, _args, output: seen.append(output.shape))
    model.embed.register_forward_pre_hook(lambda _module, args: seen.append(args[0].shape))
    device_parallel(model, PLACEMENT)(TOKENS)
    assert seen == [(7, 6), (7, 6, 9)]
    assert all("forward" not in vars(part) for part in model.modules())


def test_parts_can_be_replaced_between_calls(model):
    placed = device_parallel(model, PLACEMENT)
    placed.eval()(TOKENS)
    placed.module.out = nn.Linear(5, 2)
    assert placed(TOKENS)["scores"].shape == (7, 6, 2)


def test_wrappers_do_not_nest_and_say_what_to_do(model):
    with pytest.raises(ModelError, match="data_parallel"):
        device_parallel(DataParallel(model, 2), PLACEMENT)
    with pytest.raises(ModelError, match=r"\.module"):
        DataParallel(device_parallel(model, PLACEMENT), 2)


def test_auto_sees_what_depends_on_what_through_code_between_parts(model):
    from isobatch_torch.survey import survey

    parts = {part.name: set(part.after) for part in survey(model, TOKENS, "memory")}
    assert parts == {
        "embed": set(),
        "towers.a": {"embed"},
        "towers.b.0": {"embed"},
        "towers.b.1": {"towers.b.0"},
        "towers.b.2": {"towers.b.1"},
        "out": {"towers.a", "towers.b.2"},
    }
    assert model.training
    placed = device_parallel(model, "auto", 2, example=TOKENS)
    assert torch.equal(placed.eval()(TOKENS)["scores"], model(TOKENS)["scores"])


def test_auto_needs_an_example(model):
    with pytest.raises(ModelError, match="example="):
        device_parallel(model, "auto", 2)
