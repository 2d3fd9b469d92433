"""Checks of messages between two ranks, between processes: every length, both ways at once, any source, errors."""

import random
import time
from typing import Any

import pytest
import torch
from mpirun import SEED

import dcoll as hvd
from dcoll import _C
from dcoll.job.world import communicator

SIZES = [0, 1, 24, 25, 4096, 16384, 16385, 61441, 300_001, 5_000_000]


def comm() -> _C.Communicator:
    return communicator()


def received(address: int, nbytes: int, peer: int, tag: int = 0) -> int:
    handle = comm().irecv(address, nbytes, peer, tag)
    handle.wait()
    return handle.source


def bytes_of(size: int, what: int, mapped: bool = False) -> torch.Tensor:
    made = hvd.empty(max(size, 1), dtype=torch.uint8) if mapped else torch.empty(max(size, 1), dtype=torch.uint8)
    index = torch.arange(max(size, 1))
    made.copy_((index * 7 + index // 251 + what).to(torch.uint8))
    return made


def check_every_length_round_a_ring() -> None:
    n, r = hvd.size(), hvd.rank()
    for size in SIZES:
        for mapped in (False, True):
            out, into = bytes_of(size, r, mapped), bytes_of(size, 99, mapped)
            sent = comm().isend(out.data_ptr(), size, (r + 1) % n, 3)
            received = comm().irecv(into.data_ptr(), size, (r - 1) % n, 3)
            received.wait()
            sent.wait()
            assert received.source == (r - 1) % n
            if size:
                assert into.equal(bytes_of(size, (r - 1) % n)), size


def check_calls_that_wait() -> None:
    r, numbers = hvd.rank(), torch.zeros(4, dtype=torch.int32)
    for i in range(200):
        if r == 0:
            numbers.fill_(i)
            comm().isend(numbers.data_ptr(), 16, 1).wait()
            assert received(numbers.data_ptr(), 16, 1) == 1
            assert numbers.eq(i + 1).all()
        elif r == 1:
            assert received(numbers.data_ptr(), 16, -1) == 0
            assert numbers.eq(i).all()
            numbers += 1
            comm().isend(numbers.data_ptr(), 16, 0).wait()


def check_random_traffic() -> None:
    n, r = hvd.size(), hvd.rank()
    plan = random.Random(SEED)
    begun: list[tuple[_C.Handle, torch.Tensor, Any]] = []
    for what in range(400):
        source, target, tag = plan.randrange(n), plan.randrange(n), plan.randrange(3)
        size = plan.randrange(plan.choice([100, 40_000, 400_000]))
        if r == source:
            out = bytes_of(size, what)
            begun.append((comm().isend(out.data_ptr(), size, target, tag), out, None))
        if r == target:
            into = bytes_of(size, what + 1)
            begun.append((comm().irecv(into.data_ptr(), size, source, tag), into, (size, what)))
        if what % 50 == 0:
            assert hvd.allreduce(torch.ones(10), op=hvd.Sum).eq(n).all()
    random.Random(f"{SEED} {r}").shuffle(begun)
    for handle, memory, expected in begun:
        handle.wait()
        if expected is not None and expected[0]:
            assert memory.equal(bytes_of(*expected))


def send_until_told(memory: torch.Tensor) -> None:
    for _ in range(100):
        comm().isend(memory.data_ptr(), 0, 1, 10).wait()
        time.sleep(0.01)


def check_receives_without_room() -> None:
    r, memory = hvd.rank(), bytes_of(300_000, 0)
    if r == 0:
        with pytest.raises(hvd.MismatchError, match=r"send \(300000 bytes to rank 1, tag 8\): rank 1 has room for 200"):
            comm().isend(memory.data_ptr(), 300_000, 1, 8).wait()
        comm().isend(memory.data_ptr(), 5, 1, 9).wait()
    elif r == 1:
        with pytest.raises(hvd.MismatchError, match=r"recv \(200000 bytes from rank 0, tag 8\): rank 0 sent 300000"):
            received(memory.data_ptr(), 200_000, 0, 8)
        with pytest.raises(hvd.MismatchError, match="rank 0 sent 5 bytes"):
            received(memory.data_ptr(), 4, 0, 9)
    hvd.barrier()
    if r == 0:  # the small one was done before its receive was there
        with pytest.raises(hvd.MismatchError, match=r"send \(5 bytes to rank 1, tag 9\): rank 1 has room for 4 bytes"):
            send_until_told(memory)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def check_wrong_ranks() -> None:
    with pytest.raises(hvd.ArgumentError, match="send: rank -1 does not exist"):
        comm().isend(0, 0, -1)
    with pytest.raises(hvd.ArgumentError, match=r"recv: rank 99 does not exist; allowed are -1 to"):
        comm().irecv(0, 0, 99)
