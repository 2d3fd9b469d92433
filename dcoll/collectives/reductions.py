"""The collectives that reduce, under Horovod's names and with its arguments.

Each takes a torch.Tensor or a numpy.ndarray of any layout and returns the same kind. Ranks match their calls by order,
so all of a process set must make the same calls in the same order; `name` appears in messages and must be the same on
all ranks. Asynchronous operations with a name meet by it: ranks may start them in different orders, and beside the
others. Results of synchronous calls on tensors that require a gradient carry one (autograd.py); what is written in
place and what a handle returns does not.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from dcoll.collectives import grouped, on_communicator
from dcoll.collectives.handle import Handle
from dcoll.collectives.inline import inline
from dcoll.collectives.on_communicator import comm_of, lane_of
from dcoll.collectives.tensors import has_gradient
from dcoll.compression.codecs import Compression, encode, narrow
from dcoll.errors import ArgumentError
from dcoll.job.process_sets import ProcessSet, global_process_set
from dcoll.ops import Average, ReduceOp, Sum

T = TypeVar("T")


def _op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """Horovod's deprecated `average` beside `op`."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ArgumentError("got both average= and op=, which say the same thing: pass op= alone")
    warnings.warn("average= is deprecated: pass op=dcoll.Average or op=dcoll.Sum", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


@inline("allreduce")
def allreduce(
    tensor: T,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    algo: str = "",
) -> T:
    """Combine the tensors of all ranks, of one shape and dtype, and return the result, the same on every rank.

    op: dcoll.Average (the default), Sum, Min, Max or Product. prescale_factor multiplies the input, postscale_factor
    the result. algo: one of `python -m dcoll.plan list`, "hierarchical" or "auto", the same on every rank; "" is
    DCOLL_ALGO. Differentiable: the gradient is reduced in the same way.
    """
    if average is not None or op is None:
        op = _op(average, op)
    sent, context, codec = encode(compression, tensor, op)
    options = (op, name or "", prescale_factor, postscale_factor, algo, codec)
    if has_gradient(sent):
        from dcoll.collectives import autograd

        out = autograd.allreduce(sent, process_set, *options)
    else:
        out = on_communicator.allreduce_sync(comm_of(process_set), sent, *options)
    return cast(T, out if compression is Compression.none else compression.decompress(out, context))


@inline("allreduce", in_place=True)
def allreduce_(
    tensor: T,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    algo: str = "",
    compression: Any = Compression.none,
) -> T:
    """As allreduce(), overwriting the tensor, which is returned."""
    if average is not None or op is None:
        op = _op(average, op)
    options = (op, name or "", prescale_factor, postscale_factor, algo)
    comm = comm_of(process_set)
    if compression is not Compression.none:
        return cast(T, on_communicator.start_allreduce(comm, tensor, compression, options, in_place=True).wait())
    return cast(T, on_communicator.allreduce_sync(comm, tensor, *options, in_place=True))


@inline("allreduce", starts=True)
def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    algo: str = "",
    compression: Any = Compression.none,
) -> Handle:
    """Start an allreduce(). The tensor must not change until the handle is done."""
    lane, options = lane_of(process_set, name), (_op(average, op), name or "", prescale_factor, postscale_factor, algo)
    return on_communicator.start_allreduce(lane, tensor, compression, options, in_place=False)


@inline("allreduce", in_place=True, starts=True)
def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    algo: str = "",
    compression: Any = Compression.none,
) -> Handle:
    """Start an allreduce_(). The tensor must be left alone until the handle is done."""
    lane, options = lane_of(process_set, name), (_op(average, op), name or "", prescale_factor, postscale_factor, algo)
    return on_communicator.start_allreduce(lane, tensor, compression, options, in_place=True)


@inline("allreduce", grouped=True)
def grouped_allreduce(
    tensors: Sequence[T],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[T]:
    """allreduce() of a list of tensors as one operation, which succeeds or fails as a whole."""
    op = _op(average, op)
    options = (op, name or "", prescale_factor, postscale_factor)
    if compression is Compression.none:
        return cast(list[T], _reduce_group(tensors, process_set, *options, ""))
    sent, codec, wide = grouped.encoded(tensors, compression, op)
    return wide(_reduce_group(sent, process_set, *options, codec))


def _reduce_group(tensors: Sequence[Any], process_set: ProcessSet, *options: Any) -> Any:
    out = grouped.allreduce_sync(comm_of(process_set), tensors, *options, carries=True)
    if out is not None:
        return out
    from dcoll.collectives import autograd

    return list(autograd.grouped_allreduce(process_set, *options, *tensors))


@inline("allreduce", in_place=True, grouped=True)
def grouped_allreduce_(
    tensors: Sequence[T],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = Compression.none,
) -> list[T]:
    """As grouped_allreduce(), overwriting the tensors, which are returned."""
    comm, options = comm_of(process_set), (_op(average, op), name or "", prescale_factor, postscale_factor)
    if compression is not Compression.none:
        return cast(list[T], grouped.start_compressed(comm, tensors, compression, options, in_place=True).wait())
    return cast(list[T], grouped.allreduce_sync(comm, tensors, *options, "", True))


@inline("allreduce", starts=True, grouped=True)
def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = Compression.none,
) -> Handle:
    """Start a grouped_allreduce(): one handle for all. The tensors are copied at once and may change."""
    comm, options = lane_of(process_set, name), (_op(average, op), name or "", prescale_factor, postscale_factor)
    return grouped.start_compressed(comm, tensors, compression, options, in_place=False)


@inline("allreduce", in_place=True, starts=True, grouped=True)
def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = Compression.none,
) -> Handle:
    """Start a grouped_allreduce_(). The tensors are overwritten by wait(), or by the poll() that says it is done."""
    comm, options = lane_of(process_set, name), (_op(average, op), name or "", prescale_factor, postscale_factor)
    return grouped.start_compressed(comm, tensors, compression, options, in_place=True)


def sparse_allreduce_async(
    tensor: Any, name: str, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], Any]:
    """Start the sum or average of sparse tensors in COO form. Call the result to wait for it and to get the tensor."""
    from dcoll.collectives import sparse

    return sparse.start_allreduce(lane_of(process_set, name), tensor, name, op)


@inline("reducescatter")
def reducescatter(
    tensor: T,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> T:
    """Combine the tensor of all ranks and return this rank's share of the rows.

    Of R rows rank r of n gets R // n, the first R % n ranks one more. Differentiable: the gradient is what the ranks'
    gradients gathered are, times n if op is Sum.
    """
    options = (op, name or "", prescale_factor, postscale_factor)
    sent, context = narrow(compression, tensor)
    if has_gradient(sent):
        from dcoll.collectives import autograd

        out = autograd.reducescatter(sent, process_set, *options)
    else:
        out = on_communicator.reducescatter_sync(comm_of(process_set), sent, *options)
    return cast(T, out if compression is Compression.none else compression.decompress(out, context))


@inline("reducescatter", starts=True)
def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a reducescatter(). The tensor must not change until the handle is done."""
    lane = lane_of(process_set, name)
    return on_communicator.reducescatter(lane, tensor, op, name or "", prescale_factor, postscale_factor)


@inline("reducescatter", grouped=True)
def grouped_reducescatter(
    tensors: Sequence[T],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[T]:
    """reducescatter() of each of a list of tensors, as one operation, which succeeds or fails as a whole."""
    options = (op, name or "", prescale_factor, postscale_factor)
    listed = grouped.list_of(tensors, "grouped_reducescatter")
    return grouped.compressed(listed, compression, lambda sent: _scatter_group(sent, process_set, *options))


def _scatter_group(tensors: Sequence[Any], process_set: ProcessSet, *options: Any) -> Any:
    out = grouped.reducescatter_sync(comm_of(process_set), tensors, *options, carries=True)
    if out is not None:
        return out
    from dcoll.collectives import autograd

    return list(autograd.grouped_reducescatter(process_set, *options, *tensors))


@inline("reducescatter", starts=True, grouped=True)
def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a grouped_reducescatter(): one handle for all. The tensors are copied at once and may change."""
    comm = lane_of(process_set, name)
    return grouped.start_reducescatter(comm, tensors, op, name or "", prescale_factor, postscale_factor)
