"""By name, join and stalls, as a script sees them."""

import ctypes
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpirun import SEED

import dcoll as hvd


def check_names_in_random_order() -> None:
    rng = random.Random(f"{SEED} {hvd.rank()}")
    total = sum(range(1, hvd.size() + 1))
    for _ in range(3):
        order = list(range(20))
        rng.shuffle(order)
        tensors = {i: torch.full((10 ** (i % 5),), float((i + 1) * (hvd.rank() + 1))) for i in order}
        handles = {i: hvd.allreduce_async_(tensors[i], op=hvd.Sum, name=f"t{i}") for i in order}
        gathered = hvd.allgather_async(np.array([hvd.rank()]), name="t0")
        assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == hvd.size()
        rng.shuffle(order)
        for i in order:
            assert (hvd.synchronize(handles[i]) == (i + 1) * total).all()
        assert gathered.wait().tolist() == list(range(hvd.size()))


def every_operation(group: hvd.ProcessSet, named: bool) -> dict[str, tuple[Callable[[], Any], list]]:
    """How to start each of the asynchronous operations among the group's ranks, and what comes of it here."""
    ranks, r = group.ranks, hvd.rank()
    n, place, first, last = len(ranks), ranks.index(r), ranks[0], ranks[-1]
    total, mine, rows = float(sum(ranks)), torch.full((1, 2), float(r)), torch.arange(n, dtype=torch.float32)
    sparse = torch.sparse_coo_tensor(torch.tensor([[place]]), torch.tensor([2.0]), (n,))

    def given(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name if named else None, "process_set": group, **more}

    pair = [torch.ones(2), torch.full((3,), float(r))]
    of_pair = [[float(n)] * 2, [total] * 3]
    return {
        "allreduce": (lambda: hvd.allreduce_async(mine, **given("x", op=hvd.Sum)), [[total] * 2]),
        "allreduce_": (lambda: hvd.allreduce_async_(mine.clone(), **given("y", op=hvd.Max)), [[float(last)] * 2]),
        "group": (lambda: hvd.grouped_allreduce_async(pair, **given("g", op=hvd.Sum)), of_pair),
        "group_": (
            lambda: hvd.grouped_allreduce_async_([one.clone() for one in pair], **given("h", op=hvd.Sum)),
            of_pair,
        ),
        "sparse": (lambda: hvd.sparse_allreduce_async(sparse, **given("x", op=hvd.Sum) | {"name": "x"}), [2.0] * n),
        "allgather": (lambda: hvd.allgather_async(mine, **given("x")), [[float(k)] * 2 for k in ranks]),
        "gathers": (
            lambda: hvd.grouped_allgather_async([mine[0], mine], **given("g")),
            [[float(k) for k in ranks for _ in range(2)], [[float(k)] * 2 for k in ranks]],
        ),
        "broadcast": (lambda: hvd.broadcast_async(mine, last, **given("x")), [[float(last)] * 2]),
        "broadcast_": (lambda: hvd.broadcast_async_(mine.clone(), first, **given("y")), [[float(first)] * 2]),
        "alltoall": (
            lambda: hvd.alltoall_async(rows + 10 * r, [1] * n, **given("x")),
            [[10.0 * k + place for k in ranks], [1] * n],
        ),
        "reducescatter": (lambda: hvd.reducescatter_async(rows, **given("x", op=hvd.Sum)), [n * float(place)]),
        "scatters": (
            lambda: hvd.grouped_reducescatter_async([rows, rows + 1], **given("g", op=hvd.Sum)),
            [[n * float(place)], [n * (place + 1.0)]],
        ),
    }


def expect_all(operations: dict[str, tuple[Callable[[], Any], list]], begin: list[str], end: list[str]) -> None:
    """Start them in one order and wait for them in another."""
    handles = {kind: operations[kind][0]() for kind in begin}
    for kind in end:
        got = handles[kind]().to_dense() if kind.endswith("sparse") else hvd.synchronize(handles[kind])
        values = [one.tolist() for one in got] if isinstance(got, list | tuple) else got.tolist()
        assert values == operations[kind][1], kind


def check_every_operation_by_name_in_any_order() -> None:
    operations = every_operation(hvd.global_process_set, named=True)
    rng = random.Random(f"{SEED} {hvd.rank()}")
    for _ in range(3):
        expect_all(operations, rng.sample(list(operations), len(operations)), rng.sample(list(operations), 12))


def check_operations_go_on_while_the_interpreter_lock_is_held() -> None:
    """What drives them needs no lock of Python's: rank 0 holds it until all others have every result."""
    r, n = hvd.rank(), hvd.size()
    if n == 1:
        return
    folder = tempfile.TemporaryDirectory() if r == 0 else None
    path = hvd.broadcast_object(folder and f"{folder.name}/ended", name="folder")
    if r == 0:
        os.mkfifo(path)
    hvd.barrier()
    ended = os.open(path, os.O_RDWR)
    handles = []
    for count in (n, 3000 * n, 300_000 * n):
        ours, strided = torch.full((count,), float(r)), torch.full((count, 2), float(r)).t()
        for name in (None, f"{count} "):
            named = [name and name + what for what in ("sum", "strided", "rows", "root", "parts", "shares", "group")]
            handles += [
                hvd.allreduce_async(ours, op=hvd.Sum, name=named[0]),
                hvd.allreduce_async(strided, op=hvd.Sum, name=named[1]),
                hvd.allgather_async(ours, name=named[2]),
                hvd.broadcast_async(ours, n - 1, name=named[3]),
                hvd.alltoall_async(ours, name=named[4]),
                hvd.reducescatter_async(ours, op=hvd.Sum, name=named[5]),
                hvd.grouped_allreduce_async([ours, ours.double()], op=hvd.Sum, name=named[6]),
            ]
    interval = sys.getswitchinterval()
    try:
        if r == 0:
            sys.setswitchinterval(100)
            for _ in range(n - 1):
                ctypes.PyDLL(None).read(ended, ctypes.create_string_buffer(1), 1)
        results = [hvd.synchronize(handle) for handle in handles]
    finally:
        sys.setswitchinterval(interval)
        if r > 0:
            os.write(ended, b"1")
        os.close(ended)
    for kind in (0, 1, 5):
        assert all((result == n * (n - 1) / 2).all() for result in results[kind::7])
    assert all((result == n - 1).all() for result in results[3::7])
    assert all((one == n * (n - 1) / 2).all() for group in results[6::7] for one in group)
    for rows in results[2::7] + results[4::7]:
        assert (rows == torch.arange(n).repeat_interleave(len(rows) // n)).all()


def check_poll_is_false_until_every_rank_has_come() -> None:
    late = hvd.size() - 1
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="late") if hvd.rank() != late else None
    assert handle is None or not hvd.poll(handle)
    hvd.barrier()
    handle = handle or hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="late")
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 2
    assert hvd.poll(handle)


def check_a_name_twice() -> None:
    first = hvd.allreduce_async(torch.ones(3), name="twice") if hvd.rank() == 0 else None
    if first is not None:
        with pytest.raises(hvd.ArgumentError, match=r"twice.*still under way"):
            hvd.allreduce_async(torch.ones(3), name="twice")
    hvd.barrier()
    (first or hvd.allreduce_async(torch.ones(3), name="twice")).wait()


def check_a_name_twice_where_all_others_have_come() -> None:
    """Also what is done in no time keeps its name until this rank waits or begins something else."""
    last = hvd.size() - 1
    for i in range(40):
        one, name = torch.ones(10 ** (i % 5)), f"quick {i}"
        first = hvd.allreduce_async(one, name=name) if hvd.rank() != last else None
        hvd.barrier()
        if hvd.rank() == last:
            hvd.allreduce_async(one, name=name)  # nobody keeps the handle
            for _ in range(2):
                with pytest.raises(hvd.ArgumentError, match=r"quick.*still under way"):
                    hvd.allreduce_async(one, name=name)
        if first is not None:
            first.wait()
        hvd.barrier()
    for _ in range(20):
        polled = hvd.broadcast_async(torch.ones(3), 0, name="polled")
        while not hvd.poll(polled):
            pass
    for _ in range(20):
        hvd.allgather_async(torch.ones(3), name="waited for").wait()


def check_a_name_again_once_it_was_waited_for() -> None:
    """However quick the operation was: begun by a rank that all others wait for, it is done before anybody waits."""
    ones = torch.ones(2)
    for i in range(1000):
        if hvd.rank() == i % hvd.size():
            time.sleep(2e-4)
        assert hvd.synchronize(hvd.allreduce_async(ones, op=hvd.Sum, name="again")).eq(hvd.size()).all()


def check_a_mismatch_by_name() -> None:
    good = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="good")
    bad = hvd.allreduce_async(torch.ones(3 + hvd.rank()), name="bad")
    with pytest.raises(hvd.MismatchError, match=r"rank 0 called allreduce .bad. .average of 3 float32.; rank 1 called"):
        bad.wait()
    assert good.wait().tolist() == [hvd.size()] * 2


def check_who_has_joined_counts_as_zero() -> None:
    n, r = hvd.size(), hvd.rank()
    for kind in range(2):  # by themselves; and in a group
        if r > 0:

            def reduce(value: float, op: hvd.ReduceOp, kind: int = kind) -> float:
                one = torch.full((3,), value)
                out = hvd.grouped_allreduce([one, one], op=op)[1] if kind else hvd.allreduce(one, op=op)
                return out[2].item()

            others = range(1, n)
            assert reduce(float(r), hvd.Sum) == sum(others)
            assert reduce(float(r), hvd.Average) == pytest.approx(sum(others) / n, abs=1e-6)  # still by size()
            assert reduce(float(r), hvd.Min) == 1.0
            assert reduce(-float(r), hvd.Max) == -1.0
            assert reduce(2.0, hvd.Product) == 2.0 ** (n - 1)
            assert hvd.synchronize(hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="by name"))[0] == n - 1
            calls = (
                lambda: hvd.allgather(torch.ones(2)),
                lambda: hvd.broadcast(torch.ones(2), 1),
                lambda: hvd.alltoall(torch.ones(n)),
                lambda: hvd.reducescatter(torch.ones(n)),
                hvd.barrier,
            )
            for call in calls:
                with pytest.raises(hvd.JoinedError, match="rank 0 called join"):
                    call()
        assert hvd.join() in (range(n) if n > 2 else [1])
    assert len(set(hvd.allgather_object(hvd.join()))) == 1, "the ranks know of different last ones"


def check_who_joined_last() -> None:
    for by_name in (False, True):
        for step in range(3 if hvd.rank() == 0 else 1):
            if by_name:
                hvd.synchronize(hvd.allreduce_async(torch.ones(3), name=f"step {step}"))
            else:
                hvd.allreduce(torch.ones(3))
        assert hvd.join() == 0


def check_uneven_batches_train() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(2):
        with hvd.Join([torch.ones(2, 4)] * 3 * hvd.rank()) as batches:  # rank 0 has none at all
            for batch in batches:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
        assert batches.last == hvd.size() - 1
        assert batches.steps == 3 * hvd.rank()
        hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        assert (model.weight.grad == 2.0).all()
        optimizer.step()
    assert hvd.join() in range(hvd.size())
