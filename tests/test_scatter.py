"""Contract lines 1 to 4 on the shared code; `test_contract_*.py` hold them for both frameworks."""

import collections
from typing import NamedTuple

import numpy as np
import pytest
from numpy_backend import NUMPY

from isobatch import BatchSizeError, Broadcast, Device, LeafTypeError, Options, Rows

DEVICES = [Device("cpu", rank) for rank in range(4)]
X = np.arange(14.0).reshape(7, 2)


def scatter(*args, options=None, sizes=None, names=(), **kwargs):
    return NUMPY.scatter(args, DEVICES, kwargs=kwargs, options=options, sizes=sizes, names=names)


def test_shards_are_contiguous_in_order_and_know_where_they_are():
    shards = scatter(X)
    assert [shard.args[0].tolist() for shard in shards] == [
        X[:2].tolist(),
        X[2:4].tolist(),
        X[4:6].tolist(),
        X[6:].tolist(),
    ]
    assert [(s.rank, s.device, s.rows, s.total) for s in shards][1] == (1, Device("cpu", 1), range(2, 4), 7)
    assert str(shards[1]) == "replica 1 on cpu:1, rows 2..3"


@pytest.mark.parametrize("batch", range(1, 10))
def test_no_replica_gets_zero_rows(batch):
    shards = scatter(np.zeros((batch, 2)))
    assert [shard.rank for shard in shards] == list(range(min(batch, 4)))
    assert sum(len(shard.rows) for shard in shards) == batch


def test_keras_policy_leaves_out_the_replicas_without_rows():
    shards = scatter(X[:3], options=Options(policy="keras"))
    assert [(shard.rank, len(shard.rows)) for shard in shards] == [(3, 3)]


def test_no_rows_at_all_is_one_shard_of_none():
    (shard,) = scatter(X[:0], mask=X[:0, 0])
    assert shard.rows == range(0)
    assert shard.args[0].shape == (0, 2)
    assert str(shard) == "replica 0 on cpu:0, no rows"


def test_nothing_to_split_is_one_shard_of_all():
    (shard,) = scatter("text", flag=True, number=np.float32(3))
    assert shard.rows is None
    assert (shard.args, shard.kwargs) == (("text",), {"flag": True, "number": np.float32(3)})


def test_scalars_and_other_values_go_to_all():
    marker = object()
    for shard in scatter(X, 2.5, None, "name", marker, np.float64(1), table={"k": (np.array(3),)}):
        assert shard.args[1:4] == (2.5, None, "name")
        assert shard.args[4] is marker
        assert shard.kwargs["table"]["k"][0] == 3


def test_marks_and_names_decide_what_is_not_split():
    table = np.zeros((3, 9))
    names = ["a", "b", "c", "d", "e", "f", "g"]
    shards = scatter(
        X,
        Broadcast(table),
        Rows(names),
        Rows(tuple(names)),
        Rows("abcdefg"),
        kwtable=table,
        options=Options(broadcast=("kwtable",)),
    )
    assert [shard.args[2] for shard in shards] == [["a", "b"], ["c", "d"], ["e", "f"], ["g"]]
    assert shards[3].args[3] == ("g",)
    assert shards[0].args[4] == "ab"
    for shard in shards:
        assert shard.args[1] is table
        assert shard.kwargs["kwtable"] is table


def test_broadcast_by_parameter_name_position_and_key():
    table = np.zeros((3, 9))
    for options, call, names in (
        (Options(broadcast=("table",)), (X, table), ("x", "table")),
        (Options(broadcast=("table",)), ({"x": X, "table": table},), ()),
        (Options(broadcast=("table",)), ({"x": X, "table": [table]},), ("inputs",)),
    ):
        shards = scatter(*call, options=options, names=names)
        assert len(shards) == 4


def test_the_batch_axis_can_be_set_for_all_or_by_argument():
    hidden = np.zeros((2, 7, 5))
    shards = scatter(X, hidden=hidden, options=Options(axis={"hidden": 1}))
    assert [shard.kwargs["hidden"].shape for shard in shards] == [(2, 2, 5)] * 3 + [(2, 1, 5)]
    shards = scatter(hidden, options=Options(axis=1))
    assert [shard.args[0].shape[1] for shard in shards] == [2, 2, 2, 1]
    assert [shard.args[0].shape for shard in scatter(X, options=Options(axis=-1))] == [(7, 1)] * 2
    shards = scatter(X, hidden, options=Options(axis={1: 1}))
    assert shards[0].args[1].shape == (2, 2, 5)


def test_explicit_sizes_and_weights():
    assert [len(shard.rows) for shard in scatter(X, sizes=[1, 0, 5, 1])] == [1, 5, 1]
    assert [shard.rank for shard in scatter(X, sizes=[1, 0, 5, 1])] == [0, 2, 3]
    assert [len(s.rows) for s in scatter(X[:6], options=Options(policy=(3, 1, 1, 1)))] == [3, 1, 1, 1]


def test_containers_keep_their_type_inside_a_shard():
    class Point(NamedTuple):
        x: object
        y: object

    tree = collections.OrderedDict(p=Point(X, [X]), n=None)
    shard = scatter(tree)[3]
    assert type(shard.args[0]) is collections.OrderedDict
    assert type(shard.args[0]["p"]) is Point
    assert shard.args[0]["p"].y[0].tolist() == X[6:].tolist()
    assert tree["p"].x is X


def test_disagreeing_batch_sizes_name_every_leaf_and_the_cure():
    with pytest.raises(BatchSizeError) as caught:
        scatter(X, [X, X[:5]], mask=X[:1])
    text = str(caught.value)
    for part in (
        "args[0]: 7 rows, shape (7, 2)",
        "args[1][1]: 5 rows, shape (5, 2)",
        "kwargs['mask']: 1 rows, shape (1, 2)",
        "Broadcast",
    ):
        assert part in text


def test_an_axis_that_is_not_there_is_named():
    with pytest.raises(BatchSizeError, match=r"args\[0\]: no axis 3, shape \(7, 2\)"):
        scatter(X, options=Options(axis=3))


def test_rows_of_another_length_count_as_rows():
    with pytest.raises(BatchSizeError, match=r"kwargs\['labels'\]: 3 rows"):
        scatter(X, labels=Rows(["a", "b", "c"]))


def test_an_iterator_cannot_be_shared_by_accident():
    with pytest.raises(LeafTypeError, match=r"generator object .* at kwargs\['more'\]"):
        scatter(X, more=(i for i in range(3)))
    shards = scatter(X, more=Broadcast(iter([1])))
    assert shards[0].kwargs["more"] is shards[1].kwargs["more"]


def test_options_are_checked():
    for options, message in (
        (Options(policy="fair"), "got 'fair'"),
        (Options(scalars="max"), "scalars to be one of .*got 'max'"),
        (Options(state="none"), "state to be one of .*got 'none'"),
        (Options(broadcast="table"), r"broadcast=\('table',\)"),
    ):
        with pytest.raises(ValueError, match=message):
            options.check(2)


def test_the_most_particular_name_decides_the_axis():
    state = {"hidden": np.zeros((2, 7, 5)), "rows": np.zeros((7, 5))}
    (first, *_) = scatter(state, options=Options(axis={"hidden": 1, "state": 0, 0: 2}), names=("state",))
    assert first.args[0]["hidden"].shape == (2, 2, 5)
    assert first.args[0]["rows"].shape == (2, 5)
