"""Processes that a rank forks after init(), as data loaders do: whatever they do, the job is as it was."""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import dcoll as hvd

CHILD_S = 10.0
"""How long a child may take: less than the job's deadlines, so that it is this one that says what hangs."""


def in_child(body: Callable[[], object], end: Callable[[int], NoReturn] = os._exit, name: str = "") -> str:
    """Run `body` in a forked process that then calls end(0); returns the text of what it raised, '' for nothing."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            body()
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os.close(writer)
        end(0)
    os.close(writer)
    deadline = time.monotonic() + CHILD_S
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            pytest.fail(f"the forked process had not ended after {CHILD_S:.0f} s {name}")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0, name
    with os.fdopen(reader) as pipe:
        return pipe.read()


def report(value: object) -> None:
    raise ValueError(value)


def the_job_works() -> None:
    for step in range(1, 4):
        assert hvd.allreduce(torch.full((4,), float(step)), op=hvd.Sum).tolist() == [float(hvd.size() * step)] * 4


def check_a_child_drops_a_mapped_tensor() -> None:
    kept = [hvd.empty(1 << 16).fill_(7.0)]
    assert in_child(kept.clear) == ""
    assert kept[0].eq(7).all()
    the_job_works()


def check_a_child_drops_a_tensor_whose_block_is_used_again() -> None:
    kept = [hvd.empty(1 << 16)]
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reader, 1)
        kept.clear()
        os._exit(0)
    kept.clear()
    again = hvd.empty(1 << 16).fill_(3.0)
    os.write(writer, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert again.eq(3).all()
    os.close(reader)
    os.close(writer)


def check_a_child_drops_a_model_and_its_optimizer() -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.synchronize()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    assert all(grad.ne(0).any() for grad in before)
    kept = [model, optimizer]

    def drop() -> None:
        nonlocal model, optimizer
        kept.clear()
        del model, optimizer
        gc.collect()

    assert in_child(drop) == ""
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), before, strict=True))
    with optimizer.skip_synchronize():
        optimizer.step()
    the_job_works()


def check_a_child_is_none_of_the_ranks() -> None:
    mapped, plain = hvd.empty(8).fill_(1.0), torch.ones(8)
    calls: dict[str, Callable[[], object]] = {
        "allreduce_": lambda: hvd.allreduce_(mapped),
        "allreduce": lambda: hvd.allreduce(plain),
        "allreduce of a large one": lambda: hvd.allreduce(torch.ones(1 << 20)),
        "allreduce_async": lambda: hvd.allreduce_async(plain),
        "by name": lambda: hvd.allreduce_async(plain, name="child"),
        "allgather": lambda: hvd.allgather(plain),
        "broadcast": lambda: hvd.broadcast(plain, 0),
        "alltoall": lambda: hvd.alltoall(torch.ones(hvd.size())),
        "reducescatter": lambda: hvd.reducescatter(torch.ones(hvd.size())),
        "grouped": lambda: hvd.grouped_allreduce([plain, mapped]),
        "grouped_allgather": lambda: hvd.grouped_allgather([plain, mapped]),
        "barrier": hvd.barrier,
        "join": hvd.join,
        "empty": lambda: hvd.empty(8),
        "object": lambda: hvd.broadcast_object("text", 0),
        "stats": hvd.stats,
        "start_timeline": lambda: hvd.start_timeline(os.devnull),
    }
    for name, call in calls.items():
        text = in_child(call, name=name)
        assert text.startswith("DcollError: This process was forked from rank"), (name, text)
        assert f"forked from rank {hvd.rank()} after dcoll.init()" in text, (name, text)
    assert mapped.eq(1).all()
    the_job_works()


def check_a_child_of_a_rank_at_work() -> None:
    """Its copies of the engine's locks may be held for ever, by a thread that it does not have."""
    calls = {"join": hvd.join, "stats": hvd.stats, "by name": lambda: hvd.allreduce_async(torch.ones(8), name="child")}
    done = False

    def work() -> None:
        while hvd.allreduce(torch.full((1 << 16,), float(done)), op=hvd.Sum, name="work")[0] < hvd.size():
            pass

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            for name, call in calls.items():
                text = in_child(call, name=name)
                assert text.startswith("DcollError: This process was forked from rank"), (name, text)
            assert in_child(hvd.shutdown, name="shutdown") == ""
    finally:
        done = True
        thread.join()
    the_job_works()


def check_a_handle_in_a_child() -> None:
    def start() -> hvd.Handle:
        return hvd.allreduce_async(torch.ones(100), op=hvd.Sum, name="held up")

    if hvd.rank() == 0:
        handles = [start()]
        assert "forked from rank 0" in in_child(lambda: hvd.synchronize(handles[0]))
        assert in_child(lambda: report(hvd.poll(handles[0]))) == "ValueError: True"  # a wait ends at once
        assert in_child(handles.clear) == ""
        hvd.broadcast_object("go on", 0)
        assert hvd.synchronize(handles[0]).eq(hvd.size()).all()
    else:
        hvd.broadcast_object("go on", 0)
        assert hvd.synchronize(start()).eq(hvd.size()).all()
    the_job_works()


def check_a_child_ends_like_any_program() -> None:
    hvd.synchronize(hvd.allreduce_async(torch.ones(1 << 18), name="so that there are threads"))
    assert in_child(lambda: None, sys.exit) == ""
    assert in_child(hvd.shutdown) == ""
    the_job_works()


def check_a_child_does_not_join_the_job_again() -> None:
    def join_again() -> None:
        hvd.shutdown()
        hvd.init()

    if hvd.size() > 1:
        assert in_child(join_again).startswith("DcollError: init() was called in a process that was forked")
    the_job_works()


class Numbers(Dataset[torch.Tensor]):
    """A data set that some batches into an epoch collects garbage."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 40:
            gc.collect()
        return torch.full((4,), float(index))


def check_a_data_loader_collects_garbage() -> None:
    gc.disable()
    garbage: list[object] = [hvd.empty(1 << 16)]
    garbage.append(garbage)
    del garbage
    loader = iter(DataLoader(Numbers(), batch_size=8, num_workers=1, prefetch_factor=1))
    first = next(loader)
    gc.enable()
    gc.collect()
    again = hvd.empty(1 << 16).fill_(3.0)
    assert float(first.sum()) + sum(float(batch.sum()) for batch in loader) == 4 * 63 * 64 / 2
    assert again.eq(3).all()
    the_job_works()
