"""Broadcast, all-gather, reduce-scatter, all-to-all and barrier on 1 to 8 ranks, compared exactly."""

import gc
import os
import re
import signal
import threading
import time
import traceback
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_ranks import run_ranks
from reference import DTYPES, layouts, ops_of, reduced, sample

from dcoll import _C, ArgumentError, DcollError, MismatchError, Sum
from dcoll.collectives import on_communicator
from dcoll.job import objects

RANKS = range(1, 9)


def rows_of(rank: int, rows: int, dtype: torch.dtype, *row_shape: int) -> torch.Tensor:
    count = rows * int(np.prod(row_shape, dtype=np.int64))
    return sample(rank, count, dtype, Sum).view(rows, *row_shape)


@pytest.mark.parametrize("n", RANKS)
def test_broadcast(n: int) -> None:
    def body(comm: _C.Communicator) -> None:
        for dtype in DTYPES:
            for root in {0, n - 1, n // 2}:
                for count in (0, 1, n, 1001):
                    mine = sample(comm.rank, count, dtype, Sum)
                    want = sample(root, count, dtype, Sum)
                    got = on_communicator.broadcast(comm, mine, root, "").wait()
                    assert torch.equal(got, want)
                    assert torch.equal(mine, sample(comm.rank, count, dtype, Sum)), "the input changed"
                    assert on_communicator.broadcast(comm, mine, root, "", in_place=True).wait() is mine
                    assert torch.equal(mine, want)

    run_ranks(n, body)


def test_broadcast_layouts() -> None:
    def body(comm: _C.Communicator) -> None:
        base = [sample(rank, 120, torch.float32, Sum).view(2, 3, 4, 5) for rank in range(2)]
        for name, mine in layouts(base[comm.rank]).items():
            assert torch.equal(on_communicator.broadcast(comm, mine, 1, "").wait(), base[1]), name
            on_communicator.broadcast(comm, mine, 1, "", in_place=True).wait()
            assert torch.equal(mine, base[1]), name

    run_ranks(2, body)


def test_broadcast_root_out_of_range() -> None:
    def body(comm: _C.Communicator) -> None:
        for root in (-1, 2):
            with pytest.raises(ArgumentError):
                on_communicator.broadcast(comm, torch.ones(2), root, "").wait()
        assert on_communicator.broadcast(comm, torch.ones(2), 0, "").wait().sum() == 2

    run_ranks(2, body)


@pytest.mark.parametrize("n", RANKS)
def test_ragged_allgather(n: int) -> None:
    def body(comm: _C.Communicator) -> None:
        for dtype in DTYPES:
            for row_shape in ((), (3,), (2, 0), (2, 5)):
                for rows in (lambda r: r, lambda r: 0, lambda r: 5, lambda r: 100 * (r == n - 1)):
                    parts = [rows_of(rank, rows(rank), dtype, *row_shape) for rank in range(n)]
                    got = on_communicator.allgather(comm, parts[comm.rank], "").wait()
                    assert got.dtype == dtype
                    assert torch.equal(got, torch.cat(parts))

    run_ranks(n, body)


@pytest.mark.parametrize("n", RANKS)
def test_reducescatter(n: int) -> None:
    def body(comm: _C.Communicator) -> None:
        for dtype in DTYPES:
            for op in ops_of(dtype):
                for rows in (0, 1, n - 1, n, n + 1, 3 * n + 2):
                    inputs = [sample(rank, rows * 3, dtype, op).view(rows, 3) for rank in range(n)]
                    want = torch.tensor_split(reduced(inputs, op), n)[comm.rank]
                    got = on_communicator.reducescatter(comm, inputs[comm.rank], op, "", 1.0, 1.0).wait()
                    assert got.shape == want.shape, (rows, op)
                    assert torch.equal(got, want), (rows, op)

    run_ranks(n, body)


@pytest.mark.parametrize("n", RANKS)
def test_alltoall(n: int) -> None:
    def body(comm: _C.Communicator) -> None:
        for dtype in (torch.float32, torch.bool, torch.bfloat16, torch.int64):
            for splits_of in (
                lambda r: [r] * n,
                lambda r: list(range(n)),
                lambda r: [0] * n,
                lambda r: [3 * (r == 0)] * n,
            ):
                sent = [rows_of(rank, sum(splits_of(rank)), dtype, 2) for rank in range(n)]
                pieces = [sent[rank].split(splits_of(rank))[comm.rank] for rank in range(n)]
                got, counts = on_communicator.alltoall(comm, sent[comm.rank], splits_of(comm.rank), "").wait()
                assert torch.equal(got, torch.cat(pieces))
                assert counts.tolist() == [len(piece) for piece in pieces]
                assert counts.dtype == torch.int32
        even = on_communicator.alltoall(comm, torch.arange(2 * n) + 100 * comm.rank, None, "").wait()
        assert even.tolist() == [2 * comm.rank + k + 100 * r for r in range(n) for k in range(2)]

    run_ranks(n, body)


def test_alltoall_splits_as_tensor_or_array() -> None:
    def body(comm: _C.Communicator) -> None:
        for splits in (torch.tensor([1, 2], dtype=torch.int32), np.array([1, 2])):
            got, counts = on_communicator.alltoall(comm, np.arange(3) + 10 * comm.rank, splits, "").wait()
            assert got.tolist() == ([0, 10], [1, 2, 11, 12])[comm.rank]
            assert isinstance(counts, np.ndarray)
            assert counts.tolist() == [comm.rank + 1] * 2

    run_ranks(2, body)


@pytest.mark.parametrize("splits", [[1], [1, 1, 1], [2, 2], [-1, 4], None], ids=str)
def test_alltoall_wrong_splits(splits: list[int] | None) -> None:
    def body(comm: _C.Communicator) -> None:
        with pytest.raises(ArgumentError, match="splits"):
            on_communicator.alltoall(comm, torch.ones(3), splits, "")

    run_ranks(2, body)


def test_no_first_dimension() -> None:
    def body(comm: _C.Communicator) -> None:
        scalar = torch.tensor(1.0)
        for start in (
            lambda: on_communicator.allgather(comm, scalar, ""),
            lambda: on_communicator.reducescatter(comm, scalar, Sum, "", 1.0, 1.0),
            lambda: on_communicator.alltoall(comm, scalar, None, ""),
        ):
            with pytest.raises(ArgumentError, match=r"reshape\(1\)"):
                start()

    run_ranks(1, body)


def test_row_size_mismatch_is_the_same_error_everywhere() -> None:
    def body(comm: _C.Communicator) -> str:
        with pytest.raises(MismatchError) as caught:
            on_communicator.allgather(comm, torch.ones(2, 3 + comm.rank), "rows").wait()
        assert on_communicator.allgather(comm, torch.ones(1), "").wait().tolist() == [1.0, 1.0]
        return str(caught.value)

    assert len(set(run_ranks(2, body))) == 1


def test_barrier_holds_everyone_back() -> None:
    n = 4
    arrived: list[int] = []
    lock = threading.Lock()

    def body(comm: _C.Communicator) -> None:
        for round_ in range(1, 6):
            with lock:
                arrived.append(comm.rank)
            comm.barrier().wait()
            with lock:
                assert len(arrived) >= n * round_
            comm.barrier().wait()

    run_ranks(n, body)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_objects(n: int) -> None:
    def body(comm: _C.Communicator) -> None:
        mine = {"rank": comm.rank, "text": "ä" * comm.rank, "tensor": torch.ones(comm.rank)}
        got = objects.broadcast_object(comm, mine, n - 1, "")
        assert got["rank"] == n - 1
        assert (got is mine) == (comm.rank == n - 1)
        assert [one["rank"] for one in objects.allgather_object(comm, mine, "")] == list(range(n))
        assert objects.broadcast_object(comm, None, 0, "") is None

    run_ranks(n, body)


class Unpicklable:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> str:
        raise self.error


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("not this one"), "ValueError: not this one"),
        (ValueError("a file \udcff"), r"ValueError: a file \\udcff"),  # such text has no UTF-8
        (Wordless(), "Wordless"),
    ],
)
def test_an_object_that_cannot_be_pickled_fails_on_all_ranks_in_that_call(error: Exception, text: str) -> None:
    def body(comm: _C.Communicator) -> None:
        for what, call in (
            ("broadcast_object", lambda obj: objects.broadcast_object(comm, obj, 1, "")),
            ("allgather_object", lambda obj: objects.allgather_object(comm, obj, "")),
        ):
            with pytest.raises(type(error) if comm.rank == 1 else DcollError) as caught:
                call(Unpicklable(error) if comm.rank == 1 else "fine")
            if comm.rank == 1:
                assert caught.value is error
            else:
                assert re.fullmatch(f"{what}: rank 1 could not pickle its object: {text}", str(caught.value))
            assert objects.allgather_object(comm, comm.rank, "") == [0, 1, 2]
            assert objects.broadcast_object(comm, comm.rank, 1, "") == 1

    run_ranks(3, body)


def test_agreement_names_the_first_difference() -> None:
    def body(comm: _C.Communicator) -> str:
        objects.agree(comm, ["a", "b"], "the lists", "Do this.")
        with pytest.raises(MismatchError, match="differ at number 1") as caught:
            objects.agree(comm, ["a", f"b{comm.rank}"], "the lists", "Do this.")
        with pytest.raises(MismatchError, match="rank 0: nothing"):
            objects.agree(comm, ["a"] * (comm.rank + 1), "the lists", "Do this.")
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert "rank 1: b1" in first


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 4), data=st.data())
def test_alltoall_twice_with_swapped_splits_is_the_identity(n: int, data: st.DataObject) -> None:
    splits = [data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)) for _ in range(n)]

    def body(comm: _C.Communicator) -> None:
        mine = torch.arange(sum(splits[comm.rank]), dtype=torch.int32).view(-1, 1) + 1000 * comm.rank
        there, counts = on_communicator.alltoall(comm, mine, splits[comm.rank], "").wait()
        back, returned = on_communicator.alltoall(comm, there, counts, "").wait()
        assert torch.equal(back, mine)
        assert returned.tolist() == splits[comm.rank]

    run_ranks(n, body)


class Rows(np.ndarray[Any, Any]):
    """An array that the calls in C leave to Python, and that can be watched."""


class Bytes(bytearray):
    """A bytearray that can be watched."""


@pytest.mark.usefixtures("ctrl_c_counts")
@pytest.mark.parametrize("what", ["array", "bytes"])
def test_ctrl_c_leaves_the_memory_of_a_call_to_the_core(what: str) -> None:
    """What a call through Python made for the core lives on, whatever becomes of the frames that the error passed."""
    comms = _C.connect_local(2)
    calling = threading.Event()

    def call(comm: _C.Communicator) -> None:
        data: Any = np.arange(100_000).view(Rows) if what == "array" else Bytes(100_000)
        watched.append(weakref.ref(data))
        calling.set()
        if what == "array":
            on_communicator.broadcast_sync(comm, data, 1, "", in_place=True)
        else:
            assert objects.allgather_bytes(comm, data, "") == [bytes(100_000)] * 2

    def interrupt() -> None:
        calling.wait()
        time.sleep(0.5)  # by then it waits for the other rank
        os.kill(os.getpid(), signal.SIGINT)

    watched: list[weakref.ref[Any]] = []
    killer = threading.Thread(target=interrupt)
    killer.start()
    try:
        call(comms[0])
    except KeyboardInterrupt as error:
        traceback.clear_frames(error.__traceback__)
    killer.join()
    gc.collect()
    assert watched[0]() is not None
    call(comms[1])
    threads = [threading.Thread(target=comm.close) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
