"""The synchronous forms, which finish on the calling thread when they can: the same results as through a handle."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from local_ranks import run_ranks

from dcoll import _C, Sum
from dcoll.collectives import on_communicator

LARGE = 70_001  # elements: more than is guessed, and more than one round through the slots


def integers(rank: int, *shape: int) -> torch.Tensor:
    count = int(np.prod(shape, dtype=np.int64))
    return ((torch.arange(count) * 7 + rank * 5) % 11).to(torch.float32).view(shape)


def as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@pytest.mark.parametrize("kind", [as_is, torch.Tensor.numpy], ids=["torch", "numpy"])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_sync_forms(n: int, kind: Callable[[torch.Tensor], Any]) -> None:
    def body(comm: _C.Communicator) -> None:
        for rows in (0, 1, n, 7, LARGE):
            for ragged in (0, 1):  # 1: every rank brings another number of rows

                def brought(rank: int, rows: int = rows, ragged: int = ragged) -> torch.Tensor:
                    return integers(rank, rows + ragged * rank, 2)

                got = on_communicator.allgather_sync(comm, kind(brought(comm.rank)), "")
                assert torch.equal(torch.as_tensor(got), torch.cat([brought(rank) for rank in range(n)]))
            mine = integers(comm.rank, rows, 3)
            want = torch.tensor_split(sum(integers(rank, rows, 3) for rank in range(n)), n)[comm.rank]
            got = on_communicator.reducescatter_sync(comm, kind(mine), Sum, "", 1.0, 1.0)
            assert torch.equal(torch.as_tensor(got), want)
            even = on_communicator.alltoall_sync(comm, kind(integers(comm.rank, n, rows)), None, "")
            assert torch.equal(torch.as_tensor(even), torch.stack([integers(r, n, rows)[comm.rank] for r in range(n)]))
            assert torch.equal(torch.as_tensor(on_communicator.broadcast_sync(comm, kind(mine), n - 1, "")),
                               integers(n - 1, rows, 3))  # fmt: skip
            target = kind(mine)
            assert on_communicator.broadcast_sync(comm, target, 0, "", in_place=True) is target
            assert torch.equal(torch.as_tensor(target), integers(0, rows, 3))
            comm.barrier_sync()

    run_ranks(n, body)


def test_alltoall_sync_with_splits() -> None:
    def body(comm: _C.Communicator) -> None:
        for scale in (1, LARGE):
            splits = [scale * (comm.rank + to) for to in range(3)]
            mine = torch.cat([torch.full((split,), 10 * comm.rank + to) for to, split in enumerate(splits)])
            got, counts = on_communicator.alltoall_sync(comm, mine, splits, "")
            assert counts.tolist() == [scale * (comm.rank + peer) for peer in range(3)]
            want = [torch.full((scale * (comm.rank + peer),), 10 * peer + comm.rank) for peer in range(3)]
            assert torch.equal(got, torch.cat(want))

    run_ranks(3, body)
