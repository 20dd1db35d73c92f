"""What torch modules take and return: packed sequences, nested and sparse tensors, hidden states, structured outputs."""

import dataclasses
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.utils.rnn import (  # noqa: E402
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)

from isobatch import Broadcast, LeafTypeError, Options, Rows, StructureError  # noqa: E402
from isobatch_torch import DataParallel, gather, scatter  # noqa: E402

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def doubles():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Calls(nn.Module):
    """A module made of a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def through(function, *args, replicas=2, options=None, **kwargs):
    return DataParallel(Calls(function), replicas, options=options)(*args, **kwargs)


# Packed sequences.


def sequences(lengths):
    return [torch.randn(length, 3) for length in lengths]


@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_packed_sequences_are_split_by_sequence(replicas, enforce_sorted):
    lengths = [5, 4, 4, 2, 1] if enforce_sorted else [2, 5, 1, 4, 4]
    packed = pack_sequence(sequences(lengths), enforce_sorted=enforce_sorted)
    lstm = nn.LSTM(3, 4, 2, bidirectional=True)
    parallel = DataParallel(lstm, replicas, options=Options(output_axis={1: 1}))
    for _ in range(2):
        ours, (h, c) = parallel(packed)
        theirs, (h2, c2) = lstm(packed)
        assert isinstance(ours, PackedSequence)
        torch.testing.assert_close(ours.data, theirs.data, **CLOSE)
        assert torch.equal(ours.batch_sizes, theirs.batch_sizes)
        for mine, other in ((ours.sorted_indices, theirs.sorted_indices), (h, h2), (c, c2)):
            torch.testing.assert_close(mine, other, **CLOSE) if mine is not None else None
        torch.testing.assert_close(
            pad_packed_sequence(ours, batch_first=True),
            pad_packed_sequence(theirs, batch_first=True),
            **CLOSE,
        )


def test_packed_sequences_with_an_array_beside_them_and_their_gradients():
    padded = torch.randn(4, 5, 3, requires_grad=True)
    packed = pack_padded_sequence(padded, torch.tensor([5, 2, 4, 1]), batch_first=True, enforce_sorted=False)
    bias = torch.randn(4, 3)

    def function(packed, bias):
        padded, _ = pad_packed_sequence(packed, batch_first=True, total_length=5)
        return (padded + bias[:, None]).sin()

    ours, theirs = through(function, packed, bias, replicas=3), function(packed, bias)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    ours, theirs = (
        torch.autograd.grad(out.square().sum(), padded, retain_graph=True)[0] for out in (ours, theirs)
    )
    torch.testing.assert_close(ours, theirs, **CLOSE)
    with pytest.raises(ValueError, match=r"args\[0\]: 4 rows.*(?s:.)*args\[1\]: 3 rows"):
        through(function, packed, bias[:3])


def test_a_shard_padded_to_its_own_longest_is_told_what_to_do():
    packed = pack_sequence(sequences([5, 2, 2, 1]))
    with pytest.raises(StructureError, match=r"total_length"):
        through(lambda packed: pad_packed_sequence(packed, batch_first=True)[0], packed)


# Other tensors.


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(layout):
    rows = sequences([2, 5, 1, 4, 4])
    nested = torch.nested.nested_tensor(rows, layout=layout)
    out = through(lambda nested: nested * 2, nested, replicas=3)
    assert out.is_nested
    assert out.layout == layout
    for mine, row in zip(out.unbind(), rows, strict=True):
        assert torch.equal(mine, row * 2)


@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse_coo, torch.Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors(convert):
    dense = torch.randn(5, 4) * (torch.rand(5, 4) > 0.5)
    layer = torch.randn(4, 2)
    torch.testing.assert_close(
        through(lambda x: torch.sparse.mm(x, layer), convert(dense)), dense @ layer, **CLOSE
    )
    out = through(lambda x: x * 2, convert(dense).to_sparse_coo())
    assert torch.equal(out.to_dense(), dense * 2)


def test_numpy_arrays_stay_numpy_arrays():
    out = through(lambda x: (x + 1, np.float64(2.0), x.sum()), np.arange(5.0))
    assert isinstance(out[0], np.ndarray)
    assert out[0].tolist() == [1, 2, 3, 4, 5]


def test_memory_format_is_kept():
    x = torch.randn(5, 3, 4, 4).to(memory_format=torch.channels_last)
    seen = []

    def function(x):
        seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return x * 2

    assert through(function, x).is_contiguous(memory_format=torch.channels_last)
    assert all(seen)


def test_one_replica_gets_the_very_tensor():
    x = torch.randn(3, 2)
    assert through(lambda x: x, x, replicas=1) is x
    assert scatter(x, 1)[0] is x


def test_edits_in_place_reach_the_caller_as_they_do_from_the_module():
    x = torch.zeros(5, 2)
    out = through(lambda x: x.add_(1), x, replicas=3)
    assert torch.equal(x, torch.ones(5, 2))
    assert torch.equal(out, x)


@pytest.mark.parametrize(
    "function", [torch.relu_, lambda x: x.mul_(2).sin(), lambda x: x.sigmoid_().square()]
)
def test_an_edit_in_place_does_not_spoil_the_gradients_of_other_replicas(function):
    weight = torch.randn(3, requires_grad=True)
    start = torch.randn(5, 3)
    x = start.clone().requires_grad_()
    wanted = [x, weight]
    theirs = torch.autograd.grad((function(x * weight) * weight).square().sum(), wanted)
    for replicas in (2, 3):
        ours = torch.autograd.grad(
            (through(function, x * weight, replicas=replicas) * weight).square().sum(), wanted
        )
        torch.testing.assert_close(ours, theirs, **CLOSE)
    data = start.clone()
    loss = through(lambda x: (function(x) * weight).square().sum(1), data, replicas=3).sum()
    other = (function(start.clone()) * weight).square().sum()
    torch.testing.assert_close(torch.autograd.grad(loss, weight), torch.autograd.grad(other, weight), **CLOSE)


# Batch axes.


def test_hidden_states_have_their_batch_axis_elsewhere():
    gru = nn.GRU(3, 4, 2)
    x, hidden = torch.randn(6, 5, 3), torch.randn(2, 5, 4)
    ours = DataParallel(gru, 2, dim=1)(x, hidden)
    torch.testing.assert_close(ours, gru(x, hidden), **CLOSE)
    first = nn.GRU(3, 4, 2, batch_first=True)
    for options in (Options(axis={"hx": 1}, output_axis={1: 1}), Options(axis={1: 1}, output_axis={1: 1})):
        ours = DataParallel(first, 3, options=options)(x.transpose(0, 1), hidden)
        torch.testing.assert_close(ours, first(x.transpose(0, 1), hidden), **CLOSE)
    with pytest.raises(StructureError, match="output_axis"):
        DataParallel(first, 3, options=Options(axis={"hx": 1}))(x.transpose(0, 1), hidden)


def test_tables_masks_and_labels():
    table, names = torch.randn(7, 2), ["a", "b", "c", "d", "e"]

    def function(x, table, scale, labels):
        return x @ table.T * scale, list(labels), {"mean": x.mean()}, Broadcast(table.sum(0))

    x = torch.randn(5, 2)
    options = Options(broadcast=("table",))
    out = DataParallel(Table(function), 2, options=options)(x, table, torch.tensor(2.0), Rows(names))
    torch.testing.assert_close(out[0], x @ table.T * 2, **CLOSE)
    assert out[1] == names
    torch.testing.assert_close(out[2]["mean"], x.mean(), **CLOSE)
    torch.testing.assert_close(out[3], table.sum(0), **CLOSE)
    with pytest.raises(ValueError, match=r"args\[1\]: 7 rows.*(?s:.)*Broadcast"):
        through(function, x, table, torch.tensor(2.0), Rows(names))


class Table(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, table, scale, labels):
        return self.function(x, table, scale, labels)


# Structured outputs.


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    name: str = "text"


@dataclasses.dataclass
class Hybrid(OrderedDict):
    """Mapping and dataclass in one, as transformers' outputs are."""

    logits: Any = None
    states: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


def test_dataclasses_in_and_out():
    x = torch.randn(5, 2)
    out = through(lambda given: Output(given.logits * 2, given.logits.mean()), Output(x))
    assert type(out) is Output
    torch.testing.assert_close((out.logits, out.loss), (x * 2, x.mean()), **CLOSE)
    assert out.name == "text"
    out = through(lambda x: Hybrid(logits=x, states=(x, x + 1)), x)
    assert type(out) is Hybrid
    assert out["logits"] is out.logits
    assert torch.equal(out["states"][1], x + 1)


def test_plain_values_and_mappings():
    out = through(
        lambda x: (None, 3, 2.5, "s", True, float("nan"), defaultdict(list, a=x), range(3), b"x"),
        torch.ones(4),
    )
    assert out[:5] == (None, 3, 2.5, "s", True)
    assert out[5] != out[5]
    assert type(out[6]) is defaultdict
    assert out[6].default_factory is list
    assert out[7:] == (range(3), b"x")


def test_integers_must_agree_and_sums_are_said():
    def count(x):
        return (x > 0).sum()

    x = torch.tensor([1.0, -1.0, 1.0, 1.0])
    with pytest.raises(StructureError, match="scalars='sum'"):
        through(count, x)
    assert through(count, x, options=Options(scalars="sum")) == 3
    assert through(count, x, options=Options(scalars="stack")).tolist() == [1, 2]
    assert through(lambda _: torch.tensor(7), x) == 7


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_generator_is_refused(replicas):
    with pytest.raises(TypeError, match="output"):
        through(lambda x: (row for row in x), torch.ones(4), replicas=replicas)
    with pytest.raises(LeafTypeError, match=r"args\[0\]"):
        through(lambda x: x, iter([1]), replicas=replicas)


def test_outputs_that_differ_are_named():
    def uneven(x):
        return {"a": x} if x[0] == 0 else {"a": x, "b": x}

    with pytest.raises(StructureError, match=r"replica 0 \(2 rows\)(?s:.)*replica 1 \(1 rows\)"):
        through(uneven, torch.tensor([0.0, 0.0, 1.0]))
    with pytest.raises(StructureError, match=r"output\['x'\]"):
        through(lambda x: {"x": None if x[0] else x}, torch.tensor([0.0, 1.0]))
    with pytest.raises(StructureError, match="of the same type"):
        through(lambda x: x.int() if x[0] else x, torch.tensor([0.0, 1.0]))


def test_half_precision_means_and_complex_scalars():
    out = through(lambda x: x.mean(), torch.full((5, 3), 60000.0, dtype=torch.float16))
    assert out.dtype == torch.float16
    assert out == 60000
    z = torch.randn(5, dtype=torch.complex128)
    torch.testing.assert_close(through(lambda z: z.mean(), z), z.mean(), **CLOSE)
    assert torch.equal(gather([torch.tensor(1), torch.tensor(2)], "cpu"), torch.tensor([1, 2]))
