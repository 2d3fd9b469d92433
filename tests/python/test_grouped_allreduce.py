"""Grouped all-reduces: the results of one operation per tensor, wherever the tensors and the results lie."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from local_ranks import run_ranks

from dcoll import _C, Average, Max, MismatchError, ReduceOp, Sum
from dcoll.collectives import grouped, on_communicator

# Around cache lines and around the slices of 2 to 8 ranks; 0-dim and empty among them. 60 KB in all.
SHAPES = [(), (0,), (1,), (3, 5), (1000,), (16,), (2, 0), (4097,), (31, 33), (1024,), (8191,), ()]
MIXED = [torch.float32, torch.int64, torch.bfloat16]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    count = int(np.prod(shape, dtype=np.int64))
    return ((torch.arange(count) * 7 + rank * 5 + seed * 3) % 11).to(dtype).view(shape)


def group_of(rank: int, kind: str) -> list[Any]:
    if kind == "tiny":  # beside the post, or in the slots
        return [values(rank, (3,), torch.float32), values(rank, (), torch.float32)]
    if kind == "large":  # results have memory of their own
        return [values(rank, (100_003,), torch.float32, i) for i in range(3)]
    if kind == "mixed":
        return [values(rank, shape, dtype, i) for i, shape in enumerate(SHAPES) for dtype in MIXED]
    if kind == "arrays":
        return [values(rank, shape, torch.float32, i).numpy() for i, shape in enumerate(SHAPES)]
    if kind == "both":
        tensors = [values(rank, shape, torch.float32, i) for i, shape in enumerate(SHAPES)]
        return [tensor.numpy() if i % 2 else tensor for i, tensor in enumerate(tensors)]
    assert kind == "usual"
    return [values(rank, shape, torch.float32, i) for i, shape in enumerate(SHAPES)]


KINDS = ("tiny", "usual", "mixed", "large", "arrays", "both")


def plainly(comm: _C.Communicator, tensors: list[Any], *options: Any) -> list[Any] | None:
    """What the core does by itself; None: nothing."""
    return _C.grouped_allreduce_sync(comm, tensors, False, *options, graded=torch.is_grad_enabled())


def same(got: list[Any], want: list[Any]) -> None:
    assert [type(one) for one in got] == [type(one) for one in want]
    for one, other in zip(map(torch.as_tensor, got), map(torch.as_tensor, want), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert one.is_contiguous()


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_results_are_those_of_single_operations(n: int) -> None:
    def check(comm: _C.Communicator, kind: str, op: ReduceOp, scale: float = 1.0) -> None:
        mine = group_of(comm.rank, kind)
        want = [
            on_communicator.allreduce_sync(comm, tensor, op, "", scale, 2.0 if scale != 1 else 1.0) for tensor in mine
        ]
        options: Any = (op, "g", scale, 2.0 if scale != 1 else 1.0)
        plain = plainly(comm, mine, *options)
        assert plain is not None
        same(plain, want)
        same(mine, group_of(comm.rank, kind))  # as they were
        late = grouped.start_allreduce(comm, mine, *options, in_place=False)
        if comm.rank == n - 1:
            time.sleep(0.01)  # the others go on in the background, or on the ordinary way
        assert grouped.allreduce_sync(comm, mine, *options, in_place=True) is not None
        same(mine, want)
        same(late.wait(60), want)
        same(plain, want)

    def body(comm: _C.Communicator) -> None:
        for kind in KINDS:
            check(comm, kind, Sum)
        for kind in ("tiny", "usual", "large"):
            check(comm, kind, Average)
            check(comm, kind, Max)
            check(comm, kind, Sum, 0.5)

    run_ranks(n, body)


def test_results_outlive_each_other() -> None:
    """New results share memory: it is used again when none of them is left, and not before."""

    def body(comm: _C.Communicator) -> None:
        def reduced(seed: int) -> list[torch.Tensor]:
            mine = [values(comm.rank, (2000,), torch.float32, seed + i) for i in range(8)]
            results: list[torch.Tensor] = grouped.allreduce_sync(comm, mine, Sum, "", 1.0, 1.0)
            return results

        kept = [reduced(seed)[seed % 8] for seed in range(20)]
        for seed, one in enumerate(kept):
            want = values(0, (2000,), torch.float32, seed + seed % 8) + values(
                1, (2000,), torch.float32, seed + seed % 8
            )
            assert torch.equal(one, want)
            one.add_(1)  # no other result, nor its version, is touched
            assert one._version == 1
        assert all(one._version == 1 and not one.requires_grad for one in kept)
        first = reduced(0)
        again = grouped.allreduce_sync(comm, first, Sum, "", 1.0, 1.0)  # results as operands, in the same memory
        assert all(torch.equal(b, 2 * a) for a, b in zip(first, again, strict=True))
        assert all(a.data_ptr() != b.data_ptr() for a, b in zip(first, again, strict=True))
        del first, again
        address = reduced(0)[0].data_ptr()
        assert address == reduced(1)[0].data_ptr()  # nobody kept any

    run_ranks(2, body)


def test_what_the_core_leaves_to_python() -> None:
    def body(comm: _C.Communicator) -> None:
        parameter = torch.nn.Parameter(torch.ones(700))
        group = [torch.ones(700), parameter]
        assert plainly(comm, group, Sum, "", 1.0, 1.0) is None  # the result carries a gradient
        with torch.no_grad():
            results = plainly(comm, group, Sum, "", 1.0, 1.0)
        assert results is not None
        same(results, [torch.full((700,), 2.0)] * 2)
        assert not results[1].requires_grad
        assert plainly(comm, [torch.ones(4, 4).t()], Sum, "", 1.0, 1.0) is None
        group = [torch.ones(700), torch.ones(5)]
        grouped.allreduce_sync(comm, group, Sum, "", 1.0, 1.0, in_place=True)
        assert [tensor._version for tensor in group] == [1, 1]
        nine = torch.ones((1,) * 8 + (600,))  # more dimensions than are read
        assert plainly(comm, [nine], Sum, "", 1.0, 1.0) is None
        assert torch.equal(grouped.allreduce_sync(comm, [nine], Sum, "", 1.0, 1.0)[0], 2 * nine)

    run_ranks(2, body)


def test_a_group_that_fails_changes_nothing() -> None:
    def body(comm: _C.Communicator) -> None:
        mine = [torch.full((1000 + 8 * (comm.rank == 1),), 3.0), torch.full((900,), 4.0)]
        with pytest.raises(MismatchError, match="2 tensors: 1008 float32, 900 float32"):
            grouped.allreduce_sync(comm, mine, Sum, "g", 1.0, 1.0, in_place=True)
        assert mine[0].eq(3).all()
        assert mine[1].eq(4).all()
        mine[0].resize_(1000)
        grouped.allreduce_sync(comm, mine, Sum, "g", 1.0, 1.0, in_place=True)
        assert mine[0].eq(9).all()
        assert mine[1].eq(12).all()

    run_ranks(3, body)
