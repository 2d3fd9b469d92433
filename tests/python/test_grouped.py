"""Groups of tensors that are gathered, or reduced and scattered, as one: the results of one operation per tensor."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from local_ranks import run_ranks

from dcoll import (
    _C,
    ArgumentError,
    Average,
    Compression,
    Max,
    MismatchError,
    Product,
    ReduceOp,
    Sum,
    grouped_reducescatter,
)
from dcoll.collectives import grouped, on_communicator

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.uint8]
LARGE = 70_001


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(np.prod(shape, dtype=np.int64))
    return ((torch.arange(count) * 7 + rank * 5) % 11).to(dtype).view(shape)


class Odd(torch.Tensor):
    """A class of its own, of ones."""

    @staticmethod
    def __new__(cls, size: int) -> "Odd":
        return torch.ones(size).as_subclass(cls)


def ragged(rank: int, n: int) -> list[torch.Tensor]:
    """Of all dtypes, with numbers of rows that differ between ranks, none at all among them."""
    rows = (0, 1, n - 1, rank, n + 1, 40 * rank, 0 if rank % 2 else 3)
    group = [values(rank, k, 3, dtype=dtype) for k in rows for dtype in DTYPES]
    return [*group, values(rank, 2, 0), values(rank, rank + 2)[::2], values(rank, 5, 4, rank + 1).transpose(0, 2)]


def even(n: int, dtypes: list[torch.dtype]) -> Callable[[int], list[torch.Tensor]]:
    rows = (0, 1, n - 1, n, n + 1, 7 * n + 2)
    return lambda rank: [values(rank, k, 3, dtype=dtype) for k in rows for dtype in dtypes] + [values(rank, 2, 0)]


def same(got: list[Any], want: list[Any]) -> None:
    assert [type(one) for one in got] == [type(one) for one in want]
    for one, other in zip(map(torch.as_tensor, got), map(torch.as_tensor, want), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_grouped_allgather(n: int) -> None:
    def body(comm: _C.Communicator) -> None:
        mine = ragged(comm.rank, n)
        want = [on_communicator.allgather_sync(comm, tensor, "") for tensor in mine]
        same(grouped.allgather_sync(comm, mine, "g"), want)
        ordered = [grouped.start_allgather(comm, mine, "") for _ in range(3)]
        named = [grouped.start_allgather(comm.by_name, mine, f"g{i}") for i in range(3)]
        mine[1].zero_()  # copied already
        for handle in reversed(ordered + named):
            same(handle.wait(60), want)
        arrays = [tensor.numpy() for tensor in ragged(comm.rank, n) if tensor.dtype is not torch.bfloat16]
        same(
            grouped.allgather_sync(comm, arrays, ""), [on_communicator.allgather_sync(comm, one, "") for one in arrays]
        )
        odd = [torch.nn.Parameter(torch.ones(2)), Odd(3), values(0, 2, 3).numpy()]  # the core cannot read the second
        assert _C.grouped_allgather(comm, odd) is None
        for group in (odd, odd[::2], odd[:1]):
            with torch.no_grad():
                same(
                    grouped.allgather_sync(comm, group, ""),
                    [on_communicator.allgather_sync(comm, t, "") for t in group],
                )
        large = [values(comm.rank, LARGE + comm.rank, 2), values(comm.rank, 3)]
        same(grouped.allgather_sync(comm, large, ""), [on_communicator.allgather_sync(comm, one, "") for one in large])
        assert grouped.allgather_sync(comm, [], "") == []

    run_ranks(n, body)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_grouped_reducescatter(n: int) -> None:
    def check(comm: _C.Communicator, group: Callable[[int], list[Any]], op: ReduceOp, scale: float = 1.0) -> None:
        mine = group(comm.rank)
        want = [on_communicator.reducescatter_sync(comm, tensor, op, "", scale, scale) for tensor in mine]
        same(grouped.reducescatter_sync(comm, mine, op, "g", scale, scale), want)
        handles = [
            grouped.start_reducescatter(lane, mine, op, "x", scale, scale) for lane in (comm, comm.by_name, comm)
        ]
        mine[1][:] = 0  # copied already
        for handle in reversed(handles):
            same(handle.wait(60), want)

    def body(comm: _C.Communicator) -> None:
        for op in (Sum, Max, Product):
            check(comm, even(n, DTYPES), op)
        floating = even(n, [dtype for dtype in DTYPES if dtype.is_floating_point])
        check(comm, floating, Average)
        check(comm, floating, Sum, 0.5)
        check(comm, lambda rank: [values(rank, 4, 3).numpy(), values(rank, n, dtype=torch.int32).numpy()], Sum)
        check(comm, lambda rank: [values(rank, LARGE, 2), values(rank, 3)], Sum)
        # Not integers: the same order of additions, too.
        check(comm, lambda rank: [values(rank, 33, 5) / (3 + rank), values(rank, 2) / 7], Sum)
        assert grouped.reducescatter_sync(comm, [], Sum, "", 1.0, 1.0) == []

    run_ranks(n, body)


# Where nothing is empty, results of up to 1 MiB in all share a block of memory.
@pytest.mark.parametrize("elements", [1, 7, 1000])
def test_results_that_share_memory(elements: int) -> None:
    def check(comm: _C.Communicator, got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
        same(got, want)
        for one, after in pairwise(got):  # one behind the other, each on a line of its own
            assert after.data_ptr() - one.data_ptr() == -(-one.nbytes // 64) * 64
        for tensor in got:
            assert tensor.data_ptr() % 64 == 0
            assert tensor._version == 0
        kept = got[2].add_(1)
        same(got[:2] + got[3:], want[:2] + want[3:])
        assert got[0]._version == 0
        del got[:]  # the last of them keeps the block
        same([kept], [want[2] + 1])

    def body(comm: _C.Communicator) -> None:
        mine = [values(comm.rank, 4, elements, dtype=dtype) for dtype in DTYPES if dtype is not torch.bool]
        want = [on_communicator.allgather_sync(comm, tensor, "") for tensor in mine]
        check(comm, grouped.allgather_sync(comm, mine, ""), want)
        check(comm, grouped.start_allgather(comm, mine, "").wait(60), want)
        shares = [on_communicator.reducescatter_sync(comm, tensor, Sum, "", 1.0, 1.0) for tensor in mine]
        check(comm, grouped.reducescatter_sync(comm, mine, Sum, "", 1.0, 1.0), shares)

    run_ranks(2, body)


def test_groups_that_differ_are_a_mismatch() -> None:
    def body(comm: _C.Communicator) -> list[str]:
        odd = comm.rank == 2
        groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [
            ([torch.ones(4, 3), torch.ones(2)], [torch.ones(3, 4), torch.ones(2)]),  # as many elements
            ([torch.ones(2)], [torch.ones(2), torch.ones(0)]),
            ([torch.ones(2), torch.ones(3, dtype=torch.int32)], [torch.ones(2, dtype=torch.int32), torch.ones(3)]),
        ]
        many = [torch.ones(2, i + 1) for i in range(9)]
        groups.append((many, [*many[:7], many[8], many[7]]))  # another order, past those in the text
        said = []
        for usual, other in groups:
            mine = other if odd else usual
            for call in (
                lambda mine=mine: grouped.allgather_sync(comm, mine, "g"),
                lambda mine=mine: grouped.start_allgather(comm.by_name, mine, "g").wait(60),
                lambda mine=mine: grouped.reducescatter_sync(comm, mine, Sum, "g", 1.0, 1.0),
            ):
                with pytest.raises(MismatchError) as error:
                    call()
                said.append(str(error.value))
                assert on_communicator.allreduce_sync(comm, torch.ones(1), Sum, "", 1.0, 1.0).item() == 3
        return said

    said = run_ranks(3, body)
    assert said[0] == said[1] == said[2]
    assert "ranks 0, 1 called allgather 'g' (2 tensors: rows of 3 float32, rows of 1 float32)" in said[0][0]
    assert "rank 2 called allgather 'g' (2 tensors: rows of 4 float32, rows of 1 float32)" in said[0][0]
    assert "reducescatter 'g' (sum of 2 tensors: 4 x 3 float32, 2 x 1 float32)" in said[0][2]
    assert "9 tensors: rows of 1 float32, rows of 2 float32, rows of 3 float32, ... #" in said[0][-3]


def test_what_is_only_polled_ends() -> None:
    """No rank waits; and then only one of them does, while the others have gone on to something else."""
    finished = threading.Event()

    def body(comm: _C.Communicator) -> None:
        for lane in (comm, comm.by_name):
            for turn in range(3):
                tensors = [torch.full((size,), float(comm.rank)) for size in (1, 3000, LARGE)]
                names = [f"{turn} {i}" for i in range(3)]
                handles = [
                    on_communicator.allreduce(lane, tensor, Sum, name, 1.0, 1.0)
                    for tensor, name in zip(tensors, names, strict=True)
                ]
                handles.append(grouped.start_allgather(lane, tensors, f"{turn}"))
                deadline = time.monotonic() + 60
                while not all(handle.poll() for handle in handles):
                    assert time.monotonic() < deadline
                    time.sleep(0)
                assert all(handle.wait(0).eq(3).all() for handle in handles[:3])
        handle = on_communicator.allreduce(comm.by_name, torch.ones(1), Sum, "left", 1.0, 1.0)
        if comm.rank == 1:
            assert handle.wait(60).item() == 3
            finished.set()
        assert finished.wait(60)
        assert handle.wait(60).item() == 3

    run_ranks(3, body)


def test_wrong_arguments_of_groups() -> None:
    def body(comm: _C.Communicator) -> None:
        for wrong, message in (
            (torch.ones(2), "takes a list of tensors"),
            ([torch.ones(2), torch.tensor(1.0)], "without dimensions"),
            ([torch.ones(2), [1.0]], "convert it with"),
            ([torch.ones(2), torch.ones(2, dtype=torch.complex64)], "dtype"),
        ):
            with pytest.raises(ArgumentError, match=message):
                grouped.allgather_sync(comm, wrong, "")
            with pytest.raises(ArgumentError, match=message):
                grouped.start_reducescatter(comm, wrong, Sum, "", 1.0, 1.0)
        with pytest.raises(ArgumentError, match="the average of bool"):
            grouped.reducescatter_sync(comm, [torch.ones(2), torch.ones(2, dtype=torch.bool)], Average, "", 1.0, 1.0)
        with pytest.raises(ArgumentError, match="op is"):
            grouped.reducescatter_sync(comm, [torch.ones(2)], 1, "", 1.0, 1.0)  # type: ignore[arg-type]
        mine = torch.ones(2)  # the core is given an address: whoever gives it keeps the tensor
        handle = _C.grouped_allgather(comm, [(mine.data_ptr(), (2,), 1, _C.FLOAT32)])
        assert handle is not None
        handle.wait()
        assert handle.rows() == [4]
        comm.barrier_sync()

    run_ranks(2, body)


def test_a_strided_parameter_may_be_the_first_of_all() -> None:
    """A row-major copy of a Parameter is a Tensor, of which nothing was called yet."""
    code = (
        "import torch, dcoll as hvd; hvd.init(); p = torch.nn.Parameter(torch.arange(12.0).view(3, 4).t()); "
        "print(torch.equal(hvd.grouped_allgather([p])[0], p), torch.equal(hvd.grouped_reducescatter([p])[0], p))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "True True\n", done.stderr


def test_a_tensor_is_no_list_of_its_rows(job: None) -> None:
    for compression in (Compression.none, Compression.fp16):
        with pytest.raises(ArgumentError, match="grouped_reducescatter takes a list of tensors, but got a Tensor"):
            grouped_reducescatter(torch.ones(2, 3), compression=compression)
