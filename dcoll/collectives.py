"""The collectives, under Horovod's names and with its arguments.

Each takes a torch.Tensor (CPU) or a numpy.ndarray of any layout and returns the same kind. Ranks match their calls by
order, so all must make the same calls in the same order; `name` appears in messages and must be the same on all ranks.
Asynchronous operations with a name meet by it: ranks may start them in different orders, and beside the others.
The results carry no autograd history.
"""

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from dcoll import _C, collective, objects
from dcoll.errors import ArgumentError
from dcoll.handle import Handle
from dcoll.ops import Average, ReduceOp, Sum
from dcoll.tensors import KINDS, code_of, kind_of, library
from dcoll.world import WORLD, communicator

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


def _op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """Horovod's deprecated `average` beside `op`."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ArgumentError("got both average= and op=, which say the same thing: pass op= alone")
    warnings.warn("average= is deprecated: pass op=dcoll.Average or op=dcoll.Sum", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


def _lane(comm: _C.Communicator, name: str | None) -> collective.Lane:
    """Where an asynchronous operation goes: one with a name meets those of that name on the other ranks."""
    return comm.by_name if name else comm


def _inline(in_place: bool) -> Callable[[Function], Function]:
    """The usual calls of the decorated all-reduce are done in C, without Python; all others by the function itself.

    Usual are a dense torch.Tensor or numpy.ndarray and arguments of the types in the signature but for `average`.
    """

    def decorate(function: Function) -> Function:
        inline: Any = _C.InlineAllReduce(function, tuple(ReduceOp), in_place)
        functools.update_wrapper(inline, function)
        return cast(Function, inline)

    return decorate


@_inline(in_place=False)
def allreduce(
    tensor: T,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> T:
    """Combine the tensor of all ranks, element by element, and return the result, which is the same on every rank.

    op: dcoll.Average (the default), Sum, Min, Max or Product. prescale_factor multiplies the input, postscale_factor
    the result.
    """
    if average is not None or op is None:
        op = _op(average, op)
    comm = WORLD.comm or communicator()
    out: T = collective.allreduce_sync(comm, tensor, op, name or "", prescale_factor, postscale_factor)
    return out


@_inline(in_place=True)
def allreduce_(
    tensor: T,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> T:
    """As allreduce(), overwriting the tensor, which is returned."""
    if average is not None or op is None:
        op = _op(average, op)
    comm = WORLD.comm or communicator()
    out: T = collective.allreduce_sync_(comm, tensor, op, name or "", prescale_factor, postscale_factor)
    return out


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start an allreduce(). The tensor must not change until the handle is done."""
    lane = _lane(communicator(), name)
    return collective.allreduce(lane, tensor, _op(average, op), name or "", prescale_factor, postscale_factor)


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start an allreduce_(). The tensor must be left alone until the handle is done."""
    lane = _lane(communicator(), name)
    return collective.allreduce_(lane, tensor, _op(average, op), name or "", prescale_factor, postscale_factor)


def broadcast(tensor: T, root_rank: int, name: str | None = None) -> T:
    """Return the tensor of rank `root_rank`. The others pass one of the same shape and dtype."""
    out: T = collective.broadcast_sync(WORLD.comm or communicator(), tensor, root_rank, name or "")
    return out


def broadcast_(tensor: T, root_rank: int, name: str | None = None) -> T:
    """As broadcast(), overwriting the tensor, which is returned."""
    out: T = collective.broadcast_sync_(WORLD.comm or communicator(), tensor, root_rank, name or "")
    return out


def broadcast_async(tensor: Any, root_rank: int, name: str | None = None) -> Handle:
    """Start a broadcast()."""
    return collective.broadcast(_lane(communicator(), name), tensor, root_rank, name or "")


def broadcast_async_(tensor: Any, root_rank: int, name: str | None = None) -> Handle:
    """Start a broadcast_(). The tensor must be left alone until the handle is done."""
    return collective.broadcast_(_lane(communicator(), name), tensor, root_rank, name or "")


def allgather(tensor: T, name: str | None = None) -> T:
    """Concatenate the tensors of all ranks along the first dimension, in which they may differ."""
    out: T = collective.allgather_sync(WORLD.comm or communicator(), tensor, name or "")
    return out


def allgather_async(tensor: Any, name: str | None = None) -> Handle:
    """Start an allgather(). The tensor must not change until the handle is done."""
    return collective.allgather(_lane(communicator(), name), tensor, name or "")


def reducescatter(
    tensor: T,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> T:
    """Combine the tensor of all ranks and return this rank's share of the rows.

    Of R rows rank r gets R // size(), the first R % size() ranks one more.
    """
    comm = WORLD.comm or communicator()
    out: T = collective.reducescatter_sync(comm, tensor, op, name or "", prescale_factor, postscale_factor)
    return out


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a reducescatter(). The tensor must not change until the handle is done."""
    return collective.reducescatter(
        _lane(communicator(), name), tensor, op, name or "", prescale_factor, postscale_factor
    )


def alltoall(tensor: Any, splits: Iterable[int] | None = None, name: str | None = None) -> Any:
    """Send splits[d] consecutive rows to each rank d and return the received rows in rank order.

    Without splits the rows are shared evenly. With splits the result is (received, received_splits), the latter being
    the number of rows from each rank, int32.
    """
    return collective.alltoall_sync(WORLD.comm or communicator(), tensor, splits, name or "")


def alltoall_async(tensor: Any, splits: Iterable[int] | None = None, name: str | None = None) -> Handle:
    """Start an alltoall(). The tensor must not change until the handle is done."""
    return collective.alltoall(_lane(communicator(), name), tensor, splits, name or "")


def barrier() -> None:
    """Wait until every rank is here."""
    (WORLD.comm or communicator()).barrier_sync()


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the object of rank `root_rank`, pickled with cloudpickle if that is installed."""
    return objects.broadcast_object(communicator(), obj, root_rank, name or "")


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order."""
    return objects.allgather_object(communicator(), obj, name or "")


def empty(shape: int | Sequence[int], dtype: Any = None) -> Any:
    """A tensor, at first of zeros, in memory that the ranks of this node can read: collectives on it copy nothing.

    dtype: a torch.dtype (torch.float32 if it is None) gives a torch.Tensor, a NumPy dtype a numpy.ndarray.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    torch = sys.modules.get("torch")
    if dtype is None:
        import torch as torch_module

        torch, dtype = torch_module, torch_module.float32
    if torch is not None and isinstance(dtype, torch.dtype):
        kind = library("torch")
    else:
        import numpy

        kind, dtype = library("numpy"), numpy.dtype(dtype)
    code_of(dtype)
    buffer = communicator().alloc(math.prod(sizes) * dtype.itemsize)
    return kind.wrap(buffer, dtype, sizes)


def empty_like(tensor: T) -> T:
    """As empty(), of the same kind, shape and dtype as `tensor`."""
    kind = KINDS.get(type(tensor)) or kind_of(tensor)
    like: Any = tensor
    code_of(like.dtype)
    out: T = kind.wrap(communicator().alloc(int(like.nbytes)), like.dtype, tuple(like.shape))
    return out
