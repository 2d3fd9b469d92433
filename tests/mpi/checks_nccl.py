"""Checks of collectives by NCCL: emulated_nccl.cc on the emulated device, or a GPU for each rank.

CHECKS_NCCL_RANKS=shared: the ranks share a GPU, so none of them goes by NCCL.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks_device_memory import expected, filled, total, ways_of
from tested_device import DEVICE, EMULATED

import dcoll as hvd
from dcoll import _C

DEMANDED = os.environ.get("DCOLL_GPU_ENGINE") == "nccl"
SEVERAL_NODES = os.environ.get("DCOLL_TRANSPORT") == "mpi" or "DCOLL_NODES" in os.environ  # nothing can be opened
BY = {"NCCL"}
SIZES = (0, 1, 5, 1023, 70_001, 600_001)


def way(run: Callable[[], object]) -> set[str]:
    """Empty: not NCCL's."""
    return ways_of(run) & BY


def check_which_way_it_takes() -> None:
    n = hvd.size()
    shared = filled(12 * n, torch.float32, shared=True)
    hvd.broadcast_(shared, 0)  # by which it is found out
    assert way(lambda: hvd.broadcast_(shared, 0)) == BY
    assert way(lambda: hvd.reducescatter(shared, op=hvd.Sum)) == BY
    assert way(lambda: hvd.reducescatter(shared[: 12 * n - 1], op=hvd.Sum)) == set()  # shares differ
    assert way(lambda: hvd.allgather(shared[: 12 * n - hvd.rank()])) == set()
    uneven = torch.tensor([12 * n - n + 1, *[1] * (n - 1)])  # rank 0 gets most, and the others less than they send
    assert way(lambda: hvd.alltoall(shared, uneven)) == set()
    assert n == 3 or way(lambda: hvd.allreduce_(shared, op=hvd.Adasum)) == set()
    if DEMANDED or SEVERAL_NODES:
        for _ in range(10):
            assert way(lambda: hvd.allreduce_(shared)) == BY


def check_the_faster_way_is_found_out() -> None:
    """Where ranks can open each other's memory, too: calls of a size go both ways until it is known which is faster."""
    if DEMANDED or SEVERAL_NODES:
        return
    one = filled(40_000, torch.float32, shared=True)
    found = [bool(way(lambda: hvd.allreduce_(one))) for _ in range(12)]
    assert found[:8] == [True, *[False] * 4, *[True] * 3]
    assert len(set(found[8:])) == 1, found
    other = filled(70, torch.float32, shared=True)  # of another size it is found out anew
    assert [bool(way(lambda: hvd.allreduce_(other))) for _ in range(2)] == [True, False]


def check_sizes_and_places() -> None:
    for count in SIZES:
        want = expected(count, torch.float32, total)
        for shared in (True, False, hvd.rank() == 0):
            for _ in range(3):  # both ways
                one = filled(count, torch.float32, shared)
                assert torch.equal(hvd.allreduce(one, op=hvd.Sum), want)
                assert torch.equal(one, filled(count, torch.float32, False))
                hvd.allreduce_(one, op=hvd.Sum)
                assert torch.equal(one, want)


def check_dtypes_and_operators() -> None:
    whole = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint32, torch.uint64]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, *whole):
        for op, reduce in (
            (hvd.Sum, total),
            (hvd.Product, lambda parts: parts[0] * parts[1] * (parts[2] if len(parts) > 2 else 1)),
            (hvd.Min, lambda parts: torch.stack([p.to(torch.float64) for p in parts]).amin(0).to(parts[0].dtype)),
            (hvd.Max, lambda parts: torch.stack([p.to(torch.float64) for p in parts]).amax(0).to(parts[0].dtype)),
        ):
            if dtype in (torch.uint32, torch.uint64) and op in (hvd.Sum, hvd.Product):
                continue  # torch itself does not add them up
            one = filled(33, dtype, shared=False)
            want = expected(33, dtype, reduce)
            assert torch.equal(hvd.allreduce(one, op=op), want), (dtype, op)


def check_nans_are_kept() -> None:
    """Whichever way a call goes: NCCL itself would lose them."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for op in (hvd.Min, hvd.Max):
            for _ in range(10):
                one = torch.full((1000,), float(hvd.rank()), dtype=dtype, device=DEVICE)
                one[3] = float("nan") if hvd.rank() == 0 else 1.0
                out = hvd.allreduce(one, op=op)
                assert out.isnan().nonzero().flatten().tolist() == [3], (dtype, op)


def check_averages_and_scales() -> None:
    n = hvd.size()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64):
        one = torch.full((100,), n * (hvd.rank() + 1), dtype=dtype, device=DEVICE)
        want = torch.full((100,), n * (n + 1) // 2, dtype=dtype, device=DEVICE)
        for _ in range(2):
            assert torch.equal(hvd.allreduce(one), want)
            assert torch.equal(hvd.allreduce(one, postscale_factor=4.0), want * 4)
            assert torch.equal(hvd.allreduce(one, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5), want * n)
            here = one.clone()
            hvd.allreduce_(here, op=hvd.Sum, prescale_factor=2.0)
            assert torch.equal(here, want * n * 2)


def check_many_at_once_and_by_name() -> None:
    """Sequences of their own, with communicators of their own."""
    n = hvd.size()
    handles: list[Any] = []
    for i in range(12):
        one = torch.full((1000 + i,), float(hvd.rank() + i), device=DEVICE)
        handles.append((i, hvd.allreduce_async(one, op=hvd.Sum)))
        handles.append((i, hvd.allreduce_async(one, op=hvd.Sum, name=f"{hvd.rank()} of {i}"[-4:])))
    for i, handle in handles:
        assert (handle.wait(60) == n * (n - 1) // 2 + n * i).all()


def check_a_set() -> None:
    if hvd.size() < 3:
        return  # it would be the set of all
    for _ in range(3):
        some = hvd.add_process_set([0, hvd.size() - 1])
        one = filled(5, torch.float32, shared=False)
        want = filled(5, torch.float32, shared=False)
        if some.included():
            base = torch.arange(5, device=DEVICE) % 7
            want = (2 * base + hvd.size() + 1).to(torch.float32)
        assert way(lambda one=one, some=some: reduce_in(some, one)) == BY  # type: ignore[misc]
        assert torch.equal(one, want)
        hvd.remove_process_set(some)


def reduce_in(some: hvd.ProcessSet, one: torch.Tensor) -> None:
    if some.included():
        hvd.allreduce_(one, op=hvd.Sum, process_set=some)


def check_others_that_do_not_agree() -> None:
    for _ in range(3):
        with pytest.raises(hvd.MismatchError, match=r"sum of 70002 float32"):
            hvd.allreduce(filled(70_001 if hvd.rank() == 0 else 70_002, torch.float32, True), op=hvd.Sum)
        with pytest.raises(hvd.MismatchError, match=r"called different collectives: .*broadcast"):
            hvd.broadcast(filled(5, torch.float32, True), 1 if hvd.rank() == 0 else 0)
        out = hvd.allreduce(filled(70_001, torch.float32, False), op=hvd.Sum)
        assert torch.equal(out, expected(70_001, torch.float32, total))


def check_ranks_that_have_joined() -> None:
    """All go by the host then, and what was being found out is still the same on all ranks."""
    for count in (10, 70_001, 1_500_001):
        one = filled(count, torch.float32, shared=True)
        if hvd.rank() > 0:
            base = torch.arange(count, device=DEVICE) % 7
            want = sum((base + r + 1).to(torch.float32) for r in range(1, hvd.size()))
            for _ in range(3):
                assert torch.equal(hvd.allreduce(one, op=hvd.Sum), want)
            with pytest.raises(hvd.DcollError, match="cannot do this while some have joined"):
                hvd.broadcast(one, 1)
        hvd.join()
        for _ in range(10):
            out = hvd.allreduce(filled(count, torch.float32, shared=True), op=hvd.Sum)
            assert torch.equal(out, expected(count, torch.float32, total))


def check_a_tensor_on_another_gpu() -> None:
    """On one rank, then on all: this once it goes by the host."""
    if not EMULATED:
        return
    first = _C.EMULATED_DEVICE  # of all tensors there, in dcoll.collectives.tensors
    for elsewhere, want in ((hvd.rank() == hvd.size() - 1, set()), (True, set()), (False, BY)):
        _C.EMULATED_DEVICE = first + elsewhere
        for _ in range(3):
            one = filled(1000, torch.float32, shared=False)
            assert way(lambda one=one: hvd.broadcast_(one, 0)) == want  # type: ignore[misc]
            assert torch.equal(one, (torch.arange(1000) % 7 + 1).to(torch.float32))
    one = filled(10, torch.float32, shared=False)
    assert way(lambda: hvd.broadcast_(one, 0)) == BY
