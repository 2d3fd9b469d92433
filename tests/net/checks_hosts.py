"""Checks of a job on several hosts. The exhaustive ones need no network; these show that what crosses one is right."""

import os

import torch
from checks_collectives import (  # noqa: F401  imported checks are checks of this module
    check_allgather,
    check_alltoall,
    check_barrier_and_many_in_flight,
    check_mismatch,
    check_numpy,
    check_objects,
    check_reducescatter,
)
from reference import reduced, sample, sizes_for

import dcoll as hvd


def check_every_host_is_a_node() -> None:
    per_host = int(os.environ["RANKS_PER_HOST"])
    names = hvd.allgather_object(os.uname().nodename)
    assert names == [f"h{rank // per_host}" for rank in range(hvd.size())]
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank() % per_host, per_host)
    assert (hvd.cross_rank(), hvd.cross_size()) == (hvd.rank() // per_host, hvd.size() // per_host)


def check_allreduce() -> None:
    n = hvd.size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in (*sizes_for(n), 300_007):
            for op in (hvd.Sum, hvd.Max):
                inputs = [sample(rank, count, dtype, op, n) for rank in range(n)]
                mine = inputs[hvd.rank()]
                assert torch.equal(hvd.allreduce(mine, op=op), reduced(inputs, op)), (dtype, op, count)
                assert hvd.allreduce_(mine, op=op) is mine
                assert torch.equal(mine, reduced(inputs, op)), (dtype, op, count)


def check_broadcast() -> None:
    for root in range(hvd.size()):
        for count in (1, 70_001):
            mine = torch.arange(count) + hvd.rank()
            assert torch.equal(hvd.broadcast(mine, root), torch.arange(count) + root)
