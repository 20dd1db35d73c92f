"""Contract line 5 on the shared code; `test_contract_*.py` hold it for both frameworks."""

import collections
import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
from numpy_backend import NUMPY

from isobatch import Broadcast, Device, LeafTypeError, Options, Result, Rows, Shard, StructureError

CPU = Device("cpu")


def gather(*outputs, sizes=None, **options):
    sizes = sizes or [len(output) if isinstance(output, np.ndarray) else 2 for output in outputs]
    stops = np.cumsum([0, *sizes])
    shards = [
        Shard(rank, CPU, range(int(stops[rank]), int(stops[rank + 1])), int(stops[-1]), (), {})
        for rank in range(len(outputs))
    ]
    results = [Result(shard, output) for shard, output in zip(shards, outputs, strict=True)]
    return NUMPY.gather(results, CPU, options=Options(**options))


A, B = np.arange(6.0).reshape(3, 2), np.arange(6.0, 10.0).reshape(2, 2)
AB = np.concatenate([A, B])


def test_arrays_are_joined_in_order():
    assert gather(A, B).tolist() == AB.tolist()


def test_containers_keep_their_type():
    @dataclasses.dataclass
    class Output:
        logits: object
        extra: object = None

    class Point(NamedTuple):
        x: object
        y: object

    for wrap, unwrap in (
        (lambda v: [v], lambda o: o[0]),
        (lambda v: (v, None), lambda o: o[0]),
        (lambda v: {"a": v}, lambda o: o["a"]),
        (lambda v: collections.defaultdict(list, a=v), lambda o: o["a"]),
        (lambda v: Point(v, {"k": v}), lambda o: o.y["k"]),
        (Output, lambda o: o.logits),
    ):
        joined = gather(wrap(A), wrap(B), sizes=[3, 2])
        assert type(joined) is type(wrap(A))
        assert unwrap(joined).tolist() == AB.tolist()


def test_scalars_are_weighted_by_rows():
    one, two = np.float32(1), np.float32(6)
    assert gather(one, two, sizes=[3, 2]) == pytest.approx(3.0)
    assert gather(one, two, sizes=[3, 2]).dtype == np.float32
    assert gather(one, two, sizes=[3, 2], scalars="sum") == 7
    assert gather(one, two, sizes=[3, 2], scalars="stack").tolist() == [1, 6]


def test_integer_scalars_must_agree_or_be_summed():
    assert gather(np.int64(4), np.int64(4)) == 4
    assert gather(np.int64(1), np.int64(4), scalars="sum") == 5
    with pytest.raises(StructureError, match="scalars='sum'"):
        gather(np.int64(1), np.int64(4))


def test_plain_values_that_agree_are_kept():
    output = {"name": "net", "n": 3, "none": None, "flag": True, "nan": float("nan")}
    joined = gather(dict(output), dict(output))
    assert joined.pop("nan") != 0
    output.pop("nan")
    assert joined == output


@pytest.mark.parametrize(("a", "b"), [("x", "y"), (1, 2), (None, 1), (1, True), (0.5, 0.25)])
def test_plain_values_that_differ_name_path_and_ranks(a, b):
    with pytest.raises(
        StructureError, match=r"(?s)at output\['k'\]\[0\], got.*replica 0 \(2 rows\).*replica 1 \(2 rows\)"
    ):
        gather({"k": [a]}, {"k": [b]}, sizes=[2, 2])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"a": A}, {"b": A}),
        ([A, A], [A]),
        ([A], (A,)),
        (A, None),
        (A, "text"),
        (A, A[0]),
        (A, np.float64(1)),
        (A, A.astype(np.float32)),
        ({"a": A}, [A]),
    ],
)
def test_different_structures_are_refused(a, b):
    with pytest.raises(StructureError, match="replica 1"):
        gather(a, b, sizes=[3, 3])


def test_none_of_any_replica_is_not_dropped():
    with pytest.raises(StructureError, match="replica 1"):
        gather(None, A, sizes=[3, 3])


def test_another_axis_and_by_output():
    joined = gather(A.T, B.T, sizes=[3, 2], output_axis=1)
    assert joined.tolist() == AB.T.tolist()
    joined = gather((A, A.T), (B, B.T), sizes=[3, 2], output_axis={1: -1})
    assert joined[0].tolist() == AB.tolist()
    assert joined[1].tolist() == AB.T.tolist()
    joined = gather({"h": A.T}, {"h": B.T}, sizes=[3, 2], output_axis={"h": 1})
    assert joined["h"].tolist() == AB.T.tolist()


def test_other_axes_must_agree_and_padding_is_told():
    with pytest.raises(StructureError, match="total_length"):
        gather(np.zeros((2, 5, 3)), np.zeros((2, 4, 3)))


def test_rows_flattened_with_another_axis_are_joined():
    a, b = np.arange(12.0), np.arange(12.0, 20.0)
    assert gather(a, b, sizes=[3, 2]).tolist() == np.arange(20.0).tolist()


def test_a_table_is_not_mistaken_for_rows():
    table = np.eye(6)
    for sizes in ([4, 3], [3, 3], [3, 2]):
        with pytest.raises(StructureError, match="Broadcast"):
            gather(table, table, sizes=sizes)
    assert gather(Broadcast(table), Broadcast(table), sizes=[3, 2]).tolist() == table.tolist()


def test_broadcast_outputs_must_agree():
    with pytest.raises(StructureError, match="the same value"):
        gather(Broadcast(A), Broadcast(A + 1), sizes=[3, 3])
    with pytest.raises(StructureError, match=r"Broadcast\(...\) on every replica"):
        gather(Broadcast(A), A, sizes=[3, 3])
    assert gather(Broadcast({"t": [A, "x"]}), Broadcast({"t": [A, "x"]}))["t"][1] == "x"


def test_marked_rows_are_put_together():
    assert gather(Rows(["a", "b", "c"]), Rows(["d", "e"]), sizes=[3, 2]) == list("abcde")
    assert gather(Rows(("a",)), Rows(("d", "e")), sizes=[1, 2]) == ("a", "d", "e")
    assert gather(Rows(A), Rows(B), sizes=[1, 1]).tolist() == AB.tolist()
    with pytest.raises(StructureError, match=r"sequences of one class with \[3, 2\] entries"):
        gather(Rows(["a", "b"]), Rows(["d", "e"]), sizes=[3, 2])


def test_row_lists_are_recognised_where_nothing_else_can_be_meant():
    assert gather(["a", "b", "c"], ["d", "e"], sizes=[3, 2]) == list("abcde")
    boxes = [np.zeros((n, 4)) for n in (5, 0, 7, 1, 9)]
    assert [len(box) for box in gather(boxes[:3], boxes[3:], sizes=[3, 2])] == [5, 0, 7, 1, 9]
    dicts = [{"boxes": box, "label": str(i)} for i, box in enumerate(boxes)]
    assert [d["label"] for d in gather(dicts[:3], dicts[3:], sizes=[3, 2])] == list("01234")


def test_two_outputs_on_two_rows_are_two_outputs():
    joined = gather([A[:2], B], [A[1:], B], sizes=[2, 2])
    assert len(joined) == 2
    assert joined[0].shape == (4, 2)


def test_a_list_that_may_mean_either_asks():
    with pytest.raises(StructureError, match="one entry a row, or one list for all"):
        gather(["cat", "dog"], ["cat", "dog"], sizes=[2, 2])
    assert gather(["cat", "dog"], ["cat", "dog"], sizes=[3, 2]) == ["cat", "dog"]
    assert gather(Broadcast(["cat", "dog"]), Broadcast(["cat", "dog"])) == ["cat", "dog"]


def test_what_cannot_be_joined_is_a_type_error_with_its_path():
    with pytest.raises(LeafTypeError, match=r"generator object .* at output\['g'\]"):
        gather({"g": (i for i in ())}, {"g": (i for i in ())})
    with pytest.raises(LeafTypeError, match="different object objects at output"):
        gather([object()], [object()], sizes=[3, 2])
    shared = object()
    assert gather([shared], [shared], sizes=[3, 2]) == [shared]


def test_one_replica_gives_its_own_output_without_marks():
    assert gather(Rows(["a", "b"]), sizes=[2]) == ["a", "b"]
    assert gather({"t": Broadcast(A), "g": 1}, sizes=[2])["t"] is A
    assert gather(np.float64(2.5), sizes=[3]) == 2.5
    assert gather(A, sizes=[3]).tolist() == A.tolist()


def test_nothing_to_gather():
    with pytest.raises(ValueError, match="at least one result"):
        NUMPY.gather([], CPU)


@pytest.mark.parametrize("batch", range(10))
def test_scatter_and_gather_are_inverse(batch):
    x = np.arange(2.0 * batch).reshape(batch, 2)

    def model(x, names, *, bias):
        return {
            "sum": x.sum(-1) + bias,
            "names": Rows(names),
            "mean": x.mean() if len(x) else np.float64(0),
            "same": bias,
        }

    names = [str(i) for i in range(batch)]
    out = NUMPY.run(model, 4, x, Rows(names), bias=2)
    assert out["sum"].tolist() == (x.sum(-1) + 2).tolist()
    assert out["names"] == names
    assert out["same"] == 2
    assert out["mean"] == pytest.approx(x.mean() if batch else 0)


def test_plain_numbers_that_differ_say_what_to_return():
    with pytest.raises(StructureError, match="has to be a 0-d array"):
        gather({"accuracy": 0.5}, {"accuracy": 0.25}, sizes=[3, 2])


def test_what_cannot_be_compared_is_a_type_error_with_its_path():
    class Odd:
        def __eq__(self, other):
            msg = "no order"
            raise RuntimeError(msg)

        __hash__ = None

    with pytest.raises(LeafTypeError, match=r"a Odd at output\[0\]: no order"):
        gather([Odd()], [Odd()], sizes=[3, 2])
