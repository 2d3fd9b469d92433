"""The collectives on a given communicator. reductions.py and movement.py have them under Horovod's names, on the
communicator of the job.

Every function that starts a collective returns a Handle; those called *_sync run it on the calling thread.
"""

import contextlib
import math
import operator
from collections.abc import Iterable
from typing import Any

from dcoll import _C
from dcoll.collectives.handle import Handle
from dcoll.collectives.tensors import KINDS, Kind, code_of, kind_of
from dcoll.compression.codecs import Compression, encode
from dcoll.errors import ArgumentError, DcollError
from dcoll.job.process_sets import ProcessSet, communicator_of, global_process_set
from dcoll.job.world import WORLD, communicator
from dcoll.ops import ReduceOp, wrong_op

Lane = _C.Communicator | _C.OnDevice
"""Where an asynchronous operation is started: in order, or to meet those of its name."""


def comm_of(process_set: ProcessSet) -> _C.Communicator:
    """Whose ranks work together."""
    if process_set is global_process_set:
        return WORLD.comm or communicator()
    return communicator_of(process_set)


def lane_of(process_set: ProcessSet, name: str | None) -> Lane:
    """Where an asynchronous operation goes: one with a name meets those of that name on the other ranks."""
    comm = comm_of(process_set)
    return comm.by_name if name else comm


def _allreduce_args(comm: Lane, tensor: Any, op: ReduceOp, in_place: bool) -> tuple[Kind, Any, Any, Any, Any, Any]:
    """The dense operand, the result, what has the collectives there, and what they take around the options."""
    if type(op) is not ReduceOp:
        raise wrong_op(op)
    kind = KINDS.get(type(tensor)) or kind_of(tensor)
    source = kind.writable(tensor) if in_place else kind.dense(tensor)
    code = code_of(source.dtype)
    out = source if in_place else kind.empty_like(source)
    args = (kind.address(source), kind.address(out), kind.count(source), code, op)
    return kind, source, out, kind.on(comm, source), args, source.shape if source.ndim > 1 else ()


def allreduce_sync(
    comm: _C.Communicator,
    tensor: Any,
    op: ReduceOp,
    name: str,
    prescale: float = 1.0,
    postscale: float = 1.0,
    algo: str = "",
    codec: str = "",
    in_place: bool = False,
) -> Any:
    kind, source, out, on, args, dims = _allreduce_args(comm, tensor, op, in_place)
    on.allreduce_sync(*args, name, prescale, postscale, algo, dims, codec)
    if in_place:
        return stored(tensor, source)
    return out if source is tensor else kind.like(tensor, out)


def allreduce(
    comm: Lane,
    tensor: Any,
    op: ReduceOp,
    name: str,
    prescale: float = 1.0,
    postscale: float = 1.0,
    algo: str = "",
    codec: str = "",
    group: str = "",
    in_place: bool = False,
) -> Handle:
    """group: what is in the tensor, if that is several."""
    kind, source, out, on, args, dims = _allreduce_args(comm, tensor, op, in_place)
    core = on.allreduce(*args, name, prescale, postscale, algo, dims, codec, group)
    if in_place:
        return _in_place(core, tensor, source)
    if source is tensor:
        return Handle(core, source, None, out)
    return Handle(core, (source, out), lambda _: kind.like(tensor, out), None)


def start_allreduce(
    comm: Lane, tensor: Any, compression: Any, options: tuple[ReduceOp, str, float, float, str], in_place: bool
) -> Handle:
    """allreduce() of what travels compressed, or not. options: its own, but for the codec.

    In place, what a compressor of the program's own makes of the result is in the tensor after wait(), or a poll() that
    says so.
    """
    sent, context, codec = encode(compression, tensor, options[0])
    if codec or compression is Compression.none:
        return allreduce(comm, tensor, *options, codec, in_place=in_place)

    def wide(out: Any) -> Any:
        whole = compression.decompress(out, context)
        return stored(tensor, whole) if in_place else whole

    return allreduce(comm, sent, *options).then(wide)


def _in_place(core: _C.Handle, tensor: Any, target: Any) -> Handle:
    if target is not tensor:
        return Handle(core, target, lambda _: stored(tensor, target), tensor)
    return Handle(core, None, None, stored(tensor, target))


def stored(tensor: Any, target: Any) -> Any:
    """The tensor, which the core has written to, or will; or to `target` in its place."""
    kind = KINDS[type(tensor)]
    if target is tensor:
        kind.changed(tensor)
    else:
        kind.store(tensor, target)
    return tensor


def refuse(comm: _C.Communicator, calls: int, why: str) -> None:
    """So many calls that the other ranks make, and this one cannot: they fail there, with the reason. Does not wait."""
    with contextlib.suppress(DcollError):  # of a communicator that has failed, which all ranks know
        for _ in range(calls if comm.size > 1 else 0):
            comm.refuse(why)


def broadcast(comm: Lane, tensor: Any, root: int, name: str, in_place: bool = False) -> Handle:
    kind, source, out, on, args = _broadcast_args(comm, tensor, root, in_place)
    core = on.broadcast(*args, name, source.shape)
    if in_place:
        return _in_place(core, tensor, source)
    if source is tensor:
        return Handle(core, None, None, out)
    return Handle(core, out, lambda _: kind.like(tensor, out), None)


def broadcast_sync(comm: _C.Communicator, tensor: Any, root: int, name: str, in_place: bool = False) -> Any:
    kind, source, out, on, args = _broadcast_args(comm, tensor, root, in_place)
    on.broadcast_sync(*args, name, source.shape)
    if in_place:
        return stored(tensor, source)
    return out if source is tensor else kind.like(tensor, out)


def _broadcast_args(
    comm: Lane, tensor: Any, root: int, in_place: bool
) -> tuple[Kind, Any, Any, Any, tuple[int, int, int, int]]:
    """As _allreduce_args(); the result has the root's values."""
    kind = KINDS.get(type(tensor)) or kind_of(tensor)
    source = kind.writable(tensor) if in_place else kind.dense(tensor)
    code = code_of(source.dtype)
    out = source if in_place else kind.empty_like(source)
    if comm.rank == root and not in_place:
        kind.store(out, source)
    return kind, source, out, kind.on(comm, source), (kind.address(out), out.nbytes, root, code)


def rows_of(tensor: Any, what: str) -> int:
    """The first dimension, which `what` works on."""
    if tensor.ndim == 0:
        raise ArgumentError(
            f"{what} got a tensor without dimensions, but it works on the first one: pass tensor.reshape(1)"
        )
    return int(tensor.shape[0])


def allgather(comm: Lane, tensor: Any, name: str, of: str = "") -> Handle:
    """of: what the rows stand for, the same on all ranks."""
    kind = KINDS.get(type(tensor)) or kind_of(tensor)
    source = kind.dense(tensor)
    out, args = _allgather_args(comm, kind, source)
    core = kind.on(comm, source).allgather(*args[:4], name, *args[4:], group=of)
    return Handle(core, (source, out), lambda done: _rows(out, done.output(), source, done.counts()), None)


def _allgather_args(comm: Lane, kind: Kind, source: Any) -> tuple[Any, tuple[int, int, int, int, int, int, Any]]:
    """A result, if ranks bring as many rows as this one, as they mostly do; and what the core takes but the name."""
    rows = rows_of(source, "allgather")
    row_bytes = _row_bytes(source)
    guess = rows * comm.size
    out, address, nbytes = _guess(kind, source, guess, guess * row_bytes)
    return out, (kind.address(source), rows, row_bytes, code_of(source.dtype), address, nbytes, source.shape[1:])


_GUESS_BYTES = 128 << 10  # up to here a tensor of ours is cheaper than wrapping memory of the core


def _row_bytes(tensor: Any) -> int:
    shape = tensor.shape
    return int(tensor.nbytes) // int(shape[0]) if shape[0] else math.prod(shape[1:]) * int(tensor.itemsize)


def _guess(kind: Kind, source: Any, rows: int, nbytes: int) -> tuple[Any, int, int]:
    """A result of `rows` rows, its address and size; or None, 0, 0 where guessing does not pay. On a device it always
    does: what the core makes is in the host's memory."""
    if nbytes > 0 and (nbytes <= _GUESS_BYTES or kind.on_device(source)):
        with contextlib.suppress(RuntimeError):  # out of memory, which the right size may not be
            out = kind.new_empty(source, (rows, *source.shape[1:]))
            return out, kind.address(out), nbytes
    return None, 0, 0


def wrap_rows(tensor: Any, output: _C.Buffer, counts: list[int]) -> Any:
    """The core's memory as a result of an all-gather or all-to-all of `tensor`."""
    kind = KINDS.get(type(tensor)) or kind_of(tensor)
    return kind.wrap(output, tensor.dtype, (sum(counts), *tensor.shape[1:]), tensor)


def _rows(guess: Any, output: _C.Buffer | None, source: Any, counts: list[int]) -> Any:
    """The guess, where the core has used it."""
    return guess if output is None else wrap_rows(source, output, counts)


def allgather_sync(comm: _C.Communicator, tensor: Any, name: str) -> Any:
    kind = KINDS.get(type(tensor)) or kind_of(tensor)
    source = kind.dense(tensor)
    out, args = _allgather_args(comm, kind, source)
    output, counts = kind.on(comm, source).allgather_sync(*args[:4], name, *args[4:])
    return _rows(out, output, source, counts)


def reducescatter(comm: Lane, tensor: Any, op: ReduceOp, name: str, prescale: float, postscale: float) -> Handle:
    source, out, args = _reducescatter_args(comm, tensor, op)
    on = KINDS[type(tensor)].on(comm, source)
    return Handle(on.reducescatter(*args, name, prescale, postscale, source.shape[1:]), source, None, out)


def reducescatter_sync(
    comm: _C.Communicator, tensor: Any, op: ReduceOp, name: str, prescale: float, postscale: float
) -> Any:
    source, out, args = _reducescatter_args(comm, tensor, op)
    KINDS[type(tensor)].on(comm, source).reducescatter_sync(*args, name, prescale, postscale, source.shape[1:])
    return out


def _reducescatter_args(
    comm: Lane, tensor: Any, op: ReduceOp
) -> tuple[Any, Any, tuple[int, int, int, int, int, ReduceOp]]:
    """The dense operand, this rank's share of the result, and what the core takes of both."""
    if type(op) is not ReduceOp:
        raise wrong_op(op)
    kind = KINDS.get(type(tensor)) or kind_of(tensor)
    source = kind.dense(tensor)
    rows = rows_of(source, "reducescatter")
    code = code_of(source.dtype)
    out = kind.new_empty(source, (rows // comm.size + (comm.rank < rows % comm.size), *source.shape[1:]))
    return source, out, (kind.address(source), kind.address(out), rows, math.prod(source.shape[1:]), code, op)


def alltoall(comm: Lane, tensor: Any, splits: Iterable[int] | None, name: str) -> Handle:
    kind, source, out, args = _alltoall_args(comm, tensor, splits)

    def finish(done: _C.Handle) -> Any:
        counts = done.counts()
        result = _rows(out, done.output(), source, counts)
        return result if splits is None else (result, kind.counts(counts))

    return Handle(kind.on(comm, source).alltoall(*args[:4], name, *args[4:]), (source, out), finish, None)


def alltoall_sync(comm: _C.Communicator, tensor: Any, splits: Iterable[int] | None, name: str) -> Any:
    kind, source, out, args = _alltoall_args(comm, tensor, splits)
    output, counts = kind.on(comm, source).alltoall_sync(*args[:4], name, *args[4:])
    result = _rows(out, output, source, counts)
    return result if splits is None else (result, kind.counts(counts))


def _alltoall_args(
    comm: Lane, tensor: Any, splits: Iterable[int] | None
) -> tuple[Kind, Any, Any, tuple[int, list[int], int, int, int, int, Any]]:
    """The dense operand; a result, if as many rows come back, as what is shared evenly does; and what the core takes
    but the name."""
    kind = KINDS.get(type(tensor)) or kind_of(tensor)
    source = kind.dense(tensor)
    rows = rows_of(source, "alltoall")
    send = splits_of(comm, rows, splits)
    row_bytes = _row_bytes(source)
    out, address, nbytes = _guess(kind, source, rows, rows * row_bytes)
    return (
        kind,
        source,
        out,
        (kind.address(source), send, row_bytes, code_of(source.dtype), address, nbytes, source.shape[1:]),
    )


def splits_of(comm: Lane, rows: int, splits: Iterable[int] | None) -> list[int]:
    """How many rows go to each rank."""
    if splits is None:
        if rows % comm.size:
            raise ArgumentError(
                f"alltoall without splits got {rows} rows, which {comm.size} ranks cannot share evenly: pass splits="
            )
        return [rows // comm.size] * comm.size
    try:
        send = [operator.index(split) for split in splits]
    except TypeError:
        raise ArgumentError(
            f"alltoall got splits {splits!r}, but takes {comm.size} whole numbers, one per rank: a sequence, or a "
            "tensor or array of an integer dtype"
        ) from None
    if len(send) != comm.size or min(send) < 0 or sum(send) != rows:
        raise ArgumentError(
            f"alltoall got splits {send}, but needs {comm.size} numbers, one per rank, none negative, that sum to the "
            f"tensor's {rows} rows"
        )
    return send
