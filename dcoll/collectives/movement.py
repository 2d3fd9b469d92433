"""The collectives that only move what they are given, under Horovod's names; as those that reduce (reductions.py)."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

from dcoll.collectives import grouped, on_communicator
from dcoll.collectives.handle import Handle
from dcoll.collectives.inline import inline
from dcoll.collectives.on_communicator import comm_of, lane_of
from dcoll.collectives.tensors import has_gradient
from dcoll.job import objects
from dcoll.job.process_sets import ProcessSet, global_process_set, root_in

T = TypeVar("T")


@inline("broadcast")
def broadcast(tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> T:
    """Return the tensor of rank `root_rank`, a number of the job. The others pass one of the same shape and dtype.

    Differentiable: the root's gradient is the average of all ranks', that of the others zero.
    """
    comm, root = comm_of(process_set), root_in(process_set, root_rank)
    if has_gradient(tensor):
        from dcoll.collectives import autograd

        return cast(T, autograd.broadcast(tensor, process_set, root, name or ""))
    return cast(T, on_communicator.broadcast_sync(comm, tensor, root, name or ""))


@inline("broadcast", in_place=True)
def broadcast_(tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> T:
    """As broadcast(), overwriting the tensor, which is returned."""
    comm, root = comm_of(process_set), root_in(process_set, root_rank)
    return cast(T, on_communicator.broadcast_sync(comm, tensor, root, name or "", in_place=True))


@inline("broadcast", starts=True)
def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a broadcast(). The tensor must not change until the handle is done."""
    return on_communicator.broadcast(lane_of(process_set, name), tensor, root_in(process_set, root_rank), name or "")


@inline("broadcast", in_place=True, starts=True)
def broadcast_async_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a broadcast_(). The tensor must be left alone until the handle is done."""
    return on_communicator.broadcast(
        lane_of(process_set, name), tensor, root_in(process_set, root_rank), name or "", in_place=True
    )


@inline("allgather")
def allgather(tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> T:
    """Concatenate the tensors of all ranks along the first dimension, in which they may differ.

    Differentiable: the gradient is this rank's rows of the average of all ranks' gradients.
    """
    if has_gradient(tensor):
        from dcoll.collectives import autograd

        return cast(T, autograd.allgather(tensor, process_set, name or ""))
    return cast(T, on_communicator.allgather_sync(comm_of(process_set), tensor, name or ""))


@inline("allgather", starts=True)
def allgather_async(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Start an allgather(). The tensor must not change until the handle is done."""
    return on_communicator.allgather(lane_of(process_set, name), tensor, name or "")


@inline("allgather", grouped=True)
def grouped_allgather(
    tensors: Sequence[T], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[T]:
    """allgather() of each of a list of tensors, as one operation, which succeeds or fails as a whole."""
    out: list[T] | None = grouped.allgather_sync(comm_of(process_set), tensors, name or "", carries=True)
    if out is not None:
        return out
    from dcoll.collectives import autograd

    return list(autograd.grouped_allgather(process_set, name or "", *tensors))


@inline("allgather", starts=True, grouped=True)
def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a grouped_allgather(): one handle for all. The tensors are copied at once and may change."""
    return grouped.start_allgather(lane_of(process_set, name), tensors, name or "")


@inline("alltoall")
def alltoall(
    tensor: Any,
    splits: Iterable[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send splits[d] consecutive rows to each rank d of the set and return the received rows in rank order.

    Without splits the rows are shared evenly. With splits the result is (received, received_splits), the latter being
    the number of rows from each rank, int32. Differentiable: the gradient goes back the way the rows came.
    """
    comm = comm_of(process_set)
    if not has_gradient(tensor):
        return on_communicator.alltoall_sync(comm, tensor, splits, name or "")
    from dcoll.collectives import autograd

    rows = on_communicator.splits_of(comm, on_communicator.rows_of(tensor, "alltoall"), splits)
    out, received = autograd.alltoall(tensor, process_set, rows, name or "")
    return out if splits is None else (out, received)


@inline("alltoall", starts=True)
def alltoall_async(
    tensor: Any,
    splits: Iterable[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an alltoall(). The tensor must not change until the handle is done."""
    return on_communicator.alltoall(lane_of(process_set, name), tensor, splits, name or "")


@inline("barrier")
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set is here."""
    comm_of(process_set).barrier_sync()


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of rank `root_rank`, a number of the job, pickled with cloudpickle if that is installed."""
    comm = comm_of(process_set)
    return objects.broadcast_object(comm, obj, root_in(process_set, root_rank), name or "")


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks of the set, in rank order."""
    return objects.allgather_object(comm_of(process_set), obj, name or "")
