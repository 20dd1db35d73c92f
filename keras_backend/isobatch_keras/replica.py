"""Run the template once, on one shard and one device, leaving no trace in it; and what a part of a model needs of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import keras

from isobatch.backend import Shard, StatePolicy, running
from isobatch.devices import Device
from isobatch.trees import flatten, unflatten
from isobatch_keras.arrays import get_mask, is_array, is_traced, set_mask
from isobatch_keras.devices import placed
from isobatch_keras.norms import Norm, counting
from isobatch_keras.state import Outcome, Recording, Update, carry

__all__ = ["idle", "record", "run"]


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
    start = previous.carried if previous else {}
    recording = Recording(start)
    live = size > 0 if is_traced(size) else None
    token = running.set(shard)
    try:
        output, masks, losses = record(
            function,
            shard.args,
            shard.kwargs,
            recording,
            device=shard.device,
            name=f"replica_{shard.rank}",
            live=live,
            norms=norms,
        )
    except Exception as error:
        error.add_note(f"in {shard}")
        raise
    finally:
        running.reset(token)
    updates: list[Update] = [
        (variable, keras.ops.stop_gradient(value)) for variable, value in recording.updates
    ]
    return Outcome(
        shard,
        size,
        output,
        masks,
        losses,
        updates,
        recording.counts,
        carry(start, updates, size, policy),
    )


def record(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    recording: Recording,
    *,
    device: Device,
    name: str,
    live: Any = None,
    norms: Sequence[Norm] = (),
) -> tuple[Any, Any, list[Any]]:
    """Call a function on a device, its gradient included, with assignments and losses caught in a recording.

    Args:
        function: What is called.
        args: Its arguments.
        kwargs: Its keyword arguments.
        recording: What takes the assignments.
        device: Where.
        name: Scope of the operations' names.
        live: A 0-d boolean tensor: gradients are zero where it does not hold; `None` for always.
        norms: Batch normalisations whose positions are counted.

    Returns:
        The output, its masks in the same container or `None`, and the losses.
    """
    leaves, spec = flatten((args, kwargs), is_array)
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    masks = [get_mask(leaves[i]) for i in places]
    returned: list[Any] = []

    def forward(*arrays: Any) -> Sequence[Any]:
        for i, array, mask in zip(places, arrays, masks, strict=True):
            leaves[i] = set_mask(array, mask)
        args, kwargs = unflatten(spec, leaves)
        with recording, counting(norms, recording.count) if norms else nullcontext():
            output = function(*args, **kwargs)
        returned.extend(flatten(output, is_array))
        return [*(leaf for leaf in returned[0] if is_array(leaf)), *recording.losses]

    arrays = placed(forward, [leaves[i] for i in places], device, name, live)
    outputs, output_spec = returned
    output_masks = [get_mask(leaf) for leaf in outputs]
    rest = iter(arrays)
    output = unflatten(output_spec, [next(rest) if is_array(leaf) else leaf for leaf in outputs])
    marked = unflatten(output_spec, output_masks) if any(mask is not None for mask in output_masks) else None
    return output, marked, list(rest)


def idle(shard: Shard, previous: Outcome | None) -> Outcome:
    """Return the outcome of a replica that gets no rows and does not run."""
    return Outcome(shard, 0, carried=previous.carried if previous else {}, ran=False)
