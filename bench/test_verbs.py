"""scatter, replicate, gather and the containers they walk, beside torch's own (over stand-ins), optree and bare operations."""

import numpy as np
import optree
import pytest

import isobatch
from isobatch import trees

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.parallel import replicate, scatter_gather  # noqa: E402
from torch.utils import _pytree  # noqa: E402
from torch_data_parallel import DEVICES, standing_in  # noqa: E402

from isobatch_torch import DataParallel  # noqa: E402

CPUS = [isobatch.Device("cpu", rank) for rank in DEVICES]
BACKEND = isobatch.get_backend("torch")
BATCHES = {
    "one tensor": lambda: torch.ones(64, 32),
    "nested": lambda: {
        name: [(torch.ones(64, 8), torch.zeros(64)), {"mask": torch.ones(64, 8)}] for name in "abcd"
    },
}


@pytest.fixture(autouse=True)
def stand_ins():
    with standing_in():
        yield


@pytest.mark.parametrize("kind", BATCHES)
def test_scatter(contest, kind):
    """12 tensors in containers, or one."""
    batch = BATCHES[kind]()
    calls = {
        "slices, optree": lambda: chunks(batch),
        "nn.DataParallel": lambda: scatter_gather.scatter_kwargs((batch,), {}, DEVICES)[0],
        "isobatch": lambda: BACKEND.scatter((batch,), CPUS),
    }
    contest(f"torch scatter, {kind}", calls, seconds=0.5)
    expected = chunks(batch)
    assert same([shard.args[0] for shard in calls["isobatch"]()], expected)
    assert same([args[0] for args in calls["nn.DataParallel"]()], expected)


@pytest.mark.parametrize("kind", BATCHES)
def test_gather(contest, kind):
    batch = BATCHES[kind]()
    results = [isobatch.Result(shard, shard.args[0]) for shard in BACKEND.scatter((batch,), CPUS)]
    outputs = [result.output for result in results]
    calls = {
        "cat, optree": lambda: optree.tree_map(lambda *parts: torch.cat(parts), *outputs),
        "nn.DataParallel": lambda: scatter_gather.gather(outputs, DEVICES[0]),
        "isobatch": lambda: BACKEND.gather(results, CPUS[0]),
    }
    contest(f"torch gather, {kind}", calls, seconds=0.5)
    assert all(same(call(), batch) for call in calls.values())


@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "grad"])
def test_replicate(contest, benchmark, grad):
    """A hundred layers; replicas are kept between calls, and brought up to date."""
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(100)])
    parallel = DataParallel(net, 2)
    calls = {
        "nn.DataParallel": lambda: replicate(net, DEVICES, not grad),
        "isobatch": lambda: [replica.module for replica in parallel.replicate()],
    }
    with torch.set_grad_enabled(grad):
        timings = contest(
            f"torch replicate, a hundred layers, {'grad' if grad else 'no grad'}", calls, seconds=1
        )
        with torch.no_grad():
            net[0].weight += 1
        for copies in (call() for call in calls.values()):
            assert all(torch.equal(copy[0].weight, net[0].weight) for copy in copies)
            assert copies[0] is not copies[1]
    benchmark.extra_info["numbers"] = [
        ["isobatch", 1e3 * timings["isobatch"].median, "ms", 1.5 if grad else 0.3]
    ]


@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "grad"])
def test_a_whole_call_of_a_hundred_layers(contest, benchmark, grad):
    """What a call costs before and after the replicas run: they do nothing here."""
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(100)])
    net.__class__ = type("Idle", (nn.Sequential,), {"forward": lambda self, x: self[0](x)})
    x = torch.randn(8, 4)
    parallel = DataParallel(net, 2)
    with torch.set_grad_enabled(grad):
        timings = contest(
            f"torch, a hundred layers, {'grad' if grad else 'no grad'}",
            {"2 replicas": lambda: parallel(x)},
            seconds=1,
        )
        assert parallel(x).shape == (8, 4)
    benchmark.extra_info["numbers"] = [
        ["a call", 1e3 * timings["2 replicas"].median, "ms", 1.5 if grad else 0.3]
    ]


def test_containers(contest):
    """Apart and together again: 12 tensors in dictionaries, lists and tuples."""
    batch = BATCHES["nested"]()

    def ours():
        leaves, spec = trees.flatten(batch)
        return trees.unflatten(spec, leaves)

    def by_optree():
        leaves, spec = optree.tree_flatten(batch)
        return optree.tree_unflatten(spec, leaves)

    def by_torch():
        leaves, spec = _pytree.tree_flatten(batch)
        return _pytree.tree_unflatten(leaves, spec)

    calls = {"optree": by_optree, "torch.utils._pytree": by_torch, "isobatch": ours}
    contest("containers of 12 tensors", calls, seconds=0.5)
    assert all(same(call(), batch) for call in calls.values())


def test_keras_verbs(contest):
    """The same containers, for TensorFlow's tensors: by hand, a slice each."""
    keras = pytest.importorskip("keras")
    isobatch.virtual_devices(2)
    backend = isobatch.get_backend("keras")
    batch = optree.tree_map(
        lambda leaf: keras.ops.convert_to_tensor(leaf.numpy()), BATCHES["nested"](), none_is_leaf=True
    )

    def by_hand():
        return optree.tree_map(lambda *parts: keras.ops.concatenate(parts), *chunks(batch))

    def ours():
        shards = backend.scatter((batch,), CPUS)
        return backend.gather([isobatch.Result(shard, shard.args[0]) for shard in shards], CPUS[0])

    contest("Keras scatter and gather, 12 tensors", {"by hand": by_hand, "isobatch": ours}, seconds=0.5)
    for one, other in zip(*(optree.tree_leaves(tree) for tree in (ours(), batch)), strict=True):
        assert np.array_equal(one, other)


def chunks(batch):
    """Two shards by hand, one slice a tensor."""
    return [
        optree.tree_map(lambda leaf, rows=rows: leaf[rows], batch) for rows in (slice(0, 32), slice(32, 64))
    ]


def same(one, other):
    """Whether two containers hold equal tensors at equal places."""
    leaves, structure = optree.tree_flatten(one)
    others, expected = optree.tree_flatten(other)
    return structure == expected and all(map(torch.equal, leaves, others))
