"""What a placement means, and the choice by cost; no framework is needed."""

import pytest

from isobatch import Device, DeviceError, ModelError, Placement
from isobatch.errors import DataError
from isobatch.placement import Part, crossings, spread

NAMES = ["stem", "left", "left.0", "left.1", "left.1.inner", "right", "right.0", "head"]
A, B, C = (Device("cpu", i) for i in range(3))


def placed(request):
    found = Placement.of(request, NAMES, lambda spellings: [Device.parse(s) for s in spellings])
    return {name: str(device) for name, device in found.items()}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"left": "cpu:1"}, {"left": "cpu:1"}),
        ({"left.*": "cpu:1"}, {"left.0": "cpu:1", "left.1": "cpu:1"}),
        ({"left*": "cpu:1", "right": "cpu:2"}, {"left": "cpu:1", "right": "cpu:2"}),
        ({"*.0": "cpu:1"}, {"left.0": "cpu:1", "right.0": "cpu:1"}),
        ({"left.1.inner": "/device:CPU:2"}, {"left.1.inner": "cpu:2"}),
        ({"[lr]*": "cpu:0"}, {"left": "cpu:0", "right": "cpu:0"}),
        ({"left.1": "cpu:1", "head": "cpu:0"}.get, {"left.1": "cpu:1", "head": "cpu:0"}),
        (lambda _name: "cpu:1", {"stem": "cpu:1", "left": "cpu:1", "right": "cpu:1", "head": "cpu:1"}),
        (Placement({"left": A, "right.0": B}), {"left": "cpu:0", "right.0": "cpu:1"}),
    ],
)
def test_what_a_request_means(request_, expected):
    assert placed(request_) == expected


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"middle": "cpu:0"}, ["'middle' matches none", "stem, left, left.0"]),
        ({"left*": "cpu:0", "left": "cpu:0"}, ["'left' named by 'left*' and by 'left'"]),
        ({"left": "cpu:0", "left.0": "cpu:1"}, ["'left.0'", "all of 'left'"]),
        ({}, ["names none"]),
        (lambda _name: None, ["names none"]),
    ],
)
def test_wrong_requests_say_what_there_is(request_, words):
    with pytest.raises(ModelError) as caught:
        placed(request_)
    assert all(word in str(caught.value) for word in words)


def test_a_placement_survives_a_file(tmp_path):
    placement = Placement({"left": A, "right.0": B})
    placement.save(tmp_path / "p.json")
    assert dict(Placement.load(tmp_path / "p.json")) == dict(placement)
    (tmp_path / "plain.json").write_text('{"left": "gpu:1"}')
    assert dict(Placement.load(tmp_path / "plain.json")) == {"left": Device("gpu", 1)}


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", '{"left": 1}', '{"isobatch_placement": 9, "devices": {}}', '{"isobatch_placement": 1}'],
)
def test_a_file_that_holds_no_placement_is_refused(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(DataError):
        Placement.load(tmp_path / "p.json")


def test_groups_take_over_the_devices_in_order():
    placement = Placement({"left": A, "right": B, "head": A})
    assert dict(placement.on((C, A))) == {"left": C, "right": A, "head": C}
    with pytest.raises(DeviceError, match="at least 2 devices"):
        placement.on((C,))


def chain(*costs):
    names = [f"p{i}" for i in range(len(costs))]
    return [
        Part(name, tuple(names[i - 1 : i]) if i else (), cost)
        for i, (name, cost) in enumerate(zip(names, costs, strict=True))
    ]


def loads(parts, placement):
    return sorted(
        sum(part.cost for part in parts if placement[part.name] == device) for device in placement.devices
    )


def test_branches_go_to_different_devices():
    parts = [
        Part("stem", (), 0.5),
        Part("l0", ("stem",), 2.0),
        Part("r0", ("stem",), 3.0),
        Part("l1", ("l0",), 2.0),
        Part("r1", ("r0",), 1.0),
        Part("join", ("l1", "r1"), 0.5),
    ]
    found = spread(parts, (A, B))
    assert found["l0"] == found["l1"] != found["r0"] == found["r1"]
    assert crossings(parts, found) == 2  # one way to the other branch, and one way back


def test_more_branches_than_devices_are_shared_out_by_cost():
    parts = [Part(f"b{i}", (), cost) for i, cost in enumerate((4.0, 3.0, 3.0, 2.0))]
    assert loads(parts, spread(parts, (A, B))) == [6.0, 6.0]


@pytest.mark.parametrize(
    ("costs", "count", "dearest"),
    [((1, 1, 1, 1), 2, 2), ((5, 1, 1, 1), 2, 5), ((1, 2, 3, 4, 5), 3, 6), ((1, 1, 10, 1), 3, 10)],
)
def test_a_chain_is_cut_where_the_dearest_stage_costs_least(costs, count, dearest):
    parts = chain(*map(float, costs))
    found = spread(parts, tuple(Device("cpu", i) for i in range(count)))
    assert loads(parts, found)[-1] == dearest
    places = [found[part.name].index for part in parts]
    assert places == sorted(places)  # consecutive


def test_small_shortcuts_do_not_count_as_branches():
    parts = chain(4.0, 4.0, 4.0, 4.0)
    parts[2] = Part("p2", ("p1", "cut"), 4.0)
    parts.insert(2, Part("cut", ("p0",), 0.1))
    places = [spread(parts, (A, B))[part.name].index for part in parts]
    assert places == sorted(places)


def test_a_part_used_twice_closes_no_circle():
    parts = [
        Part("shared", ("middle",), 1.0),
        Part("middle", ("shared",), 1.0),
        Part("end", ("shared",), 2.0),
    ]
    assert set(spread(parts, (A, B))) == {"shared", "middle", "end"}


def test_one_device_or_one_part_is_too_little():
    with pytest.raises(DeviceError, match="two or more devices"):
        spread(chain(1.0, 1.0), (A, A))
    with pytest.raises(ModelError, match="two or more parts"):
        spread(chain(1.0), (A, B))
