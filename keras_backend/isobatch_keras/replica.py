"""Run the template once, on one shard and one device, leaving no trace in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from isobatch.backend import Shard, StatePolicy, running
from isobatch.trees import flatten, unflatten
from isobatch_keras.arrays import get_mask, is_array, is_traced, set_mask
from isobatch_keras.devices import placed
from isobatch_keras.norms import Norm, counting
from isobatch_keras.state import Outcome, Recording, Update, carry

__all__ = ["idle", "run"]


def run(
    function: Callable[..., Any],
    shard: Shard,
    size: Any,
    previous: Outcome | None,
    *,
    policy: StatePolicy,
    norms: Sequence[Norm],
) -> Outcome:
    """Call the template, or a method of it, as one replica.

    Args:
        function: What is called.
        shard: What it is called with, and where it runs.
        size: Rows of the shard, perhaps a 0-d tensor that turns out to be 0: then the shard holds one borrowed row.
        previous: What the replica of the rank before left behind.
        policy: What becomes of running state.
        norms: The template's batch normalisations.

    Returns:
        What it left behind; nothing has been assigned to the template's variables.
    """
    leaves, spec = flatten((shard.args, shard.kwargs), is_array)
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    masks = [get_mask(leaves[i]) for i in places]
    start = previous.carried if previous else {}
    recording = Recording(start)
    returned: list[Any] = []

    def forward(*arrays: Any) -> Sequence[Any]:
        for i, array, mask in zip(places, arrays, masks, strict=True):
            leaves[i] = set_mask(array, mask)
        args, kwargs = unflatten(spec, leaves)
        with recording, counting(norms, recording.count):
            output = function(*args, **kwargs)
        returned.extend(flatten(output, is_array))
        return [*(leaf for leaf in returned[0] if is_array(leaf)), *recording.losses]

    token = running.set(shard)
    try:
        inputs = [leaves[i] for i in places]
        arrays = placed(
            forward, inputs, shard.device, f"replica_{shard.rank}", size > 0 if is_traced(size) else None
        )
    except Exception as error:
        error.add_note(f"in {shard}")
        raise
    finally:
        running.reset(token)
    outputs, output_spec = returned
    output_masks = [get_mask(leaf) for leaf in outputs]
    rest = iter(arrays)
    output = unflatten(output_spec, [next(rest) if is_array(leaf) else leaf for leaf in outputs])
    updates: list[Update] = [
        (variable, keras.ops.stop_gradient(value)) for variable, value in recording.updates
    ]
    return Outcome(
        shard,
        size,
        output,
        unflatten(output_spec, output_masks) if any(mask is not None for mask in output_masks) else None,
        list(rest),
        updates,
        recording.counts,
        carry(start, updates, size, policy),
    )


def idle(shard: Shard, previous: Outcome | None) -> Outcome:
    """Return the outcome of a replica that gets no rows and does not run."""
    return Outcome(shard, 0, carried=previous.carried if previous else {}, ran=False)
