"""The all-reduce that is done in C: its results, and that every other call reaches the Python function untouched."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from local_ranks import JOIN_S, run_ranks
from reference import DTYPES, ops_of, reduced, sample, sizes_for

from dcoll import _C, ArgumentError, Average, Max, MismatchError, PeerError, ReduceOp, Sum
from dcoll.collectives.handle import Handle

OPS = tuple(ReduceOp)


pytestmark = pytest.mark.usefixtures("reader")


def never(*_args: Any, **_kwargs: Any) -> None:
    raise AssertionError("a plain call reached the Python function")


def inline(comm: _C.Communicator, in_place: bool, otherwise: Callable[..., Any] = never) -> Any:
    return _C.InlineCall(otherwise, "allreduce", OPS, in_place, comm)


def starting(comm: _C.Communicator, in_place: bool, otherwise: Callable[..., Any] = never) -> Any:
    return _C.InlineCall(otherwise, "allreduce", OPS, in_place, comm, None, never, Handle)


def alone() -> _C.Communicator:
    return _C.connect_local(1)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_op_and_size(n: int, dtype: torch.dtype) -> None:
    def body(comm: _C.Communicator) -> None:
        new, in_place = inline(comm, False), inline(comm, True)
        for op in ops_of(dtype):
            for count in sizes_for(n):
                inputs = [sample(rank, count, dtype, op) for rank in range(n)]
                want, mine = reduced(inputs, op), inputs[comm.rank].clone()
                got = new(mine, op=op)
                assert got.dtype is dtype
                assert torch.equal(got, want), (op, count)
                assert torch.equal(mine, inputs[comm.rank]), "the input changed"
                assert in_place(mine, None, "named", op) is mine
                assert torch.equal(mine, want), (op, count)

    run_ranks(n, body)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_asynchronous_ones(n: int) -> None:
    def body(comm: _C.Communicator) -> None:
        new, in_place = starting(comm, False), starting(comm, True)
        for dtype, op in ((torch.float32, Sum), (torch.int16, Max), (torch.bfloat16, Average)):
            inputs = [[sample(rank, count, dtype, op) for rank in range(n)] for count in sizes_for(n)]
            mine = [each[comm.rank].clone() for each in inputs]
            ahead = [new(one, op=op) for one in mine]
            # By name, in another order on each rank, beside those in order.
            order = sorted(range(len(mine)), key=lambda i: (i * 7 + comm.rank * 3) % len(mine))
            named = {i: in_place(mine[i].clone(), None, f"number {i}", op) for i in order}
            for i, each in enumerate(inputs):
                want = reduced(each, op)
                assert torch.equal(ahead[i].wait(), want)
                assert torch.equal(named[i].wait(), want)
                assert torch.equal(mine[i], each[comm.rank]), "the input changed"
            assert ahead[0].wait() is ahead[0].wait()

    run_ranks(n, body)


def test_what_asynchronous_ones_return_and_keep() -> None:
    def body(comm: _C.Communicator) -> None:
        x, array = torch.ones(100_000), np.ones((2, 3), dtype=np.int64)
        in_place = starting(comm, True)(x)
        new = starting(comm, False)(x.clone(), op=Sum)  # the operand has no other name
        assert type(in_place) is Handle
        assert x._version == 1, "autograd was not told"
        assert in_place.wait() is x
        assert x.eq(1).all()
        assert new.wait().eq(2).all()
        assert type(starting(comm, False)(array, op=Sum).wait()) is np.ndarray
        assert starting(comm, True)(array, op=Sum).wait() is array
        assert (array == 2).all()
        del x, new
        starting(comm, False)(torch.ones(50_000), op=Sum)  # dropped: it outlives that
        comm.barrier_sync()
        # What may need a gradient is the Python function's, which returns a handle without one.
        other = starting(comm, False, lambda *_a, **_k: "python")
        assert other(torch.ones(2, requires_grad=True)) == "python"

    run_ranks(2, body)


def test_errors_of_asynchronous_ones() -> None:
    def body(comm: _C.Communicator) -> None:
        f = starting(comm, False)
        with pytest.raises(ArgumentError, match="average of bool"):
            f(torch.ones(2, dtype=torch.bool))
        first = f(torch.ones(2), name="twice")
        with pytest.raises(ArgumentError, match="twice"):
            f(torch.ones(2), name="twice")
        first.wait()
        with pytest.raises(MismatchError, match="different collectives"):
            f(torch.ones(2 + comm.rank), op=Sum).wait()
        assert f(torch.ones(2), op=Sum).wait().tolist() == [2.0, 2.0]

    run_ranks(2, body)


@pytest.mark.parametrize(
    "name",
    ["float16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"],
)
def test_numpy(name: str) -> None:
    n = 3

    def body(comm: _C.Communicator) -> None:
        inputs = [sample(rank, 30, getattr(torch, name), Sum).view(5, 6) for rank in range(n)]
        want, mine = reduced(inputs, Sum).numpy(), inputs[comm.rank].numpy().copy()
        got = inline(comm, False)(mine, op=Sum)
        assert type(got) is np.ndarray
        assert got.dtype == mine.dtype
        np.testing.assert_array_equal(got, want)
        assert inline(comm, True)(mine, op=Sum) is mine
        np.testing.assert_array_equal(mine, want)
        scalar = np.array(comm.rank, dtype=np.int64)
        assert inline(comm, False)(scalar, op=Sum).shape == ()
        assert inline(comm, True)(scalar, op=Sum) == 3
        assert inline(comm, True)(np.empty((0, 4)), op=Sum).shape == (0, 4)

    run_ranks(n, body)


def test_arguments_and_defaults() -> None:
    def body(comm: _C.Communicator) -> None:
        x = torch.full((7,), 4.0) * (comm.rank + 1)
        f = inline(comm, False)
        assert f(x).eq(6).all(), "the default is the average"
        assert f(tensor=x, op=None, name=None, average=None).eq(6).all()
        assert inline(comm, True)(x.clone(), None, None, Sum, 0.5, 4.0).eq(24).all()
        plain = object()
        with_compression = _C.InlineCall(never, "allreduce", OPS, False, comm, plain)
        assert with_compression(x, None, None, plain, Sum, 0.5, 4.0).eq(24).all()
        assert with_compression(x, compression=plain, op=Sum).eq(12).all()
        assert f(x, op=Sum, postscale_factor=4.0, prescale_factor=0.5).eq(24).all()
        assert f(x, name="some \u00e4\u00f6\u00fc").eq(6).all()

    run_ranks(2, body)


def plain_tensors() -> dict[str, torch.Tensor]:
    return {
        "scalar": torch.tensor(2.0),
        "empty": torch.empty(3, 0),
        "size 1 dimensions": torch.ones(4, 6).as_strided((1, 4, 1), (100, 1, 7)),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "leaf": torch.ones(3, requires_grad=True),
        "with history": torch.ones(3, requires_grad=True) * 2,
        "middle": torch.arange(9.0)[3:7],
        "single odd element": torch.arange(9.0)[3:4],
        "large": torch.ones(100_000),
        "copied on write": torch._lazy_clone(torch.ones(5)),
    }


@pytest.mark.parametrize("name", plain_tensors())
def test_plain_tensors(name: str) -> None:
    def body(comm: _C.Communicator) -> None:
        tensor = plain_tensors()[name]
        before = tensor.detach().clone()
        if tensor.requires_grad:  # the result may have to carry a gradient
            assert inline(comm, False, lambda *_a, **_k: "python")(tensor, op=Sum) == "python"
        else:
            got = inline(comm, False)(tensor, op=Sum)
            assert torch.equal(got, 2 * before)
            assert not got.requires_grad
            assert type(got) is torch.Tensor
        version = tensor._version
        assert torch.equal(tensor.detach(), before)
        assert inline(comm, True)(tensor, op=Sum) is tensor
        assert torch.equal(tensor.detach(), 2 * before)
        assert tensor._version == version + 1

    run_ranks(2, body)


class Subclass(torch.Tensor):
    pass


class SubArray(np.ndarray):
    pass


def frozen() -> np.ndarray:
    array = np.ones(3)
    array.flags.writeable = False
    return array


NEGATED = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
ELSEWHERE: dict[str, Any] = {
    "list": [1.0],
    "none": None,
    "transposed": torch.ones(2, 3).t(),
    "strided": torch.ones(6)[::2],
    "expanded": torch.ones(1).expand(3),
    "sparse": torch.ones(2).to_sparse(),
    "meta": torch.ones(2, device="meta"),
    "complex": torch.ones(2, dtype=torch.complex64),
    "float8": torch.ones(2).to(torch.float8_e5m2),
    "subclass": torch.ones(2).as_subclass(Subclass),
    "negated": NEGATED,
    "negated scalar": NEGATED[0],
    "negated single": NEGATED[1][None],
    "array subclass": np.ones(3).view(SubArray),
    "masked": np.ma.masked_array(np.ones(3)),
    "fortran": np.asfortranarray(np.ones((2, 3))),
    "big-endian": np.ones(2, dtype=">f4"),
    "complex array": np.ones(2, dtype=np.complex64),
    "objects": np.array([1, "x"], dtype=object),
    "unaligned": np.frombuffer(bytearray(9), np.float32, 2, 1),
    "structured": np.zeros(2, dtype=[("a", np.float32)]),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_unusual_tensors_reach_the_python_function(name: str, in_place: bool) -> None:
    seen: list[Any] = []
    tensor = ELSEWHERE[name]
    inline(alone(), in_place, lambda *args, **kwargs: seen.append((args, kwargs)))(tensor, None, op=Sum)
    (((got, average), options),) = seen
    assert got is tensor
    assert average is None
    assert options == {"op": Sum}


def test_a_read_only_array_is_unusual_only_in_place() -> None:
    assert inline(alone(), False)(frozen(), op=Sum).sum() == 3
    assert inline(alone(), True, lambda *_: "python")(frozen()) == "python"


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((torch.ones(1), True), {}),
        ((torch.ones(1),), {"average": False}),
        ((torch.ones(1),), {"op": 0}),
        ((torch.ones(1),), {"op": "sum"}),
        ((torch.ones(1),), {"name": 3}),
        ((torch.ones(1),), {"name": "\ud800"}),
        ((torch.ones(1),), {"prescale_factor": 2}),
        ((torch.ones(1),), {"postscale_factor": np.float64(2)}),
        ((torch.ones(1),), {"unknown": 1}),
        ((torch.ones(1),), {"compression": None}),
        ((torch.ones(1),), {"process_set": None}),
        ((torch.ones(1), None, None, Sum, 1.0, 1.0, "process set"), {}),
        ((torch.ones(1),), {"tensor": torch.ones(1)}),
        ((torch.ones(1), None, None, Sum, 1.0, 1.0, 1.0, 1.0), {}),
    ],
    ids=str,
)
def test_unusual_arguments_reach_the_python_function(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    got = inline(alone(), True, lambda *a, **k: (a, k))(*args, **kwargs)
    assert len(got[0]) == len(args)
    assert all(one is other for one, other in zip(got[0], args, strict=True))
    assert got[1].keys() == kwargs.keys()
    assert all(got[1][key] is kwargs[key] for key in kwargs)


def test_process_sets_have_their_own_communicator() -> None:
    class Set:
        pass

    def body(comm: _C.Communicator) -> None:
        mine, f = Set(), inline(alone(), False)
        _C.set_process_set(mine, comm)
        assert f(torch.ones(3), op=Sum, process_set=mine).eq(2).all()
        assert f(torch.ones(3), op=Sum).eq(1).all()
        _C.set_process_set(mine, None)
        assert inline(comm, False, lambda *_a, **_k: "python")(torch.ones(1), process_set=mine) == "python"
        _C.set_process_set(mine, None)

    run_ranks(2, body)


def test_names_that_are_not_interned_work_too() -> None:
    name = "".join(["o", "p"])
    assert inline(alone(), False, lambda *_a, **k: k)(torch.ones(1), **{name: Sum}) in ({"op": Sum}, torch.ones(1))


def test_errors_of_the_core() -> None:
    def body(comm: _C.Communicator) -> None:
        f = inline(comm, True)
        with pytest.raises(ValueError, match="average of bool"):
            f(torch.ones(2, dtype=torch.bool))
        with pytest.raises(ValueError, match="need a number type"):
            f(torch.ones(2, dtype=torch.bool), op=Sum, prescale_factor=0.5)
        mine = torch.ones(2 + comm.rank)
        with pytest.raises(MismatchError, match="different collectives"):
            f(mine, op=Sum)
        assert mine._version == 0
        with pytest.raises(MismatchError, match="'0'"):
            f(torch.ones(2), op=Sum, name=str(comm.rank))
        assert f(torch.ones(2), op=Sum).tolist() == [2.0, 2.0]

    run_ranks(2, body)


def test_a_failed_communicator() -> None:
    comm = alone()
    comm.fail("ValueError: bad batch")
    with pytest.raises(PeerError, match="bad batch"):
        inline(comm, False)(torch.ones(1))


def test_a_late_rank() -> None:
    def body(comm: _C.Communicator) -> None:
        for late in range(3):
            if comm.rank == late:
                time.sleep(0.05)
            assert inline(comm, False)(torch.ones(5), op=Sum).eq(3).all()
            assert inline(comm, False)(torch.ones(50_000), op=Sum).eq(3).all()

    run_ranks(3, body)


@pytest.mark.usefixtures("ctrl_c_counts")
@pytest.mark.parametrize("spin_us", ["-1", "1000000000"])
def test_ctrl_c_ends_the_wait_and_the_memory_stays(spin_us: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCOLL_SPIN_US", spin_us)
    comms = _C.connect_local(2)
    mine = torch.ones(5)
    references = sys.getrefcount(mine)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        inline(comms[0], True)(mine, op=Sum)
    # The operation goes on: it needs the memory until rank 1 has come.
    assert sys.getrefcount(mine) > references

    def second() -> None:
        inline(comms[1], True)(torch.ones(5), op=Sum)
        comms[1].close()

    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    comms[0].close()
    thread.join(JOIN_S)
    assert not thread.is_alive()
    assert mine.tolist() == [2.0] * 5


def test_several_threads_of_one_rank() -> None:
    comm = alone()
    new, in_place = inline(comm, False), inline(comm, True)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        tensor, array = torch.full((8,), float(seed)), np.full(8, seed)
        for _ in range(500):
            out = [new(tensor, op=Sum), in_place(tensor, op=Sum), new(array, op=Sum), in_place(array, op=Sum)]
            if not all((one == seed).all() for one in out):
                wrong.append(out)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


@pytest.mark.parametrize("in_place", [False, True])
def test_ten_thousand_calls_keep_nothing(in_place: bool) -> None:
    f = inline(alone(), in_place, lambda *_, **__: None)
    tensor, array, odd = torch.ones(3), np.ones(3), torch.ones(4)[::2]
    name = "a name of this call"

    def rounds(n: int) -> None:
        for _ in range(n):
            f(tensor, op=Sum)
            f(array, op=Sum, name=name)
            f(odd, op=Sum)
            f(tensor, op=3)

    rounds(100)
    objects = (tensor, array, odd, name, f, Sum)
    counts, blocks = [sys.getrefcount(one) for one in objects], sys.getallocatedblocks()
    rounds(10_000)
    assert [sys.getrefcount(one) for one in objects] == counts
    assert sys.getallocatedblocks() - blocks < 200


def test_barrier_waits_for_all() -> None:
    came: list[int] = []

    def body(comm: _C.Communicator) -> None:
        time.sleep(0.02 * comm.rank)
        came.append(comm.rank)
        comm.barrier_sync()
        assert len(came) == 3

    run_ranks(3, body)
