"""Gradients through the collectives, with the values that Horovod gives them.

A gradient of a broadcast and of an all-gather is the average of all ranks' gradients, that of a reduce-scatter what all
ranks gathered: as if every rank computed the same loss, of which each has its part. Gradients are made by these
functions too, so that they have gradients themselves (torch.autograd.grad(create_graph=True)).
"""

from collections.abc import Callable
from typing import Any

import torch

from dcoll.collectives import grouped, on_communicator
from dcoll.job.process_sets import ProcessSet, communicator_of
from dcoll.ops import Average, Sum

Apply = Callable[..., Any]


class _AllReduce(torch.autograd.Function):
    """The gradient is reduced like the tensor was."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *options: Any) -> Any:
        process_set, *rest = ctx.options = options
        return on_communicator.allreduce_sync(communicator_of(process_set), tensor, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return allreduce(grads[0], *ctx.options), None, None, None, None, None, None, None


class _GroupedAllReduce(torch.autograd.Function):
    """The gradients are reduced like the tensors were."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        process_set, *options = ctx.options = arguments[:6]
        return tuple(grouped.allreduce_sync(communicator_of(process_set), list(arguments[6:]), *options))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, None, None, None, None, None, *grouped_allreduce(*ctx.options, *grads))


class _AllGather(torch.autograd.Function):
    """The gradient is this rank's rows of the average of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, process_set: ProcessSet, name: str) -> torch.Tensor:
        out: torch.Tensor = on_communicator.allgather_sync(communicator_of(process_set), tensor, name)
        ctx.process_set, ctx.rows = process_set, tensor.shape[0]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        comm = communicator_of(ctx.process_set)
        everyones = on_communicator.allgather_sync(
            comm, torch.tensor([ctx.rows], device="cpu"), "gradient of allgather: rows"
        )
        average = _average(ctx.process_set, grads[0])
        return average.narrow(0, int(everyones[: comm.rank].sum()), ctx.rows), None, None


class _GroupedAllGather(torch.autograd.Function):
    """The gradients are this rank's rows of the averages of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, process_set: ProcessSet, name: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = grouped.allgather_sync(communicator_of(process_set), list(tensors), name)
        ctx.process_set, ctx.rows = process_set, [tensor.shape[0] for tensor in tensors]
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        comm = communicator_of(ctx.process_set)
        everyones = on_communicator.allgather_sync(
            comm, torch.tensor([ctx.rows], device="cpu"), "gradient of grouped_allgather: rows"
        )
        averages = grouped_allreduce(ctx.process_set, Average, "gradient of grouped_allgather", 1.0, 1.0, "", *grads)
        before = everyones[: comm.rank].sum(0).tolist()
        own = [one.narrow(0, at, rows) for one, at, rows in zip(averages, before, ctx.rows, strict=True)]
        return (None, None, *own)


class _Broadcast(torch.autograd.Function):
    """The root's gradient is the average of all ranks', that of the others zero. root: the number in the set."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, process_set: ProcessSet, root: int, name: str) -> Any:
        ctx.process_set, ctx.root = process_set, root
        return on_communicator.broadcast_sync(communicator_of(process_set), tensor, root, name)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        average = _average(ctx.process_set, grads[0])
        if communicator_of(ctx.process_set).rank != ctx.root:
            # Zeros that come of the average: where they have a gradient, every rank takes part in it.
            average = average.masked_fill(torch.ones((), dtype=torch.bool, device=average.device), 0)
        return average, None, None, None


class _AllToAll(torch.autograd.Function):
    """The gradient goes back the way the rows came."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, process_set: ProcessSet, splits: list[int], name: str) -> Any:
        out, received = on_communicator.alltoall_sync(communicator_of(process_set), tensor, splits, name)
        ctx.process_set, ctx.received = process_set, received.tolist()
        ctx.mark_non_differentiable(received)
        return out, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        back, _ = alltoall(grads[0], ctx.process_set, ctx.received, "gradient of alltoall")
        return back, None, None, None


class _ReduceScatter(torch.autograd.Function):
    """The gradient is what all ranks gathered: of an average as it is, of a sum times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *options: Any) -> Any:
        process_set, *rest = ctx.options = options
        return on_communicator.reducescatter_sync(communicator_of(process_set), tensor, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        process_set, (mine,) = _scaled(ctx, grads)
        return allgather(mine, process_set, "gradient of reducescatter"), None, None, None, None, None


class _GroupedReduceScatter(torch.autograd.Function):
    """The gradients are what all ranks gathered: of an average as it is, of a sum times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        process_set, *options = ctx.options = arguments[:5]
        return tuple(grouped.reducescatter_sync(communicator_of(process_set), list(arguments[5:]), *options))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        process_set, mine = _scaled(ctx, grads)
        return (None,) * 5 + grouped_allgather(process_set, "gradient of grouped_reducescatter", *mine)


def _scaled(ctx: Any, grads: tuple[torch.Tensor, ...]) -> tuple[ProcessSet, list[torch.Tensor]]:
    """The process set of a reduce-scatter, and what this rank brings to its gradient."""
    process_set, op, _, prescale, postscale = ctx.options
    factor = prescale * postscale * (communicator_of(process_set).size if op is Sum else 1)
    return process_set, list(grads) if factor == 1 else [grad * factor for grad in grads]


def _average(process_set: ProcessSet, grad: torch.Tensor) -> Any:
    return allreduce(grad, process_set, Average, "gradient", 1.0, 1.0, "", "")


# They take a tensor, the process set, and what on_communicator.allreduce_sync() and the like take behind the tensor;
# the grouped ones the process set, what grouped.allreduce_sync() and the like take behind the tensors, and then those.
allreduce: Apply = _AllReduce.apply
grouped_allreduce: Apply = _GroupedAllReduce.apply
allgather: Apply = _AllGather.apply
grouped_allgather: Apply = _GroupedAllGather.apply
broadcast: Apply = _Broadcast.apply
alltoall: Apply = _AllToAll.apply
reducescatter: Apply = _ReduceScatter.apply
grouped_reducescatter: Apply = _GroupedReduceScatter.apply
