"""All-reduce on 1 to 8 ranks: every dtype, operator and size, in and out of place, compared exactly."""

import functools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_ranks import run_ranks
from reference import DTYPES, layouts, ops_of, reduced, sample, sizes_for

from dcoll import _C, ArgumentError, Average, BitAnd, BitXor, MismatchError, PeerError, ReduceOp, Sum
from dcoll.collectives import on_communicator

RANKS = range(1, 9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", RANKS)
def test_every_op_and_size(n: int, dtype: torch.dtype) -> None:
    def body(comm: _C.Communicator) -> None:
        for op in ops_of(dtype):
            for count in sizes_for(n):
                inputs = [sample(rank, count, dtype, op) for rank in range(n)]
                want = reduced(inputs, op)
                mine = inputs[comm.rank].clone()
                got = on_communicator.allreduce_sync(comm, mine, op, "", 1.0, 1.0)
                assert torch.equal(got, want), f"{op.name} of {count}: got {got}, want {want}"
                assert torch.equal(mine, inputs[comm.rank]), "the input changed"
                handle = on_communicator.allreduce(comm, mine, op, "", 1.0, 1.0, in_place=True)
                assert handle.wait() is mine
                assert torch.equal(mine, want), f"{op.name} of {count} in place: got {mine}, want {want}"

    run_ranks(n, body)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_large(n: int) -> None:
    count = 1_000_003

    def body(comm: _C.Communicator) -> None:
        inputs = [sample(rank, count, torch.float32, Sum) for rank in range(n)]
        mapped = torch.frombuffer(comm.alloc(count * 4), dtype=torch.float32)
        mapped.copy_(inputs[comm.rank])
        for mine in (inputs[comm.rank].clone(), mapped):
            on_communicator.allreduce_sync(comm, mine, Sum, "", 1.0, 1.0, in_place=True)
            assert torch.equal(mine, reduced(inputs, Sum))

    run_ranks(n, body)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_layouts_keep_shape_strides_and_values(n: int) -> None:
    def body(comm: _C.Communicator) -> None:
        base = [sample(rank, 2 * 3 * 4 * 5, torch.float32, Sum).view(2, 3, 4, 5) for rank in range(n)]
        want = reduced(base, Sum)
        for name, mine in layouts(base[comm.rank]).items():
            got = on_communicator.allreduce_sync(comm, mine, Sum, "", 1.0, 1.0)
            assert torch.equal(got, want), name
            assert got.stride() == torch.empty_like(mine).stride(), name
            again = on_communicator.allreduce(comm, mine, Sum, "", 1.0, 1.0).wait()
            assert torch.equal(again, want), name
            before = mine.stride()
            on_communicator.allreduce_sync(comm, mine, Sum, "", 1.0, 1.0, in_place=True)
            assert torch.equal(mine, want), name
            assert mine.stride() == before, name

    run_ranks(n, body)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_scalars_and_empty(n: int) -> None:
    def body(comm: _C.Communicator) -> None:
        total = n * (n + 1) // 2
        scalar = on_communicator.allreduce_sync(comm, torch.tensor(comm.rank + 1.0), Sum, "", 1.0, 1.0)
        assert scalar.shape == ()
        assert scalar.item() == total
        array = on_communicator.allreduce_sync(comm, np.array(comm.rank + 1), Sum, "", 1.0, 1.0)
        assert array.shape == ()
        assert array == total
        assert on_communicator.allreduce_sync(comm, torch.empty(3, 0), Sum, "", 1.0, 1.0).shape == (3, 0)
        assert on_communicator.allreduce_sync(comm, np.empty((0, 2)), Sum, "", 1.0, 1.0).shape == (0, 2)

    run_ranks(n, body)


@pytest.mark.parametrize(
    "name",
    ["float16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"],
)
def test_numpy(name: str) -> None:
    n = 3

    def body(comm: _C.Communicator) -> None:
        inputs = [sample(rank, 30, getattr(torch, name), Sum).view(5, 6).numpy() for rank in range(n)]
        want = reduced([torch.from_numpy(one.copy()) for one in inputs], Sum).numpy()
        for mine in (inputs[comm.rank].copy(), np.asfortranarray(inputs[comm.rank])):
            got = on_communicator.allreduce_sync(comm, mine, Sum, "", 1.0, 1.0)
            assert type(got) is np.ndarray
            assert got.dtype == mine.dtype
            np.testing.assert_array_equal(got, want)
            on_communicator.allreduce(comm, mine, Sum, "", 1.0, 1.0, in_place=True).wait()
            np.testing.assert_array_equal(mine, want)

    run_ranks(n, body)


def test_scaling() -> None:
    def body(comm: _C.Communicator) -> None:
        x = torch.full((7,), 4.0) * (comm.rank + 1)
        assert torch.equal(on_communicator.allreduce_sync(comm, x, Sum, "", 0.5, 4.0), torch.full((7,), 24.0))
        assert torch.equal(on_communicator.allreduce_sync(comm, x, Average, "", 0.5, 4.0), torch.full((7,), 12.0))

    run_ranks(2, body)


def test_many_handles_finish_in_any_order() -> None:
    def body(comm: _C.Communicator) -> None:
        tensors = [torch.full((100 + i,), float(comm.rank + i)) for i in range(50)]
        handles = [on_communicator.allreduce(comm, t, Sum, f"t{i}", 1.0, 1.0) for i, t in enumerate(tensors)]
        for i in reversed(range(50)):
            assert torch.equal(handles[i].wait(), torch.full((100 + i,), float(3 * i + 3)))
            assert handles[i].poll()
            assert handles[i].wait() is handles[i].wait()

    run_ranks(3, body)


def test_a_dropped_handle_keeps_its_tensors() -> None:
    def body(comm: _C.Communicator) -> None:
        for i in range(20):
            on_communicator.allreduce(comm, torch.ones(50_000), Sum, "", 1.0, 1.0)
            torch.empty(50_000).fill_(i)  # would take the freed memory
        assert on_communicator.allreduce_sync(comm, torch.ones(1), Sum, "", 1.0, 1.0).item() == 2

    run_ranks(2, body)


def test_autograd_notices_an_overwritten_value() -> None:
    def body(comm: _C.Communicator) -> None:
        x = torch.ones(3, requires_grad=True)
        saved = x.detach().clone()
        loss = (x * saved).sum()
        on_communicator.allreduce_sync(comm, saved, Sum, "", 1.0, 1.0, in_place=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_ranks(1, body)


def test_result_has_no_history() -> None:
    def body(comm: _C.Communicator) -> None:
        x = torch.ones(2, 3, requires_grad=True)
        for mine in (x, x.t(), x * 2):
            assert not on_communicator.allreduce_sync(comm, mine, Sum, "", 1.0, 1.0).requires_grad

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        ([1.0, 2.0], "torch.Tensor or numpy.ndarray"),
        (torch.ones(2, dtype=torch.complex64), "complex64.*float16.*convert"),
        (np.ones(2, dtype=np.complex64), "complex64"),
        (np.ones(2, dtype=">f4"), ">f4"),
        (torch.ones(2).to_sparse(), r"sparse.*to_dense\(\)"),
        (torch.ones(2, device="meta"), r"meta.*\.cpu\(\)"),
    ],
    ids=["list", "complex", "complex array", "big-endian", "sparse", "device"],
)
def test_what_cannot_be_reduced_says_why(tensor: object, text: str) -> None:
    def body(comm: _C.Communicator) -> None:
        in_place = functools.partial(on_communicator.allreduce_sync, in_place=True)
        for start in (on_communicator.allreduce_sync, in_place, on_communicator.allreduce):
            with pytest.raises(ArgumentError, match=text):
                start(comm, tensor, Sum, "", 1.0, 1.0)

    run_ranks(1, body)


def test_wrong_arguments() -> None:
    def body(comm: _C.Communicator) -> None:
        with pytest.raises(ArgumentError, match=r"dcoll\.Average"):
            on_communicator.allreduce_sync(comm, torch.ones(2), 1, "", 1.0, 1.0)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="bool"):
            on_communicator.allreduce_sync(comm, torch.ones(2, dtype=torch.bool), Average, "", 1.0, 1.0)
        with pytest.raises(ArgumentError, match=r"bitwise and.*integers or bool"):
            on_communicator.allreduce_sync(comm, torch.ones(2), BitAnd, "", 1.0, 1.0)
        with pytest.raises(ArgumentError, match="without prescale"):
            on_communicator.allreduce_sync(comm, torch.ones(2, dtype=torch.int32), BitXor, "", 2.0, 1.0)
        frozen = np.ones(3)
        frozen.flags.writeable = False
        with pytest.raises(ArgumentError, match="read-only"):
            on_communicator.allreduce_sync(comm, frozen, Sum, "", 1.0, 1.0, in_place=True)
        assert on_communicator.allreduce_sync(comm, frozen, Sum, "", 1.0, 1.0).sum() == 3 * comm.size

    run_ranks(2, body)


@pytest.mark.parametrize(
    "different",
    [
        lambda comm: on_communicator.allreduce_sync(comm, torch.ones(4 + (comm.rank == 1)), Sum, "", 1.0, 1.0),
        lambda comm: on_communicator.allreduce_sync(comm, torch.ones(4), (Sum, Average)[comm.rank == 1], "", 1.0, 1.0),
        lambda comm: on_communicator.allreduce_sync(comm, torch.ones(4), Sum, f"of {comm.rank == 1}", 1.0, 1.0),
        lambda comm: on_communicator.allreduce_sync(
            comm, torch.ones(4, dtype=(torch.float32, torch.int32)[comm.rank == 1]), Sum, "", 1.0, 1.0
        ),
        lambda comm: on_communicator.broadcast(comm, torch.ones(4), int(comm.rank == 1), "").wait(),
        lambda comm: (
            comm.barrier().wait()
            if comm.rank == 1
            else on_communicator.allreduce_sync(comm, torch.ones(4), Sum, "", 1.0, 1.0)
        ),
    ],
    ids=["count", "op", "name", "dtype", "root", "collective"],
)
def test_mismatch_is_the_same_error_everywhere_and_the_job_goes_on(different: object) -> None:
    def body(comm: _C.Communicator) -> str:
        with pytest.raises(MismatchError) as caught:
            different(comm)  # type: ignore[operator]
        after = on_communicator.allreduce_sync(comm, torch.ones(3), Sum, "after", 1.0, 1.0)
        assert after.tolist() == [3.0] * 3
        return str(caught.value)

    messages = run_ranks(3, body)
    assert len(set(messages)) == 1, messages


def test_after_a_failure_every_call_raises_the_first_cause() -> None:
    first_done = threading.Barrier(3)  # the failure may overtake a collective that another rank is still in

    def body(comm: _C.Communicator) -> None:
        on_communicator.allreduce_sync(comm, torch.ones(3), Sum, "", 1.0, 1.0)
        first_done.wait(30)
        if comm.rank == 1:
            comm.fail("ValueError: bad batch")
            comm.fail("a later cause")
        else:
            with pytest.raises(PeerError, match="rank 1: ValueError: bad batch"):
                on_communicator.allreduce_sync(comm, torch.ones(3), Sum, "", 1.0, 1.0)
        for _ in range(2):
            with pytest.raises(PeerError, match="bad batch"):
                comm.barrier().wait()
        assert "bad batch" in comm.failure()

    run_ranks(3, body)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 5),
    counts=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    op=st.sampled_from([Sum, Average]),
    data=st.data(),
)
def test_any_sequence_of_counts(n: int, counts: list[int], op: ReduceOp, data: st.DataObject) -> None:
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.float16, torch.int64])) for _ in counts]
    wait_last = data.draw(st.booleans())

    def body(comm: _C.Communicator) -> None:
        started = []
        for count, dtype in zip(counts, dtypes, strict=True):
            inputs = [sample(rank, count, dtype, op) for rank in range(n)]
            handle = on_communicator.allreduce(comm, inputs[comm.rank], op, "", 1.0, 1.0)
            started.append((handle, reduced(inputs, op)))
            if not wait_last:
                handle.wait()
        for handle, want in started:
            assert torch.equal(handle.wait(), want)

    run_ranks(n, body)
