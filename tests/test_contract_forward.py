"""The contract in inference: the same tests for both frameworks. Numbers are those of `shared` lines in docs/design.md."""

import numpy as np
import pytest
from kits import FLOAT64_GAP, numbers

from isobatch import (
    BatchSizeError,
    Broadcast,
    Device,
    DeviceError,
    ModelError,
    Options,
    Rows,
    StructureError,
    data_parallel,
    split_sizes,
)
from isobatch.compare import compare

REPLICAS = (1, 2, 3, 4)


def assert_same(actual, expected):
    verdict = compare(actual, expected, FLOAT64_GAP)
    assert verdict.passed, str(verdict)


# Line 1: who gets which rows.


@pytest.mark.parametrize("policy", ["balanced", "keras", "torch", (3, 1, 2)])
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8])
def test_line_1_rows_follow_the_policy(backend, policy, batch):
    x = numbers(batch, 4)
    devices = [Device("cpu", rank) for rank in range(3)]
    shards = backend.backend.scatter(backend.array(x), devices, options=Options(policy=policy))
    sizes = [0, 0, 0]
    for shard in shards:
        sizes[shard.rank] = len(shard.rows)
        assert_same(backend.numpy(shard.args[0]), x[shard.rows.start : shard.rows.stop])
    assert tuple(sizes) == split_sizes(batch, 3, policy)


@pytest.mark.parametrize("policy", ["keras", "torch", (1, 3)])
def test_line_1_policies_change_no_number(backend, policy):
    model = backend.mlp()
    x = numbers(7, 4)
    assert_same(backend.call(backend.parallel(model, 2, policy=policy), x), backend.call(model, x))


# Lines 2 and 5: every number of rows gives the template's own output.


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("norm", [False, True])
def test_line_2_every_batch_size_from_zero(backend, replicas, norm):
    model = backend.mlp(norm=norm)
    parallel = backend.parallel(model, replicas)
    for batch in range(3 * replicas + 1):
        x = numbers(batch, 4)
        assert_same(backend.call(parallel, x), backend.call(model, x))


def test_line_2_no_replica_computes_on_zero_rows(backend):
    devices = [Device("cpu", rank) for rank in range(4)]
    shards = backend.backend.scatter(backend.array(numbers(2, 4)), devices)
    results = backend.backend.parallel_apply(backend.backend.replicate(backend.mlp(), devices), shards)
    assert [result.shard.rank for result in results] == [0, 1]


# Line 3: what is split.


def test_line_3_scalars_and_marks(backend):
    devices = [Device("cpu", rank) for rank in range(2)]
    table, scalar = backend.array(numbers(9, 9)), backend.array(np.float64(2.5))
    x = backend.array(numbers(3, 4))
    first, second = backend.backend.scatter(
        (x, scalar, Broadcast(table), numbers(3, 2)),
        devices,
        kwargs={"names": Rows(["a", "b", "c"]), "flag": "same"},
    )
    assert [tuple(value.shape) for value in first.args] == [(2, 4), (), (9, 9), (2, 2)]
    assert [tuple(value.shape) for value in second.args] == [(1, 4), (), (9, 9), (1, 2)]
    assert (first.kwargs, second.kwargs) == (
        {"names": ["a", "b"], "flag": "same"},
        {"names": ["c"], "flag": "same"},
    )


def test_line_3_disagreeing_rows_name_the_leaves(backend):
    parallel = backend.parallel(backend.two_inputs(), 2)
    with pytest.raises(BatchSizeError, match=r"(?s)'a'\].*4 rows.*'b'\].*3 rows"):
        parallel({"a": backend.array(numbers(4, 4)), "b": backend.array(numbers(3, 3))})


def test_line_3_the_batch_axis_can_be_set(backend):
    devices = [Device("cpu", rank) for rank in range(2)]
    hidden = numbers(2, 5, 3)
    shards = backend.backend.scatter(backend.array(hidden), devices, options=Options(axis=1))
    assert_same(backend.numpy(shards[1].args[0]), hidden[:, 3:])


# Line 4: containers keep their type.


@pytest.mark.parametrize("replicas", REPLICAS)
def test_line_4_several_inputs_and_outputs(backend, replicas):
    model = backend.two_inputs()
    parallel = backend.parallel(model, replicas)
    for batch in (0, 1, 2, 5, 8):
        inputs = {"a": numbers(batch, 4), "b": numbers(batch, 3, seed=1)}
        output = backend.call(parallel, inputs)
        assert type(output) is dict
        assert set(output) == {"product", "pair"}
        assert type(output["pair"]) is list
        assert_same(output, backend.call(model, inputs))


# Line 5: gather.


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7])
def test_line_5_a_loss_inside_is_the_loss_of_one_device(backend, batch):
    model = backend.mlp(scalar=True)
    x = numbers(batch, 4)
    assert_same(backend.call(backend.parallel(model, 3), x), backend.call(model, x))


def test_line_5_scalars_can_be_summed_or_stacked(backend):
    devices = [Device("cpu", 0)] * 2
    shards = backend.backend.scatter(backend.array(numbers(3, 4)), devices)
    model = backend.mlp(scalar=True)
    results = backend.backend.parallel_apply(backend.backend.replicate(model, devices), shards)
    losses = [float(backend.numpy(result.output)["loss"]) for result in results]
    for scalars, expected in (
        ("sum", sum(losses)),
        ("stack", losses),
        ("mean", np.average(losses, weights=[2, 1])),
    ):
        joined = backend.backend.gather(results, devices[0], options=Options(scalars=scalars))
        assert_same(backend.numpy(joined["loss"]), np.asarray(expected))


def test_line_5_outputs_that_do_not_fit_name_path_and_rank(backend):
    from isobatch import Result

    devices = [Device("cpu", 0)] * 2
    shards = backend.backend.scatter(backend.array(numbers(4, 4)), devices)
    with pytest.raises(StructureError, match=r"(?s)at output\['k'\].*replica 1"):
        backend.backend.gather(
            [Result(shards[0], {"k": shards[0].args[0]}), Result(shards[1], {"k": None})], devices[0]
        )


# Line 6: weights belong to the template.


def test_line_6_the_variables_are_the_templates_own(backend):
    model = backend.mlp(norm=True)
    parallel = backend.parallel(model, 3)
    assert [id(v) for v in backend.variables(parallel)] == [id(v) for v in backend.variables(model)]


# Line 12: failure.


def test_line_12_the_exception_is_its_own_and_says_where(backend):
    devices = [Device("cpu", rank) for rank in range(3)]
    shards = backend.backend.scatter(backend.array(numbers(5, 4)), devices)
    replicas = backend.backend.replicate(backend.failing(rank=1), devices)
    with pytest.raises(ValueError, match="planted") as caught:
        backend.backend.parallel_apply(replicas, shards)
    assert "in replica 1 on cpu:1, rows 2..3" in " ".join(getattr(caught.value, "__notes__", []))
    assert len(backend.backend.parallel_apply(replicas, shards[:1])) == 1, "the replicas work after a failure"


# Line 13: native.


def test_line_13_the_result_is_of_the_same_kind_and_shows_the_template(backend):
    model = backend.mlp()
    parallel = backend.parallel(model, 2)
    if backend.name == "keras":
        import keras

        assert isinstance(parallel, keras.Model)
        assert parallel.get_layer("hidden") is model.get_layer("hidden")
    else:
        import torch

        assert isinstance(parallel, torch.nn.DataParallel)
        assert parallel.hidden is model.hidden


# Line 14: devices.


def test_line_14_devices_are_printed_one_way(backend):
    parallel = data_parallel(backend.mlp(), ["CPU:0", "/device:CPU:1"])
    assert " ".join(map(str, parallel.devices)) == "cpu:0 cpu:1"


def test_line_14_an_absent_device_says_what_was_found(backend):
    with pytest.raises(DeviceError, match=r"tpu:3 absent\. Found: .*cpu:0"):
        data_parallel(backend.mlp(), ["cpu:0", "tpu:3"])
    with pytest.raises(DeviceError, match="1 or more devices, got devices=0"):
        data_parallel(backend.mlp(), 0)


def test_line_14_no_accelerator_means_cpu_replicas(backend):
    if any(device.kind != "cpu" for device in backend.backend.devices()):
        pytest.skip("this machine has an accelerator")
    assert len(data_parallel(backend.mlp(), 4).devices) == 4
    assert list(map(str, data_parallel(backend.mlp()).devices)) == ["cpu:0"]


# The front door.


def test_options_are_checked_before_anything_is_built(backend):
    with pytest.raises(ValueError, match="got 'fair'"):
        backend.parallel(backend.mlp(), 2, policy="fair")
    with pytest.raises(ValueError, match="2 positive weights"):
        backend.parallel(backend.mlp(), 2, policy=(1, 2, 3))


@pytest.mark.parametrize("thing", [None, 3, "model", object(), dict])
def test_what_is_no_model_is_refused(thing):
    with pytest.raises(ModelError, match=r"Expected a keras.Model or a torch.nn.Module, got"):
        data_parallel(thing)


def test_both_frameworks_give_the_same_numbers(both):
    keras, torch = both
    x = numbers(7, 4)
    for options in ({}, {"norm": True}):
        ours, theirs = keras.mlp(**options), torch.mlp(**options)
        assert_same(torch.call(theirs, x), keras.call(ours, x))
        assert_same(torch.call(torch.parallel(theirs, 3), x), keras.call(keras.parallel(ours, 3), x))
