"""Checks of the collectives beside all-reduce on a device, in memory that ranks have opened of each other, or by NCCL.

With DCOLL_DEVICE=emulated on any machine, else on a GPU. CHECKS_WAY: by which way they are to go; "": by the host's.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks_device_memory import filled, total, ways_of
from tested_device import DEVICE

import dcoll as hvd
from dcoll.collectives import on_communicator
from dcoll.job import world

WAY = os.environ.get("CHECKS_WAY", "device, pull")
SMALL = 64 << 10  # bytes
SLICE = 32 << 20
TYPE = torch.float32
SHARED: tuple[Callable[[], bool], ...] = (lambda: True, lambda: False, lambda: hvd.rank() == 0, lambda: hvd.rank() > 0)
"""Whether a rank's operand lies where others can open it."""


def of_rank(rank: int, count: int, dtype: torch.dtype = TYPE) -> torch.Tensor:
    """What filled() gives on another rank."""
    return (torch.arange(count, device=DEVICE) % 7 + rank + 1).to(dtype)


def check_which_way_they_take() -> None:
    n = hvd.size()
    if n == 1:
        return
    hvd.allreduce(filled(10, TYPE, shared=True))  # by which it is found out
    hvd.allgather(filled(10, TYPE, shared=True))
    for count in (12 * n, SMALL * n):
        for shared in (True, False):
            one = filled(count, TYPE, shared)
            runs: list[Callable[[], object]] = [
                lambda one=one: hvd.broadcast_(one, n - 1),  # type: ignore[misc]
                lambda one=one: hvd.allgather(one),  # type: ignore[misc]
                lambda one=one: hvd.alltoall_async(one).wait(30),  # type: ignore[misc]
                lambda one=one: hvd.reducescatter(one, op=hvd.Sum),  # type: ignore[misc]
            ]
            for i, run in enumerate(runs):
                found = ways_of(run)
                assert (found == {WAY}) if WAY else not any("device" in way or way == "NCCL" for way in found), (
                    i,
                    found,
                )


def counts() -> Iterator[int]:
    edge = SMALL // 4
    yield from (0, 1, 1023, edge, edge + 1, 70_001, 600_011)


def check_broadcasts() -> None:
    for count in counts():
        for shared in SHARED:
            for root in range(hvd.size()):
                one = filled(count, TYPE, shared())
                assert torch.equal(hvd.broadcast(one, root), of_rank(root, count))
                assert torch.equal(one, of_rank(hvd.rank(), count))
                assert hvd.broadcast_(one, root) is one
                assert torch.equal(one, of_rank(root, count))


def check_gathers() -> None:
    """Of as many rows from each rank, and of others; none from some."""
    n = hvd.size()
    for count in counts():
        for rows in ([count] * n, [count + r for r in range(n)], [0] * (n - 1) + [count], [count] + [1] * (n - 1)):
            want = torch.cat([of_rank(r, rows[r]) for r in range(n)])
            for shared in SHARED:
                one = filled(rows[hvd.rank()], TYPE, shared())
                for gather in (hvd.allgather, lambda tensor: hvd.allgather_async(tensor).wait(60)):
                    out = gather(one)
                    assert torch.equal(out, want), (count, rows)
                    assert out.device == one.device
                    assert torch.equal(one, of_rank(hvd.rank(), rows[hvd.rank()]))


def check_gathers_of_rows_without_elements() -> None:
    out = hvd.allgather(torch.empty(hvd.rank() + 2, 0, device=DEVICE))
    assert tuple(out.shape) == (sum(r + 2 for r in range(hvd.size())), 0)


def check_exchanges() -> None:
    n, rank = hvd.size(), hvd.rank()
    for count in counts():
        for shared in SHARED:
            for uneven in (False, True):
                # From each rank to each; some get nothing.
                rows = [[(count // n) * (1 if not uneven else (s + t) % 3) for t in range(n)] for s in range(n)]
                one = filled(sum(rows[rank]), TYPE, shared())
                want = torch.cat(
                    [of_rank(s, sum(rows[s]))[sum(rows[s][:rank]) : sum(rows[s][: rank + 1])] for s in range(n)]
                )
                splits = torch.tensor(rows[rank], dtype=torch.int32)
                for exchange in (hvd.alltoall, lambda t, splits: hvd.alltoall_async(t, splits).wait(60)):
                    out, received = exchange(one, splits)
                    assert torch.equal(out, want), (count, uneven)
                    assert received.tolist() == [rows[s][rank] for s in range(n)]
                    assert out.device == one.device
                if not uneven:
                    assert torch.equal(hvd.alltoall(one), want)


def check_reduce_scatters() -> None:
    n, rank = hvd.size(), hvd.rank()
    for rows, width in ((n, 3), (4 * n, 50_001), (4 * n - 1, 2), (n - 1, 30_000)):
        sums = total([of_rank(r, rows * width) for r in range(n)]).view(rows, width)
        first = [r * (rows // n) + min(r, rows % n) for r in range(n + 1)]
        mine = sums[first[rank] : first[rank + 1]]
        for shared in SHARED:
            one = filled(rows * width, TYPE, shared()).view(rows, width)
            assert torch.equal(hvd.reducescatter(one, op=hvd.Sum), mine)
            assert torch.equal(hvd.reducescatter(one * n), mine)
            assert torch.equal(hvd.reducescatter(one, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25), mine / 2)
            assert torch.equal(one.flatten(), of_rank(rank, rows * width))
        one = filled(rows * width, torch.int32, shared=True).view(rows, width)
        least = of_rank(0, rows * width, torch.int32).view(rows, width)[first[rank] : first[rank + 1]]
        assert torch.equal(hvd.reducescatter(one, op=hvd.Min), least)


def long_of(rank: int, count: int) -> torch.Tensor:
    """Bytes that tell where they are from: 41 is no divisor of a slice. Twice the sum of three ranks is a byte."""
    return (torch.arange(41, dtype=torch.uint8, device=DEVICE) + rank).repeat(count // 41 + 1)[:count]


def check_what_is_longer_than_a_slice() -> None:
    """On all ranks, and on one beside others with less or with none."""
    n, rank = hvd.size(), hvd.rank()
    long = SLICE + 12_345

    def own(count: int, shared: bool) -> torch.Tensor:
        one = long_of(rank, count)
        return hvd.empty(count, torch.uint8, device=DEVICE).copy_(one) if shared else one

    for shared in (False, rank == 0):
        assert torch.equal(hvd.broadcast(own(long, shared), n - 1), long_of(n - 1, long))
        rows = [2 * long if r == 1 else 10 * r for r in range(n)]
        want = torch.cat([long_of(r, rows[r]) for r in range(n)])
        assert torch.equal(hvd.allgather(own(rows[rank], shared)), want)
        splits = [long - 5] * (n - 1) + [7]
        ends = [sum(splits[: r + 1]) for r in range(n)]
        out, _ = hvd.alltoall(own(ends[-1], shared), torch.tensor(splits))
        block = slice(ends[rank] - splits[rank], ends[rank])
        assert torch.equal(out, torch.cat([long_of(r, ends[-1])[block] for r in range(n)]))
        one = own(n * long, shared)
        mine = slice(rank * long, (rank + 1) * long)
        sums = sum(long_of(r, n * long)[mine] for r in range(n))
        assert torch.equal(hvd.reducescatter(one, op=hvd.Sum), sums)
        assert torch.equal(hvd.reducescatter(one, op=hvd.Sum, prescale_factor=2.0), 2 * sums)


def check_results_in_the_operands_place() -> None:
    """As torch.distributed allows: a gather's operand is a part of the result, and a reduction's result of it."""
    n, rank = hvd.size(), hvd.rank()
    kind = on_communicator.kind_of(torch.empty(0))
    code = on_communicator.code_of(TYPE)
    for count in (100, 70_001):
        for shared in (True, False):
            whole = filled(n * count, TYPE, shared)
            mine = whole[rank * count : (rank + 1) * count].copy_(of_rank(rank, count))
            on: Any = kind.on(world.communicator(), whole)
            on.allgather_sync(mine.data_ptr(), count, 4, code, "", whole.data_ptr(), whole.nbytes)
            assert torch.equal(whole, torch.cat([of_rank(r, count) for r in range(n)]))
            whole = filled(n * count, TYPE, shared)
            mine = whole[rank * count : (rank + 1) * count]
            on.reducescatter_sync(whole.data_ptr(), mine.data_ptr(), n * count, 1, code, hvd.Sum)
            sums = total([of_rank(r, n * count) for r in range(n)])
            assert torch.equal(mine, sums[rank * count : (rank + 1) * count])


def check_dtypes() -> None:
    for dtype in (torch.bool, torch.int16, torch.uint8, torch.float16, torch.bfloat16, torch.float64, torch.int64):
        parts = [of_rank(r, 70_003, dtype) for r in range(hvd.size())]
        one = filled(70_003, dtype, shared=True)
        assert torch.equal(hvd.allgather(one), torch.cat(parts))
        assert torch.equal(hvd.broadcast(one, 0), parts[0])


def check_many_at_once() -> None:
    """In order and by name, of all kinds; the operands may be written to when each is done."""
    n, rank = hvd.size(), hvd.rank()
    for count in (1000, 40_000):
        handles: list[tuple[Any, torch.Tensor]] = []
        for i in range(6):
            one = of_rank(rank + i, n * count)
            name = f"number {i}" if i % 2 else None
            parts = [of_rank(r + i, n * count) for r in range(n)]
            mine = slice(rank * count, (rank + 1) * count)
            handles.append((hvd.allgather_async(one, name), torch.cat(parts)))
            handles.append((hvd.broadcast_async(one, 0, name and name + "b"), parts[0]))
            handles.append((hvd.alltoall_async(one, name=name and name + "c"), torch.cat([p[mine] for p in parts])))
            scattered = hvd.reducescatter_async(one, name and name + "d", op=hvd.Sum)
            handles.append((scattered, total(parts)[mine]))
        for handle, want in handles:
            assert torch.equal(handle.wait(60), want)
    for step in range(20):  # the operand of one is written to as soon as it is done
        one = filled(70_000, TYPE, shared=True) + step
        assert torch.equal(hvd.allgather(one), torch.cat([of_rank(r, 70_000) + step for r in range(n)]))
        one.fill_(-1)


def check_others_that_do_not_agree() -> None:
    if hvd.size() == 1:
        return
    for count in (10, 70_001):
        one = filled(count, TYPE, shared=True)
        with pytest.raises(hvd.MismatchError, match="different collectives"):
            hvd.broadcast(one, 0) if hvd.rank() == 0 else hvd.allgather(one)
        with pytest.raises(hvd.MismatchError, match="different collectives"):
            hvd.allreduce(one) if hvd.rank() == 0 else hvd.reducescatter(one)
        assert torch.equal(hvd.allgather(one), torch.cat([of_rank(r, count) for r in range(hvd.size())]))


def check_a_set() -> None:
    if hvd.size() < 3:
        return
    some = hvd.add_process_set([0, hvd.size() - 1])
    if some.included():
        for count in (5, 70_001):
            out = hvd.allgather(filled(count, TYPE, shared=True), process_set=some)
            assert torch.equal(out, torch.cat([of_rank(0, count), of_rank(hvd.size() - 1, count)]))
            one = filled(count, TYPE, shared=False)
            assert torch.equal(hvd.broadcast_(one, hvd.size() - 1, process_set=some), of_rank(hvd.size() - 1, count))
    hvd.remove_process_set(some)
