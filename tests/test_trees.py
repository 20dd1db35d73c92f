import collections
import dataclasses
import types
from typing import NamedTuple

import pytest

from isobatch import Broadcast, Rows
from isobatch.trees import children, flatten, path_text, unflatten, without_marks


class Point(NamedTuple):
    x: object
    y: object


@dataclasses.dataclass
class Pair:
    left: object
    right: object
    count: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        self.count = 7


@dataclasses.dataclass(frozen=True)
class Frozen:
    left: object


@dataclasses.dataclass
class Hybrid(collections.OrderedDict):
    """Fields and items in one, as the outputs of a well-known model library are."""

    loss: object = None
    logits: object = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Labels(list):
    pass


class Config(collections.UserDict):
    pass


class Settings(dict):
    pass


class Triple(tuple):
    __slots__ = ()


CONTAINERS = [
    (1, 2),
    [1, [2, (3,)]],
    {"b": 1, "a": 2},
    collections.OrderedDict(b=1, a=2),
    collections.defaultdict(list, a=1),
    collections.deque([1, 2], maxlen=2),
    Point(1, 2),
    Frozen(1),
    Labels([1, 2]),
    Config(a=1),
    Settings(a=1),
    Triple((1, 2)),
    types.MappingProxyType({"a": 1}),
    (),
    [],
    {},
    {1: 1, "a": 2, None: 3},
    None,
    (None, [None]),
]


@pytest.mark.parametrize("tree", CONTAINERS, ids=lambda tree: type(tree).__name__)
def test_containers_keep_class_keys_and_order(tree):
    leaves, spec = flatten(tree)
    again = unflatten(spec, leaves)
    assert type(again) is type(tree)
    assert again == tree
    if isinstance(tree, dict):
        assert list(again) == list(tree)
        assert getattr(again, "default_factory", None) is getattr(tree, "default_factory", None)


def test_new_leaves_go_into_a_new_container_and_leave_the_old_one_alone():
    for tree in (Pair(1, 2), Frozen(1), Labels([1, 2]), Config(a=1, b=2), Settings(a=1), Triple((1,))):
        leaves, spec = flatten(tree)
        again = unflatten(spec, [leaf * 10 for leaf in leaves])
        assert flatten(again)[0] == [leaf * 10 for leaf in leaves]
        assert flatten(tree)[0] == leaves


def test_a_dataclass_does_not_run_its_post_init_again():
    again = unflatten(flatten(Pair(1, 2))[1], [10, 20, 30])
    assert (again.left, again.right, again.count) == (10, 20, 30)


def test_fields_and_items_of_a_hybrid_stay_one():
    tree = Hybrid(loss=None, logits=2)
    again = unflatten(flatten(tree)[1], [1, 20])
    assert again.logits == again["logits"] == 20
    assert list(again) == ["logits"]
    assert tree["logits"] == 2


def test_marks_strings_and_classes_are_leaves():
    leaves, _ = flatten([Broadcast([1, 2]), Rows("ab"), "text", b"raw", range(3), Pair, {1, 2}])
    assert leaves == [Broadcast([1, 2]), Rows("ab"), "text", b"raw", range(3), Pair, {1, 2}]


def test_structures_compare_by_class_and_keys():
    assert flatten(Pair(1, 2))[1] == flatten(Pair(3, 4))[1]
    assert flatten(Pair(1, 2))[1] != flatten(Frozen(1))[1]
    assert flatten(Settings(a=1))[1] != flatten(Settings(b=1))[1]
    assert flatten([1, 2])[1] != flatten((1, 2))[1]


def test_paths_read_like_code():
    _, spec = flatten({"images": [Pair(1, 2)]})
    assert [path_text(path, "args[0]") for path in spec.paths()] == [
        "args[0]['images'][0].left",
        "args[0]['images'][0].right",
        "args[0]['images'][0].count",
    ]


def test_children_is_one_level():
    assert children(5) is None
    assert children("text") is None
    assert children(Rows([1])) is None
    keys, values, build = children(Pair([1], 2))
    assert (keys, values) == (("left", "right", "count"), [[1], 2, 7])
    assert build([3, 4, 5]).left == 3
    assert children(())[1] == []


def test_without_marks_returns_the_same_object_when_there_are_none():
    tree = {"a": [1]}
    assert without_marks(tree) is tree
    assert without_marks({"a": Rows([1]), "b": [Broadcast(2)]}) == {"a": [1], "b": [2]}
