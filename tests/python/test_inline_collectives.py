"""The collectives that are done in C: their results, and that all other calls reach the Python function untouched."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from local_ranks import run_ranks
from reference import DTYPES, sample

import dcoll
from dcoll import _C, MismatchError, ReduceOp, Sum
from dcoll.collectives import on_communicator
from dcoll.collectives.handle import Handle
from dcoll.compression import Compression

OPS = tuple(ReduceOp)
# Around what fits beside a post (88 bytes, as float32 from one rank or shared by several) and above what is copied
# through slots at once.
ROWS = (1, 2, 3, 5, 7, 8, 11, 12, 22, 23, 24, 1000, 40_000)


pytestmark = pytest.mark.usefixtures("reader")


def never(*_args: Any, **_kwargs: Any) -> None:
    raise AssertionError("a plain call reached the Python function")


def inline(comm: _C.Communicator, kind: str, in_place: bool = False, otherwise: Callable[..., Any] = never) -> Any:
    return _C.InlineCall(otherwise, kind, OPS, in_place, comm, Compression.none, on_communicator.wrap_rows)


def brought(rank: int, rows: int, library: str, width: int = 1) -> Any:
    values = torch.arange(rows * width, dtype=torch.float32).remainder(13).add(17 * rank)
    values = values.view(rows, width) if width > 1 else values
    return values if library == "torch" else values.numpy()


def same(got: Any, want: Any) -> bool:
    return type(got) is type(want) and got.dtype == want.dtype and got.shape == want.shape and bool((got == want).all())


def joined(parts: list[Any]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts)


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_collective_and_size(n: int, library: str) -> None:
    def body(comm: _C.Communicator) -> None:
        me = comm.rank
        barrier, broadcast, broadcast_ = (
            inline(comm, "barrier"),
            inline(comm, "broadcast"),
            inline(comm, "broadcast", True),
        )
        gather, scatter, exchange = (inline(comm, kind) for kind in ("allgather", "reducescatter", "alltoall"))
        for rows in ROWS:
            assert barrier() is None
            all_of_them = [brought(rank, rows, library) for rank in range(n)]
            mine, root = brought(me, rows, library), rows % n
            assert same(broadcast(mine, root), all_of_them[root])
            assert same(mine, all_of_them[me]), "the input changed"
            assert broadcast_(mine, root_rank=root) is mine
            assert same(mine, all_of_them[root])
            mine = brought(me, rows, library)
            if 4 * rows * n <= 128 << 10:
                assert same(gather(mine), joined(all_of_them))
            begins = [rows // n * rank + min(rank, rows % n) for rank in range(n + 1)]
            total = sum(all_of_them[1:], all_of_them[0])
            assert same(scatter(mine, op=Sum), total[begins[me] : begins[me + 1]])
            assert same(
                scatter(mine, op=Sum, prescale_factor=0.5, postscale_factor=2.0), total[begins[me] : begins[me + 1]]
            )
            shared = brought(me, rows * n, library)
            sent = [brought(rank, rows * n, library)[rows * me : rows * (me + 1)] for rank in range(n)]
            if 4 * rows * n <= 128 << 10:
                assert same(exchange(shared), joined(sent))

    run_ranks(n, body)


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_asynchronous_ones(library: str) -> None:
    n = 3

    def body(comm: _C.Communicator) -> None:
        def started(kind: str, in_place: bool = False, otherwise: Callable[..., Any] = never) -> Any:
            return _C.InlineCall(otherwise, kind, OPS, in_place, comm, None, on_communicator.wrap_rows, Handle)

        me = comm.rank
        for rows in ROWS:
            all_of_them, root = [brought(rank, rows, library) for rank in range(n)], rows % n
            mine, other = brought(me, rows, library), brought(me, rows, library)
            begins = [rows // n * rank + min(rank, rows % n) for rank in range(n + 1)]
            total = sum(all_of_them[1:], all_of_them[0])
            handles = [
                started("broadcast")(mine, root),
                started("reducescatter")(mine, op=Sum),
                started("broadcast", True)(other, root, "by name"),
            ]
            assert all(type(handle) is Handle for handle in handles)
            assert same(handles[0].wait(), all_of_them[root])
            assert same(handles[1].wait(), total[begins[me] : begins[me + 1]])
            assert handles[2].wait() is other
            assert same(other, all_of_them[root])
            assert same(mine, all_of_them[me]), "an operand changed"
        for kind in ("allgather", "alltoall"):  # how large their results are only the collective tells
            assert started(kind, False, lambda *_a, **_k: "python")(brought(me, n, library)) == "python"

    run_ranks(n, body)


def test_rows_of_several_elements() -> None:
    def body(comm: _C.Communicator) -> None:
        parts = [brought(rank, 4, "torch", 3) for rank in range(2)]
        mine = parts[comm.rank]
        assert same(inline(comm, "allgather")(mine), torch.cat(parts))
        assert same(inline(comm, "alltoall")(mine), torch.cat([part[2 * comm.rank :][:2] for part in parts]))
        scattered = inline(comm, "reducescatter")(mine)
        assert same(scattered, ((parts[0] + parts[1]) / 2)[2 * comm.rank :][:2]), "the default is the average"

    run_ranks(2, body)


@pytest.mark.parametrize("scale", [1, 7, 30_000])
def test_ranks_that_bring_different_numbers_of_rows(scale: int) -> None:
    def body(comm: _C.Communicator) -> None:
        rows = [scale * (rank + 1) for rank in range(3)]
        for library in ("torch", "numpy"):
            parts = [brought(rank, rows[rank], library) for rank in range(3)]
            if 3 * 4 * rows[2] <= 128 << 10:
                assert same(inline(comm, "allgather")(parts[comm.rank]), joined(parts))
            else:
                assert same(on_communicator.allgather_sync(comm, parts[comm.rank], ""), joined(parts))
            # One rank's splits are uneven: not done in C there, and the others receive what they did not guess.
            sent = brought(comm.rank, 6 * scale, library)
            uneven = [scale, 2 * scale, 3 * scale]
            if comm.rank == 0:
                got = on_communicator.alltoall_sync(comm, sent, uneven, "")[0]
            else:
                got = inline(comm, "alltoall", False, lambda x: on_communicator.alltoall_sync(comm, x, None, ""))(sent)
            begins, each = [0, scale, 3 * scale, 6 * scale], 2 * scale
            want = [brought(0, 6 * scale, library)[begins[comm.rank] : begins[comm.rank + 1]]]
            want += [brought(r, 6 * scale, library)[each * comm.rank :][:each] for r in (1, 2)]
            assert same(got, joined(want))

    run_ranks(3, body)


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_large_results_are_tensors_like_others(library: str, reader: str) -> None:
    """Above 128 KiB results lie in memory of the core, which outlives the communicator and is used again."""
    rows, width = 300, 500
    in_python = library == "torch" and reader == "methods"  # there C cannot give memory to torch

    def body(comm: _C.Communicator) -> list[Any]:
        me = comm.rank
        all_of_them = [brought(rank, rows, library, width) for rank in range(2)]
        mine = all_of_them[me]
        half = slice(me * rows // 2, (me + 1) * rows // 2)
        kept = []
        for turn in range(3):  # the second one finds the blocks of the first
            gather = inline(comm, "allgather", otherwise=lambda x: on_communicator.allgather_sync(comm, x, ""))
            exchange = inline(comm, "alltoall", otherwise=lambda x: on_communicator.alltoall_sync(comm, x, None, ""))
            if not in_python:
                gather, exchange = inline(comm, "allgather"), inline(comm, "alltoall")
            results = [
                (inline(comm, "broadcast")(mine, 1), all_of_them[1]),
                (gather(mine), joined(all_of_them)),
                (exchange(mine), joined([each[half] for each in all_of_them])),
                (inline(comm, "reducescatter")(mine, op=Sum), sum(all_of_them)[half]),
                (all_reduce(comm)(mine, op=Sum), sum(all_of_them)),
            ]
            for got, want in results:
                assert same(got, want)
                got[...] += turn + 1  # may be written to
                assert same(got, want + turn + 1)
            kept = [got for got, _ in results]
        return kept

    for kept in run_ranks(2, body):
        for one, another in itertools.pairwise(kept):
            one[...] = 1
            assert not (another == 1).all()


def all_reduce(comm: _C.Communicator) -> Any:
    return _C.InlineCall(never, "allreduce", OPS, False, comm, Compression.none)


@pytest.mark.parametrize("reader", ["exchange"], indirect=True)  # with methods all of it happens in Python
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_results_of_every_dtype(dtype: torch.dtype) -> None:
    def body(comm: _C.Communicator) -> None:
        parts = [sample(rank, 200_000, dtype, Sum) for rank in range(2)]
        got = inline(comm, "allgather")(parts[comm.rank])
        assert got.dtype is dtype
        assert torch.equal(got, torch.cat(parts))
        assert got.is_contiguous()
        assert not got.requires_grad

    run_ranks(2, body)


def test_mixed_with_asynchronous_calls_of_the_same_kind() -> None:
    def body(comm: _C.Communicator) -> None:
        for turn in range(20):
            parts = [brought(rank, 3 + turn, "torch") for rank in range(2)]
            if (comm.rank + turn) % 2:
                got = inline(comm, "allgather")(parts[comm.rank])
            else:
                got = on_communicator.allgather(comm, parts[comm.rank], "").wait()
            assert same(got, torch.cat(parts))

    run_ranks(2, body)


def test_mismatches_are_reported_on_every_rank_and_the_job_goes_on() -> None:
    def body(comm: _C.Communicator) -> None:
        me, x = comm.rank, torch.ones(4)
        calls: list[Callable[[], Any]] = [
            lambda: inline(comm, "broadcast", True)(torch.ones(4 + me), 0),
            lambda: inline(comm, "broadcast", True)(x, me),
            lambda: inline(comm, "broadcast")(x.to([torch.float32, torch.int32][me]), 0),
            lambda: inline(comm, "allgather")(torch.ones(2, 1 + me)),
            lambda: inline(comm, "reducescatter")(torch.ones(2 + me)),
            lambda: inline(comm, "reducescatter")(x, op=[Sum, dcoll.Max][me]),
            lambda: inline(comm, "alltoall")(x, name=str(me)),
            lambda: inline(comm, "barrier")() if me else inline(comm, "allgather")(x),
        ]
        for call in calls:
            with pytest.raises(MismatchError, match="different collectives"):
                call()
            assert inline(comm, "allgather")(x).tolist() == [1.0] * 8

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("kind", "args", "kwargs"),
    [
        ("broadcast", (torch.ones(2),), {}),
        ("broadcast", (torch.ones(2), 1), {}),
        ("broadcast", (torch.ones(2), -1), {}),
        ("broadcast", (torch.ones(2), 1 << 70), {}),
        ("broadcast", (torch.ones(2), True), {}),
        ("broadcast", (torch.ones(2), 0.0), {}),
        ("broadcast", (torch.ones(2), 0, 3), {}),
        ("broadcast", (torch.ones(2, requires_grad=True), 0), {}),
        ("broadcast", (torch.ones(2, 2).t(), 0), {}),
        ("allgather", ([1.0],), {}),
        ("allgather", (torch.tensor(1.0),), {}),
        ("allgather", (torch.ones(0, 3),), {}),
        ("allgather", (torch.ones(1, 1, 1, 1, 1, 1, 1, 1, 1),), {}),
        ("allgather", (torch.ones(2),), {"unknown": 1}),
        ("allgather", (torch.ones(2), None, "process set"), {}),
        ("reducescatter", (torch.tensor(1.0),), {}),
        ("reducescatter", (torch.ones(2),), {"op": None}),
        ("reducescatter", (torch.ones(2),), {"op": 1}),
        ("reducescatter", (torch.ones(2),), {"op": dcoll.Adasum}),
        ("reducescatter", (torch.ones(2),), {"compression": Compression.fp16}),
        ("reducescatter", (torch.ones(2, dtype=torch.bool),), {}),
        ("reducescatter", (torch.ones(2, dtype=torch.bool),), {"op": Sum, "prescale_factor": 0.5}),
        ("alltoall", (torch.ones(2),), {"splits": [2]}),
        ("alltoall", (torch.tensor(1.0),), {}),
        ("barrier", (1, 2), {}),
        ("barrier", (), {"tensor": 1}),
    ],
    ids=str,
)
def test_unusual_calls_reach_the_python_function(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    got = inline(_C.connect_local(1)[0], kind, False, lambda *a, **k: (a, k))(*args, **kwargs)
    assert len(got[0]) == len(args)
    assert all(one is other for one, other in zip(got[0], args, strict=True))
    assert got[1].keys() == kwargs.keys()


def test_read_only_arrays_are_unusual_only_in_place() -> None:
    array = np.ones(3)
    array.flags.writeable = False
    comm = _C.connect_local(1)[0]
    assert inline(comm, "broadcast")(array, 0).sum() == 3
    assert inline(comm, "broadcast", True, lambda *_: "python")(array, 0) == "python"


def test_autograd_sees_what_was_overwritten() -> None:
    x = torch.ones(3)
    inline(_C.connect_local(1)[0], "broadcast", True)(x, 0)
    assert x._version == 1


def test_wrong_construction() -> None:
    with pytest.raises(ValueError, match="allowed are allreduce"):
        _C.InlineCall(never, "join", OPS)
