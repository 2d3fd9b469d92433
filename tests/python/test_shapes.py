"""Ranks whose tensors have as many elements in another shape: no rank may combine them with what belongs elsewhere."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from local_ranks import run_ranks

from dcoll import _C, MismatchError, ReduceOp, Sum
from dcoll.collectives import grouped, on_communicator

OPS = tuple(ReduceOp)
pytestmark = pytest.mark.usefixtures("reader")
Call = Callable[[_C.Communicator, Any], Any]


def never(*_args: Any, **_kwargs: Any) -> None:
    raise AssertionError("a plain call reached the Python function")


def reduction(in_place: bool) -> Call:
    return lambda comm, x: _C.InlineCall(never, "allreduce", OPS, in_place, comm)(x, op=Sum)


def inline(kind: str, in_place: bool = False) -> Call:
    def call(comm: _C.Communicator, x: Any) -> Any:
        wanted: dict[str, Any] = {"broadcast": {"root_rank": 0}, "reducescatter": {"op": Sum}}
        made = _C.InlineCall(never, kind, OPS, in_place, comm, None, on_communicator.wrap_rows)
        return made(x, **wanted.get(kind, {}))

    return call


def with_gaps(x: Any) -> torch.Tensor:
    return torch.as_tensor(x).repeat_interleave(2, 0)[::2]


SUM: Any = (Sum, "g", 1.0, 1.0)
WHOLE: dict[str, Call] = {  # what compares all dimensions
    "inline allreduce": reduction(False),
    "inline allreduce_": reduction(True),
    "allreduce_sync": lambda comm, x: on_communicator.allreduce_sync(comm, x, *SUM),
    "allreduce_sync_": lambda comm, x: on_communicator.allreduce_sync(comm, x, *SUM, in_place=True),
    "allreduce": lambda comm, x: on_communicator.allreduce(comm, x, *SUM).wait(),
    "allreduce_": lambda comm, x: on_communicator.allreduce(comm, x, *SUM, in_place=True).wait(),
    "allreduce by name": lambda comm, x: on_communicator.allreduce(comm.by_name, x, *SUM).wait(),
    "inline broadcast": inline("broadcast"),
    "inline broadcast_": inline("broadcast", True),
    "broadcast_sync": lambda comm, x: on_communicator.broadcast_sync(comm, x, 0, ""),
    "broadcast_sync_": lambda comm, x: on_communicator.broadcast_sync(comm, x, 0, "", in_place=True),
    "broadcast": lambda comm, x: on_communicator.broadcast(comm, x, 0, "").wait(),
    "broadcast_": lambda comm, x: on_communicator.broadcast(comm, x, 0, "", in_place=True).wait(),
    "group": lambda comm, x: grouped.allreduce_sync(comm, [x, x], *SUM),
    "group in place": lambda comm, x: grouped.allreduce_sync(comm, [x], *SUM, in_place=True),
    "group, later": lambda comm, x: grouped.start_allreduce(comm, [x] * 5, *SUM, in_place=False).wait(),
}
ROWS: dict[str, Call] = {  # what compares all but the first
    "inline allgather": inline("allgather"),
    "allgather_sync": lambda comm, x: on_communicator.allgather_sync(comm, x, ""),
    "allgather": lambda comm, x: on_communicator.allgather(comm, x, "").wait(),
    "inline reducescatter": inline("reducescatter"),
    "reducescatter_sync": lambda comm, x: on_communicator.reducescatter_sync(comm, x, *SUM),
    "reducescatter": lambda comm, x: on_communicator.reducescatter(comm, x, *SUM).wait(),
    "inline alltoall": inline("alltoall"),
    "alltoall_sync": lambda comm, x: on_communicator.alltoall_sync(comm, x, None, ""),
    "alltoall": lambda comm, x: on_communicator.alltoall(comm, x, None, "").wait(),
    "rows of a group": lambda comm, x: grouped.allgather_sync(comm, [x, x], "g"),
    "rows of a group with gaps": lambda comm, x: grouped.allgather_sync(comm, [with_gaps(x), x], "g"),
    "shares of a group": lambda comm, x: grouped.reducescatter_sync(comm, [x], *SUM),
}


def meet(call: Call, mine: tuple[int, ...], theirs: tuple[int, ...], words: str, library: str) -> None:
    """The last of three ranks brings another shape; `words` is how the message names both."""
    make: Any = torch.ones if library == "torch" else np.ones

    def body(comm: _C.Communicator) -> None:
        x = make(theirs if comm.rank == 2 else mine)
        with pytest.raises(MismatchError, match=words):
            call(comm, x)
        assert (x == 1).all()
        call(comm, make(mine))  # the job can go on

    run_ranks(3, body)


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("call", WHOLE)
def test_shapes_of_whole_tensors(call: str, library: str) -> None:
    meet(WHOLE[call], (3, 4), (4, 3), r"ranks 0, 1 called .*3x4 float.*; rank 2 called .*4x3 float", library)
    meet(
        WHOLE[call],
        (12,),
        (4, 3, 1),
        r"ranks 0, 1 called .*(12 float|bytes of float).*; rank 2 called .*4x3x1 float",
        library,
    )


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("call", ROWS)
def test_shapes_of_rows(call: str, library: str) -> None:
    meet(ROWS[call], (3, 2, 5), (3, 5, 2), r"ranks 0, 1 called .*2x5 float.*; rank 2 called .*5x2 float", library)


def test_one_dimension_and_none_are_alike() -> None:
    """As are the ways to make the same call, for every number of dimensions."""

    def body(comm: _C.Communicator) -> None:
        for shape in ((), (1,), (6,), (2, 3), (1, 1, 2, 1, 3, 1, 1, 1), (1,) * 9):
            for x in (torch.ones(shape), np.ones(shape, np.float32)):
                if comm.rank == 0 or len(shape) > 8:  # more are the Python function's business
                    assert (on_communicator.allreduce_sync(comm, x, Sum, "", 1.0, 1.0) == 2).all()
                else:
                    assert (_C.InlineCall(never, "allreduce", OPS, False, comm)(x, op=Sum) == 2).all()
        x = torch.ones(()) if comm.rank == 0 else torch.ones(1)
        assert on_communicator.allreduce_sync(comm, x, Sum, "", 1.0, 1.0) == 2
        rows = torch.ones(comm.rank, 2, 3)  # the first dimension of rows may differ
        assert on_communicator.allgather_sync(comm, rows, "").shape == (1, 2, 3)

    run_ranks(2, body)
