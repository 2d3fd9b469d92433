"""What a group's methods take in other forms, what they refuse, and who hears of it."""

import contextlib
import inspect
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks_torch_collectives import WAYS
from pretend_cuda import Pretended
from torch.distributed import ReduceOp, distributed_c10d
from torch.distributed import _functional_collectives as functional

import dcoll as hvd
import dcoll.torch  # registers the backend
from dcoll import _C
from dcoll.job.world import WORLD
from dcoll.torch.process_group import BACKENDS_IN_PYTHON, TorchBackend


def check_init() -> None:
    dist.init_process_group("dcoll")


def is_mapped_shared(tensor: torch.Tensor) -> bool:
    """Whether it lies in pages that other processes have too."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions = line.split()[:2]
        first, end = (int(place, 16) for place in span.split("-"))
        if first <= tensor.data_ptr() < end:
            return permissions.endswith("s")
    return False


def check_what_is_refused() -> None:
    for op, dtype, text in (
        (ReduceOp.SUM, torch.float8_e5m2, "float8_e5m2"),
        (ReduceOp.BAND, torch.float32, "BAND"),
        (ReduceOp.AVG, torch.bool, "AVG"),
    ):
        with pytest.raises(RuntimeError, match=text):
            dist.all_reduce(torch.zeros(2, dtype=dtype), op=op)
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)complex|PRODUCT"):
        dist.all_reduce(torch.zeros(2, dtype=torch.complex64), op=ReduceOp.PRODUCT)
    if not BACKENDS_IN_PYTHON:  # there torch itself passes over such tensors
        with pytest.raises(RuntimeError, match="meta"):
            dist.all_reduce(torch.zeros(2, device="meta"))
    with pytest.raises(RuntimeError, match=r"(?i)sparse_?csr"):
        dist.all_reduce(torch.eye(2).to_sparse_csr())
    n = dist.get_world_size()
    with pytest.raises(RuntimeError, match=f"{n} times the input"):
        dist.all_gather_into_tensor(torch.zeros(n + 1), torch.zeros(1))
    with pytest.raises(RuntimeError, match="share"):
        dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(n))
    with pytest.raises(RuntimeError, match="all of one size"):
        dist.all_gather([torch.zeros(2)] * n, torch.zeros(3))
    with pytest.raises(RuntimeError, match="input_split_sizes"):
        dist.all_to_all_single(torch.zeros(n), torch.zeros(n), [1] * n, [2] * n)
    with pytest.raises(RuntimeError, match="cannot share evenly"):
        dist.all_to_all_single(torch.zeros(n + 1), torch.zeros(n + 1))
    for call in (dist.broadcast, dist.reduce, lambda t, root: dist.gather(t, None, root),
                 lambda t, root: dist.scatter(t, None, root)):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"root rank {n} does not exist; allowed are 0 to {n - 1}"):
            call(torch.zeros(2), n)
    dist.barrier()
    check = torch.ones(1)
    dist.all_reduce(check)
    assert check.item() == n


def check_lists_without_tensors_are_refused() -> None:
    group, one, r = dist.group.WORLD, [torch.zeros(2)], dist.get_rank()
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    gather, scatter = dist.GatherOptions(), dist.ScatterOptions()
    gather.rootRank = scatter.rootRank = r
    for call in (
        lambda: backend.allgather([], one),
        lambda: backend.gather([], one, gather),
        lambda: backend.scatter(one, [], scatter),
        lambda: backend.reduce_scatter(one, []),
    ):
        with pytest.raises(hvd.ArgumentError, match=r"got .*\[\] .* but takes one"):
            call()
    with pytest.raises(hvd.ArgumentError, match="takes one tensor per rank, but got a list of 2"):
        backend.allgather([one, one], one)
    for call in (dist.isend, dist.irecv):
        for tag in (1 << 31, -(1 << 31) - 1):
            with pytest.raises((hvd.ArgumentError, TypeError), match=f"tag {tag}" if not BACKENDS_IN_PYTHON else ""):
                call(one[0], r, tag=tag)
    dist.barrier()


def check_tensors_on_two_devices_are_refused() -> None:
    n, group, one = dist.get_world_size(), dist.group.WORLD, torch.zeros(2)
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    whole, each = torch.zeros(2 * n).as_subclass(Pretended), [torch.zeros(2).as_subclass(Pretended) for _ in range(n)]
    for call in (
        lambda: backend.all_gather_single(whole, one),
        lambda: backend.allgather([each], [one]),
        lambda: backend.reduce_scatter_single(one, whole),
        lambda: backend.reduce_scatter([one], [each]),
        lambda: backend.all_to_all_single(whole, torch.zeros(2 * n)),
        lambda: backend.alltoall(each, [one] * n),
    ):
        with pytest.raises(hvd.ArgumentError, match=r"takes tensors on one device, but got c.* and c"):
            call()
    dist.barrier()


def check_what_one_rank_refuses() -> None:
    """The others hear of it at once, as the error of that call, and all are in step again."""
    r, n = dist.get_rank(), dist.get_world_size()
    float8, two, each = torch.zeros(2, dtype=torch.float8_e5m2), torch.zeros(2), [torch.zeros(2) for _ in range(n)]
    flat = torch.zeros(2 * n)
    calls: list[Callable[[bool], object]] = [
        lambda odd: dist.all_reduce(float8 if odd else two),
        lambda odd: dist.all_reduce(float8 if odd else two, async_op=True).wait(),
        lambda odd: dist.all_reduce(two, op=ReduceOp.BAND if odd else ReduceOp.SUM),
        lambda odd: dist.reduce(float8 if odd else two, 0),
        lambda odd: dist.all_gather(each, torch.zeros(2 + odd)),
        lambda odd: dist.all_gather_into_tensor(torch.zeros(2 * n + odd), two),
        lambda odd: dist.reduce_scatter_tensor(torch.zeros(2 + odd), flat),
        lambda odd: dist.reduce_scatter(two, [torch.zeros(2 + odd) for _ in range(n)]),
        lambda odd: dist.all_to_all_single(flat, flat.clone(), [2] * n, [2 + odd] * n),
    ]
    for number, call in enumerate(calls):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            call(r == 1)
        text = str(caught.value)
        if r != 1:
            assert re.search(r"rank 1 called .* after a call there was refused \(\w+Error: \S", text), (number, text)
        check = torch.ones(1)
        dist.all_reduce(check)
        assert check.item() == n, number


def check_overloads() -> None:
    """The methods of torch's groups take options, or what they would hold: by place or by name."""
    r, n, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    total, limit = float(sum(range(n))), timedelta(seconds=60)

    def mine() -> torch.Tensor:
        return torch.full((2,), float(r))

    for call in (
        lambda t: group.allreduce([t]),
        lambda t: group.allreduce([t], ReduceOp.SUM),
        lambda t: group.allreduce(t, op=ReduceOp.SUM),
        lambda t: group.allreduce(t, op=ReduceOp.SUM, timeout=limit),
        lambda t: group.allreduce(tensor=t),
        lambda t: group.allreduce([t], dist.AllreduceOptions()),
    ):
        tensor = mine()
        call(tensor).wait()
        assert tensor.tolist() == [total] * 2
    tensor = mine()
    group.allreduce(tensor, ReduceOp.MAX, limit).wait()
    assert tensor.tolist() == [n - 1] * 2
    for call in (
        lambda t: group.reduce(t, 0, ReduceOp.MAX, limit),
        lambda t: group.reduce(t, root=0, op=ReduceOp.MAX),
    ):
        tensor = mine()
        call(tensor).wait()
        assert tensor.tolist() == [n - 1 if r == 0 else r] * 2
    for call in (lambda t: group.broadcast(t, n - 1, limit), lambda t: group.broadcast(t, root=n - 1)):
        tensor = mine()
        call(tensor).wait()
        assert tensor.tolist() == [n - 1] * 2
    outs = [torch.zeros(2) for _ in range(n)]
    group.allgather(outs, mine(), timeout=limit).wait()
    assert [out[0].item() for out in outs] == list(range(n))
    empty: list[torch.Tensor] = []
    outs = [torch.zeros(2) for _ in range(n)]
    group.gather(outs if r == 0 else empty, mine(), root=0).wait()
    assert r != 0 or [out[0].item() for out in outs] == list(range(n))
    tensor = torch.zeros(2)
    group.scatter(tensor, [torch.full((2,), float(i)) for i in range(n)] if r == 0 else empty, root=0).wait()
    assert tensor[0] == r
    group.reduce_scatter(tensor, [mine() for _ in range(n)], op=ReduceOp.MAX).wait()
    assert tensor[0] == n - 1
    out = torch.zeros(n)
    group.alltoall_base(out, torch.full((n,), float(r)), output_split_sizes=[1] * n, input_split_sizes=[1] * n).wait()
    assert out.tolist() == list(range(n))
    group.barrier(timeout=limit).wait()
    group.send([mine()], dstRank=(r + 1) % n, tag=3)
    group.recv([tensor], srcRank=(r - 1) % n, tag=3).wait()
    assert tensor[0] == (r - 1) % n
    for wrong in (lambda: group.allreduce(mine(), sum=1), group.broadcast, lambda: group.barrier(1, 2, 3)):
        with pytest.raises(TypeError):
            wrong()
    dist.barrier()


def check_plain_tensors_are_reduced_in_c() -> None:
    """In one call, which leaves all others to Python as they are."""
    size, rank = dist.get_world_size(), dist.get_rank()
    assert dist.group.WORLD is not None
    comm = dist.group.WORLD._get_backend(torch.device("cpu"))._comm
    plain: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        call = _C.all_reduce_plain
        patch.setattr(_C, "all_reduce_plain", lambda *args: plain.append(call(*args)) or plain[-1])
        for dtype, count in ((torch.float32, 0), (torch.float16, 1), (torch.int64, 5), (torch.float64, 1 << 16)):
            mine = torch.full((count, 1), rank + 1, dtype=dtype)
            version = mine._version
            dist.all_reduce(mine)
            assert mine._version == version  # as with Gloo: what autograd has saved of it is used as it is
            assert torch.equal(mine, torch.full_like(mine, size * (size + 1) // 2))
        assert plain == [not _C.emulates_device()] * 4
    flat, bits, pairs = torch.ones(4), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.complex64)
    for other in (flat[::2], bits, pairs, torch.eye(2).to_sparse(), torch.ones(2, device="meta"), torch.nn.Linear):
        assert _C.all_reduce_plain(comm, other, _C.SUM) is False
    assert flat.tolist() == [1] * 4
    if not _C.emulates_device():
        with pytest.raises(hvd.ArgumentError, match="unknown op code 99"):
            _C.all_reduce_plain(comm, flat, 99)


def check_negated_views() -> None:
    """Tensors whose memory has other values than they do."""
    if BACKENDS_IN_PYTHON:
        pytest.skip("from 2.14 on torch itself hands a negated copy on, and forgets it, of Gloo's calls too")
    r, n = dist.get_rank(), dist.get_world_size()

    def negated(*elements: float) -> torch.Tensor:
        return torch._neg_view(-torch.tensor(elements, dtype=torch.float32))

    for op, expected in ((ReduceOp.SUM, sum(range(n))), (ReduceOp.MAX, n - 1), (ReduceOp.MIN, 0)):
        for way in WAYS:
            tensor = negated(r, r)
            way(dist.all_reduce, tensor, op=op)
            assert tensor.tolist() == [expected] * 2, op
    for way in WAYS:
        out = negated(0, 0)
        way(dist.scatter, out, [negated(1.0, rank) for rank in range(n)] if r == 0 else None, src=0)
        assert out.tolist() == [1, r]
        outs = [negated(0, 0) for _ in range(n)]
        way(dist.all_to_all, outs, [negated(r, to) for to in range(n)])
        assert [one.tolist() for one in outs] == [[rank, r] for rank in range(n)]
        way(dist.all_gather, outs, negated(2.0, r))
        assert [one.tolist() for one in outs] == [[2, rank] for rank in range(n)]
        conjugate = torch.tensor([1 + 2j * r]).conj()
        gathered = [torch.zeros(1, dtype=torch.complex64).conj() for _ in range(n)]
        assert dist.group.WORLD is not None
        dist.group.WORLD.allgather([gathered], [conjugate]).wait()
        assert [one.item() for one in gathered] == [1 - 2j * rank for rank in range(n)]


def gather_single(tensor: torch.Tensor, into: torch.Tensor | None, dst: int, async_op: bool = False) -> object:
    """torch's function, which is new in 2.15; before it, the method of dcoll's group."""
    if hasattr(dist, "gather_single"):
        return dist.gather_single(tensor, into, dst, async_op=async_op)
    opts = dist.GatherOptions()
    opts.rootRank, opts.asyncOp = dst, async_op
    return dist.group.WORLD.gather_single(into, tensor, opts)


def check_gather_single() -> None:
    if not hasattr(dist.group.WORLD, "gather_single"):
        pytest.skip("the groups of PyTorch 2.14 have none")
    r, n = dist.get_rank(), dist.get_world_size()
    for way in WAYS:
        for count in (0, 1, 1000):
            into = torch.zeros(n, count) if r == 0 else None
            way(gather_single, torch.full((count,), float(r)), into, 0)
            assert into is None or into.eq(torch.arange(n).view(-1, 1)).all()
    with pytest.raises((RuntimeError, ValueError)):
        gather_single(torch.zeros(2), torch.zeros(2 * n + 1), r)
    dist.barrier()


def check_coalescing_after_an_exception() -> None:
    """What was raised within a manager does not touch the next one."""
    n = dist.get_world_size()
    one = torch.ones(3)
    with contextlib.suppress(ZeroDivisionError), dist._coalescing_manager(device=torch.device("cpu")):
        dist.all_reduce(one)
        raise ZeroDivisionError
    dist.distributed_c10d._world.pg_coalesce_state.clear()  # torch's own, which it leaves there
    two = torch.ones(3)
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.all_reduce(two)
    assert two.tolist() == [n] * 3
    dist.barrier()


def check_a_calls_timeout() -> None:
    """In its options, or in their place; whether async_op is given or not. The call goes on."""
    r, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return
    group, limit = dist.new_group(list(range(n))), timedelta(seconds=0.1)
    tensors = [torch.ones(3) for _ in range(6)]

    def options(kind: Any, is_async: bool) -> Any:
        opts = kind()
        opts.timeout, opts.asyncOp = limit, is_async
        return opts

    if r == n - 1:
        time.sleep(1.5)
    works = [
        group.allreduce([tensors[0]], options(dist.AllreduceOptions, True)),
        group.allreduce([tensors[1]], options(dist.AllreduceOptions, False)),
        group.allreduce(tensors[2], dist.ReduceOp.SUM, limit),
        group.reduce([tensors[3]], options(dist.ReduceOptions, False)),
        group.allreduce_coalesced([tensors[4]], options(dist.AllreduceCoalescedOptions, False)),
        group.broadcast([tensors[5]], options(dist.BroadcastOptions, False)),
        group.barrier(options(dist.BarrierOptions, False)),
    ]
    for work in works if r == 0 else ():
        with pytest.raises(hvd.TimeoutError, match=r"not finished after 0\.1"):
            work.wait()
    for work in works:
        work.wait(timedelta(seconds=60))
    assert [tensor[0].item() for tensor in tensors] == [n, n, n, n if r == 0 else 1, n, 1]


def check_groups_timeout() -> None:
    """A group's timeout is that of its operations, less than the job's or more, and may be changed. PyTorch's default
    is the job's."""
    r, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return
    one = torch.ones(1)
    ranks, soon, late = list(range(n)), timedelta(seconds=0.5), timedelta(hours=5)

    def backend(group: Any) -> Any:
        return group._get_backend(torch.device("cpu"))

    def seconds(group: Any) -> float:
        return float(backend(group)._comm.timeout_s)

    job = WORLD.comm
    assert job is not None
    assert seconds(dist.new_group(ranks)) == job.timeout_s != 18000
    assert seconds(dist.new_group(ranks, timeout=late)) == pytest.approx(18000, abs=1)  # PyTorch rounds it

    group = dist.new_group(ranks, timeout=soon)
    backend(group).set_timeout(late)
    if r == 0:
        time.sleep(1.5)
    group.allreduce(one).wait()
    backend(group).set_timeout(soon)
    if r == 0:
        with pytest.raises(hvd.TimeoutError, match=r"waiting for rank.*the group's timeout \(seconds, now 0\.5\)"):
            group.allreduce(one).wait()
    dist.barrier()


def check_an_abort_is_told_to_who_calls_later() -> None:
    """Over UCX the notice waits for a connection, which takes both ranks; the one that aborts calls other things."""
    r, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return
    group = dist.new_group(list(range(n)), timeout=timedelta(seconds=20))
    if r == 0:
        group.abort()
    else:
        time.sleep(0.5)
        with pytest.raises(RuntimeError, match="aborted"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.distributed_c10d._abort_process_group(group)
    dist.barrier()


def check_what_torch_asks_the_backend_for() -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    assert not backend.supports_tensor_alloc(0)  # as DDP's reducer asks, in C++
    for name in ("_supports_time_estimate", "supports_reconfigure", "supports_window"):  # torch's own call themselves
        assert not getattr(backend, name)


def check_the_flight_recorder_is_asked_for() -> None:
    hooks = getattr(distributed_c10d._world, "pg_flight_recorder_hooks", None)  # of 2.15
    if hooks is None:
        pytest.skip("this version of PyTorch records no calls of other backends")
    ranks = list(range(dist.get_world_size()))
    with pytest.MonkeyPatch.context() as patch:
        for size in ("", "100"):
            patch.setenv("TORCH_FR_BUFFER_SIZE", size)
            group = dist.new_group(ranks)
            dist.barrier(group)
            assert (group in hooks) == (size != "")
            dist.destroy_process_group(group)


def check_a_graph_waits_for_what_was_started_before_it() -> None:
    n = dist.get_world_size()
    tensor = torch.ones(50_000)
    dist.barrier()
    with functional.allow_inflight_collective_as_graph_input_ctx():
        if dist.get_rank() == 0:
            time.sleep(0.5)
        dist.all_reduce(tensor, async_op=True)
        assert torch.ops._c10d_functional.wait_tensor(tensor).eq(n).all()


def check_options_are_refused() -> None:
    ranks = list(range(dist.get_world_size()))
    with pytest.raises(hvd.ArgumentError, match=r"pg_options=\{'high_priority': True\}, .*has none"):
        dist.new_group(ranks, pg_options={"high_priority": True})
    dist.new_group(ranks, pg_options=TorchBackend.Options("dcoll"))


def check_destroy() -> None:
    dist.destroy_process_group()
    job = WORLD.comm  # the program's own, which goes on as it was
    assert job is not None
    before_s = job.timeout_s
    if "enable_reconfigure" in inspect.signature(dist.init_process_group).parameters:  # of 2.15
        with pytest.raises(hvd.ArgumentError, match="enable_reconfigure=True, but the dcoll backend cannot"):
            dist.init_process_group("dcoll", enable_reconfigure=True)
    dist.init_process_group("dcoll", timeout=timedelta(seconds=7))
    assert job.timeout_s == 7 != before_s
    dist.destroy_process_group()
    assert job.timeout_s == before_s
