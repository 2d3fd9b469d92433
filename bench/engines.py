"""What is timed: dcoll's all-reduce in its forms, and the libraries it is compared with."""

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import dcoll
from dcoll import _C
from dcoll.job import world

CORE_OPS = {"sum": _C.SUM, "avg": _C.AVERAGE, "min": _C.MIN, "max": _C.MAX, "prod": _C.PRODUCT}
CORE_DTYPES = {
    torch.int8: _C.INT8, torch.uint8: _C.UINT8, torch.int32: _C.INT32, torch.int64: _C.INT64,
    torch.float16: _C.FLOAT16, torch.bfloat16: _C.BFLOAT16, torch.float32: _C.FLOAT32, torch.float64: _C.FLOAT64,
}  # fmt: skip

Pair = tuple[Any, torch.Tensor]
Call = Callable[[Any, torch.Tensor], torch.Tensor]
"""Reduces the first tensor over all ranks into the second, and returns it; the same tensor twice is in place. A peer's
first argument is the tensor as the peer takes it."""


def dcoll_core(op: str) -> Call:
    """The compiled core's blocking call, which dcoll.allreduce_ ends in."""
    allreduce, code = world.communicator().allreduce_sync, CORE_OPS[op]

    def call(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        allreduce(source.data_ptr(), target.data_ptr(), source.numel(), CORE_DTYPES[source.dtype], code)
        return target

    return call


def dcoll_python(op: str) -> Call:
    """What a script calls. Out of place, the result is a new tensor, as Horovod has it."""
    ops = {"sum": dcoll.Sum, "avg": dcoll.Average, "min": dcoll.Min, "max": dcoll.Max, "prod": dcoll.Product}

    def call(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return dcoll.allreduce_(source, op=ops[op]) if source is target else dcoll.allreduce(source, op=ops[op])

    return call


def mpi4py_peer(op: str) -> Call:
    """mpi4py's buffer interface, in place on a NumPy array. MPI has no average: a user sums and scales."""
    from mpi4py import MPI

    everybody, in_place = MPI.COMM_WORLD, MPI.IN_PLACE
    code = {"sum": MPI.SUM, "avg": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "prod": MPI.PROD}[op]

    def call(array: Any, target: torch.Tensor) -> torch.Tensor:
        everybody.Allreduce(in_place, array, op=code)
        if op == "avg":
            _divide(target, everybody.size)
        return target

    return call


def gloo_peer(op: str) -> Call:
    """torch.distributed over Gloo, in place. Gloo has no average: DDP, too, scales apart from the sum."""
    join_gloo()
    code = {
        "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX,
        "prod": dist.ReduceOp.PRODUCT,
    }[op]  # fmt: skip
    size = dcoll.size()

    def call(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(target, op=code)
        if op == "avg":
            _divide(target, size)
        return target

    return call


def _divide(tensor: torch.Tensor, size: int) -> None:
    if tensor.is_floating_point():
        tensor.mul_(1.0 / size)
    else:
        tensor.div_(size, rounding_mode="trunc")


def join_gloo() -> None:
    """torch.distributed's default group, of the ranks of dcoll's job. Collective. Rank 0 opens the rendezvous at a free
    port and tells the others through dcoll.
    """
    comm = world.communicator()
    address, store = "", None
    if comm.num_nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host name need not resolve, and nothing is faster
        address = "127.0.0.1"
    if comm.rank == 0:
        address = address or socket.getfqdn()
        store = TCPStore(address, 0, comm.size, is_master=True, wait_for_workers=False)
    address, port = dcoll.broadcast_object((address, store.port if store else 0), root_rank=0)
    if store is None:
        store = TCPStore(address, port, comm.size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)


PEER_CALLS = {"mpi4py": mpi4py_peer, "gloo": gloo_peer}


def peer_pair(name: str, tensor: torch.Tensor) -> Pair:
    """What a peer's call is given, made once, as a script would."""
    return (tensor.numpy() if name == "mpi4py" else tensor, tensor)


class Pool:
    """Rotating buffers: `copies(nbytes)` pairs that together exceed the caches, out of one allocation per side."""

    MAX_COPIES = 64
    ALIGNMENT = 64

    def __init__(self, max_bytes: int, cache_bytes: int, dtype: torch.dtype, mapped: bool) -> None:
        self._cache_bytes = cache_bytes
        self._element = torch.empty(0, dtype=dtype).element_size()
        # copies * stride never exceeds this, see copies()
        count = (max(self._stride(max_bytes), 2 * cache_bytes) + self.MAX_COPIES * self.ALIGNMENT) // self._element
        make = dcoll.empty if mapped else torch.empty
        self._sources, self._targets = make((count,), dtype=dtype), make((count,), dtype=dtype)
        # Written, so that every page exists. Zeros stay zeros under every operator, however often it is applied.
        self._sources.fill_(0)
        self._targets.fill_(0)

    def _stride(self, nbytes: int) -> int:
        return max(-(-nbytes // self.ALIGNMENT), 1) * self.ALIGNMENT

    def copies(self, nbytes: int) -> int:
        """One buffer that exceeds the caches needs no second; small ones rotate up to MAX_COPIES."""
        return max(1, min(2 * self._cache_bytes // self._stride(nbytes), self.MAX_COPIES))

    def pairs(self, nbytes: int) -> list[Pair]:
        step, count = self._stride(nbytes) // self._element, nbytes // self._element
        starts = [copy * step for copy in range(self.copies(nbytes))]
        return [(self._sources[at : at + count], self._targets[at : at + count]) for at in starts]
