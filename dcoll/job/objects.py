"""Python objects through the collectives, and agreement on them. Needs neither torch nor NumPy."""

import ctypes
import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

from dcoll import _C
from dcoll.errors import DcollError, MismatchError, text_of

try:
    from cloudpickle import dumps  # type: ignore[import-untyped,unused-ignore]
except ImportError:
    dumps = pickle.dumps


def pickled(obj: Any) -> bytes:
    """Pickled by cloudpickle, where that is installed: functions of scripts and lambdas too."""
    return bytes(dumps(obj))


def _address(data: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) if data else 0


def broadcast_bytes(comm: _C.Communicator, data: bytearray, root: int, name: str) -> None:
    """Overwrite `data`, of the same length everywhere, with the root's."""
    if data:
        comm.broadcast_sync(_address(data), len(data), root, _C.UINT8, name)


def _allgather_views(comm: _C.Communicator, data: bytearray, name: str) -> list[memoryview]:
    """Every rank's bytes, whose lengths may differ."""
    output, counts = comm.allgather_sync(_address(data), len(data), 1, _C.UINT8, name)
    received = memoryview(output or b"").cast("B")
    ends = [sum(counts[: rank + 1]) for rank in range(len(counts))]
    return [received[end - count : end] for end, count in zip(ends, counts, strict=True)]


def allgather_bytes(comm: _C.Communicator, data: bytearray, name: str) -> list[bytes]:
    """A copy of every rank's bytes, whose lengths may differ."""
    return [bytes(view) for view in _allgather_views(comm, data, name)]


def _pickled_or_why(obj: Any) -> tuple[bytes, Exception | None]:
    """The pickled object; or what pickling raised and its text, because the others wait for something and must hear."""
    try:
        return dumps(obj), None
    except Exception as error:
        return text_of(error).encode(), error


def _could_not_pickle(what: str, rank: int, text: bytes | bytearray) -> DcollError:
    return DcollError(f"{what}: rank {rank} could not pickle its object: {text.decode()}")


_HEADER_BYTES = 9  # whether pickling failed, and how many bytes follow
_FIRST_BYTES = 4096  # of the header and, if it fits, the object: a small one needs one broadcast


def broadcast_object(comm: _C.Communicator, obj: Any, root: int, name: str) -> Any:
    """The root's object: itself on the root, an unpickled copy elsewhere."""
    failure: Exception | None = None
    data = bytearray()
    if comm.rank == root:
        packed, failure = _pickled_or_why(obj)
        data = bytearray(packed)
    first = bytearray(_FIRST_BYTES)
    first[:_HEADER_BYTES] = bytes([failure is not None]) + len(data).to_bytes(_HEADER_BYTES - 1, "little")
    room = _FIRST_BYTES - _HEADER_BYTES
    if len(data) <= room:
        first[_HEADER_BYTES : _HEADER_BYTES + len(data)] = data
    broadcast_bytes(comm, first, root, name)
    length = int.from_bytes(first[1:_HEADER_BYTES], "little")
    if comm.rank != root:
        data = first[_HEADER_BYTES : _HEADER_BYTES + length] if length <= room else bytearray(length)
    if length > room:
        broadcast_bytes(comm, data, root, name)
    if failure is not None:
        raise failure
    if first[0]:
        raise _could_not_pickle("broadcast_object", comm.job_ranks[root], data)
    return obj if comm.rank == root else pickle.loads(data)


def allgather_object(comm: _C.Communicator, obj: Any, name: str) -> list[Any]:
    """Every rank's object, in rank order."""
    packed, failure = _pickled_or_why(obj)
    everybodys = _allgather_views(comm, bytearray([failure is not None]) + packed, name)
    if failure is not None:
        raise failure
    for rank, data in zip(comm.job_ranks, everybodys, strict=True):
        if data[0]:
            raise _could_not_pickle("allgather_object", rank, bytes(data[1:]))
    return [pickle.loads(data[1:]) for data in everybodys]


def agree(comm: _C.Communicator, lines: Sequence[str], what: str, remedy: str) -> None:
    """Raise the same MismatchError on every rank, naming the first difference, unless all ranks pass equal lines.

    Costs one small collective when they do.
    """
    if comm.size == 1:
        return
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    if len(set(allgather_bytes(comm, bytearray(digest), what))) == 1:
        return
    lists: list[list[str]] = allgather_object(comm, list(lines), what)
    longest = max(len(one) for one in lists)
    padded = [[*one, *["nothing"] * (longest - len(one))] for one in lists]
    at = next(i for i in range(longest) if len({one[i] for one in padded}) > 1)
    said = "".join(f"\n  rank {rank}: {one[at]}" for rank, one in zip(comm.job_ranks, padded, strict=True))
    raise MismatchError(f"{what}: the ranks differ at number {at}:{said}\n{remedy}")
