"""`torch.nn.DataParallel` without accelerators: its own scatter, replicate and gather, over stand-ins for the copies between devices.

The stand-ins cost it nothing that it could do without: weights and rows are not copied, since all devices share one memory here.
"""

import threading
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import replicate, scatter_gather

DEVICES = [0, 1]


class _Broadcast(torch.autograd.Function):
    """Aliases for each device; gradients are added up."""

    @staticmethod
    def forward(ctx, devices, *tensors):
        ctx.count = len(tensors)
        return tuple(tensor.detach() for _ in devices for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads):
        first, *others = (grads[start : start + ctx.count] for start in range(0, len(grads), ctx.count))
        for other in others:
            first = torch._foreach_add(first, other)
        return None, *first


class _Scatter:
    @staticmethod
    def apply(devices, _sizes, dim, tensor):
        return tensor.chunk(len(devices), dim)


class _Gather:
    @staticmethod
    def apply(_device, dim, *tensors):
        return torch.cat(tensors, dim)


@contextmanager
def standing_in():
    """Let torch's scatter, replicate and gather take tensors on the CPU."""
    with (
        mock.patch("torch.nn.parallel._functions.Broadcast", _Broadcast),
        mock.patch(
            "torch.nn.parallel.comm.broadcast_coalesced", lambda tensors, ids: [list(tensors) for _ in ids]
        ),
        mock.patch.object(scatter_gather, "Scatter", _Scatter),
        mock.patch.object(scatter_gather, "Gather", _Gather),
    ):
        yield


class Standing(nn.Module):
    """What `nn.DataParallel.forward` does, replicas in threads that start with the call, as there."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        shards, named = scatter_gather.scatter_kwargs(args, kwargs, DEVICES)
        grad = torch.is_grad_enabled()
        replicas = replicate(self.module, DEVICES, not grad)
        results = [None] * len(replicas)

        def run(rank, own):
            with torch.set_grad_enabled(grad):
                results[rank] = replicas[rank](*shards[rank], **own)

        given = named or [{}] * len(replicas)
        threads = [threading.Thread(target=run, args=item) for item in enumerate(given)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return scatter_gather.gather(results, DEVICES[0])
