"""The collectives that bench/network_job.py times, each by dcoll, MPI and Gloo, with inputs whose results are known."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

import dcoll as hvd
from dcoll import _C
from dcoll.job import world

Call = Callable[[int], torch.Tensor]  # of so many elements, of the larger of input and result; where the result is


class Collective(NamedTuple):
    fill: Callable[[int], None]
    want: Callable[[int], torch.Tensor]
    calls: dict[str, Call]


def small(rank: int, begin: int, end: int) -> torch.Tensor:
    """Small integers, whose sums are exact."""
    return (torch.arange(begin, end) % 64 + rank).float()


def total(begin: int, end: int) -> torch.Tensor:
    return torch.stack([small(rank, begin, end) for rank in range(hvd.size())]).sum(0)


def all_reduce(buffer: torch.Tensor) -> Collective:
    """In place: what is chosen, every algorithm there is, and the peers."""
    from mpi4py import MPI

    comm, mpi, flat = world.communicator(), MPI.COMM_WORLD, buffer.numpy()
    names = ["auto", *(name for collective, name, _ in _C.plan.algorithms() if collective == "all_reduce")]
    if comm.num_nodes < comm.size:
        names.append("hierarchical")

    def by(call: Callable[[int], object]) -> Call:
        def in_place(count: int) -> torch.Tensor:
            call(count)
            return buffer[:count]

        return in_place

    def dcoll_by(algo: str) -> Call:
        at = buffer.data_ptr()
        return by(lambda count: comm.allreduce_sync(at, at, count, _C.FLOAT32, _C.SUM, "bench", algo=algo))

    def fill(count: int) -> None:
        buffer[:count] = small(hvd.rank(), 0, count)

    calls = {f"dcoll {name}": dcoll_by(name) for name in names}
    calls["Open MPI"] = by(lambda count: mpi.Allreduce(MPI.IN_PLACE, flat[:count]))
    calls["Gloo"] = by(lambda count: dist.all_reduce(buffer[:count]))
    return Collective(fill, lambda count: total(0, count), calls)


def broadcast(buffer: torch.Tensor) -> Collective:
    """In place, from rank 0."""
    from mpi4py import MPI

    mpi, flat = MPI.COMM_WORLD, buffer.numpy()

    def fill(count: int) -> None:
        buffer[:count] = small(hvd.rank(), 0, count)

    def by_mpi(count: int) -> torch.Tensor:
        mpi.Bcast(flat[:count], 0)
        return buffer[:count]

    def by_gloo(count: int) -> torch.Tensor:
        dist.broadcast(buffer[:count], 0)
        return buffer[:count]

    calls: dict[str, Call] = {
        "dcoll auto": lambda count: hvd.broadcast_(buffer[:count], 0), "Open MPI": by_mpi, "Gloo": by_gloo
    }  # fmt: skip
    return Collective(fill, lambda count: small(0, 0, count), calls)


def all_gather(buffer: torch.Tensor) -> Collective:
    """Of equal parts. dcoll's results are new, here and below; the peers are given memory for theirs."""
    from mpi4py import MPI

    mpi, size = MPI.COMM_WORLD, hvd.size()
    mine = torch.zeros(len(buffer) // size)

    def fill(count: int) -> None:
        mine[: count // size] = small(hvd.rank(), 0, count // size)

    def by_mpi(count: int) -> torch.Tensor:
        mpi.Allgather(mine[: count // size].numpy(), buffer[:count].numpy())
        return buffer[:count]

    def by_gloo(count: int) -> torch.Tensor:
        dist.all_gather(list(buffer[:count].chunk(size)), mine[: count // size])
        return buffer[:count]

    calls: dict[str, Call] = {
        "dcoll auto": lambda count: hvd.allgather(mine[: count // size]), "Open MPI": by_mpi, "Gloo": by_gloo
    }  # fmt: skip
    return Collective(fill, lambda count: torch.cat([small(r, 0, count // size) for r in range(size)]), calls)


def reduce_scatter(buffer: torch.Tensor) -> Collective:
    """The sum of equal parts."""
    from mpi4py import MPI

    mpi, size, rank = MPI.COMM_WORLD, hvd.size(), hvd.rank()
    mine = torch.zeros(len(buffer) // size)

    def fill(count: int) -> None:
        buffer[:count] = small(rank, 0, count)

    def by_mpi(count: int) -> torch.Tensor:
        mpi.Reduce_scatter_block(buffer[:count].numpy(), mine[: count // size].numpy())
        return mine[: count // size]

    def by_gloo(count: int) -> torch.Tensor:
        dist.reduce_scatter(mine[: count // size], list(buffer[:count].chunk(size)))
        return mine[: count // size]

    calls: dict[str, Call] = {
        "dcoll auto": lambda count: hvd.reducescatter(buffer[:count], op=hvd.Sum), "Open MPI": by_mpi, "Gloo": by_gloo
    }  # fmt: skip
    return Collective(fill, lambda count: total(rank * count // size, (rank + 1) * count // size), calls)


def all_to_all(buffer: torch.Tensor) -> Collective:
    """Of equal parts."""
    from mpi4py import MPI

    mpi, size, rank = MPI.COMM_WORLD, hvd.size(), hvd.rank()
    result = torch.zeros(len(buffer))

    def fill(count: int) -> None:
        buffer[:count] = small(rank, 0, count)

    def want(count: int) -> torch.Tensor:
        part = count // size
        return torch.cat([small(source, rank * part, (rank + 1) * part) for source in range(size)])

    def by_mpi(count: int) -> torch.Tensor:
        mpi.Alltoall(buffer[:count].numpy(), result[:count].numpy())
        return result[:count]

    def by_gloo(count: int) -> torch.Tensor:
        dist.all_to_all_single(result[:count], buffer[:count])
        return result[:count]

    calls: dict[str, Call] = {
        "dcoll auto": lambda count: hvd.alltoall(buffer[:count]), "Open MPI": by_mpi, "Gloo": by_gloo
    }  # fmt: skip
    return Collective(fill, want, calls)


COLLECTIVES = {f.__name__: f for f in (all_reduce, all_gather, reduce_scatter, broadcast, all_to_all)}
