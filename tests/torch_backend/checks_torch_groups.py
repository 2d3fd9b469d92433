"""Groups, meshes, waiting and failing on the dcoll backend."""

import atexit
import gc
import itertools
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checks_fork import in_child, report
from checks_torch_methods import is_mapped_shared
from torch.distributed.device_mesh import init_device_mesh

import dcoll as hvd
from dcoll.job.lifecycle import GROUPS, LEAVING
from dcoll.torch import groups
from dcoll.torch.process_group import BACKENDS_IN_PYTHON


def check_init() -> None:
    dist.init_process_group("dcoll", timeout=timedelta(seconds=600))


def sum_in(group, value: float) -> float:  # type: ignore[no-untyped-def]
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def check_overlapping_groups() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    for ranks in ([0], [n - 1], list(range(1, n)), [0, n - 1], list(range(n)), list(range(0, n, 2))):
        group = dist.new_group(ranks)
        if r not in ranks:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
            continue
        assert dist.get_world_size(group) == len(set(ranks))
        assert sum_in(group, r) == sum(set(ranks))
        for root in set(ranks):
            tensor = torch.tensor([float(r)])
            dist.broadcast(tensor, root, group=group)
            assert tensor.item() == root
        outs = [torch.empty(1) for _ in set(ranks)]
        dist.all_gather(outs, torch.tensor([float(r)]), group=group)
        assert [int(out) for out in outs] == sorted(set(ranks))
        dist.destroy_process_group(group)
    dist.barrier()


def check_many_groups() -> None:
    n = dist.get_world_size()
    for _ in range(20):
        groups = [dist.new_group(list(range(n))) for _ in range(5)]
        assert [sum_in(group, i) for i, group in enumerate(groups)] == [float(n * i) for i in range(5)]
        for group in groups:
            dist.destroy_process_group(group)
    gc.collect()


def wait_for_those_left() -> None:
    """The members of destroyed groups."""
    deadline = time.monotonic() + 30
    while LEAVING and time.monotonic() < deadline:
        groups.close_those_left()
        time.sleep(0.001)
    assert not LEAVING


def held() -> dict[str, int]:
    """What this process holds: KiB of memory, of shared memory its part; descriptors; threads; what its end does."""
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    kib = {line[0]: int(line[1]) for line in lines if line[0] in ("Anonymous:", "Pss_Shmem:")}
    return {
        "KiB": sum(kib.values()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "groups": len(GROUPS) + len(LEAVING),
        "exit handlers": atexit._ncallbacks(),
    }


def use_groups(rounds: int) -> None:
    """Each round: two groups that overlap, a blocking and an asynchronous call in each, and their end. From 2.14 on
    torch numbers groups that some ranks alone have made differently: there all make them."""
    r, n = dist.get_rank(), dist.get_world_size()
    for number in range(rounds):
        made = []
        for ranks in (list(range(n)), sorted({0, 1 + number % (n - 1)})):
            if r in ranks or BACKENDS_IN_PYTHON:
                group = dist.new_group(ranks, use_local_synchronization=not BACKENDS_IN_PYTHON)
                made += [(ranks, group)] if r in ranks else []
        for ranks, group in made:
            assert sum_in(group, r) == sum(ranks)
            tensor = torch.full((3,), float(r))
            dist.all_reduce(tensor, group=group, async_op=True).wait()
            assert tensor.tolist() == [float(sum(ranks))] * 3
        for _, group in made:
            dist.destroy_process_group(group)
    wait_for_those_left()
    gc.collect()
    dist.barrier()


def check_500_groups_leave_nothing() -> None:
    use_groups(20)
    before = held()
    dist.barrier()
    use_groups(250)
    after = held()
    # From 2.14 on torch itself keeps up to 2 MiB, of as many of Gloo's groups too.
    assert after["KiB"] <= before["KiB"] + (3072 if BACKENDS_IN_PYTHON else 1024), (before, after)
    for exact in ("descriptors", "groups", "exit handlers"):
        assert after[exact] == before[exact], (before, after)
    assert after["threads"] <= before["threads"] + 1, (before, after)


def check_a_forked_process_leaves_groups_alone() -> None:
    """It shares the connections of a group that its parent has left, whose other members still use it."""
    r, n = dist.get_rank(), dist.get_world_size()
    wait_for_those_left()
    group = dist.new_group(list(range(n)))
    assert sum_in(group, r) == n * (n - 1) // 2
    if r == 0:
        dist.destroy_process_group(group)
        assert len(LEAVING) == 1
        assert in_child(lambda: groups.close_those_left() or report(len(LEAVING))) == "ValueError: 0"
        assert len(LEAVING) == 1
    dist.barrier()
    if r > 0:
        dist.destroy_process_group(group)
    wait_for_those_left()
    assert sum_in(None, r) == n * (n - 1) // 2


def check_groups_that_are_under_way_at_once() -> None:
    """Each rank begins the groups' operations in another order."""
    r, n = dist.get_rank(), dist.get_world_size()
    sets = [list(range(n)), [0, n - 1], list(range(1, n)), list(range(n - 1)), list(range(n))]
    groups = [dist.new_group(sorted(set(ranks))) for ranks in sets if ranks]
    for round_ in range(5):
        tensors = [torch.full((50_000,), float(r)) for _ in groups]
        works = []
        for i in range(len(groups)):
            at = (i + r + round_) % len(groups)
            if groups[at] is not dist.GroupMember.NON_GROUP_MEMBER:
                works.append((at, dist.all_reduce(tensors[at], group=groups[at], async_op=True)))
        for at, work in sorted(works, key=lambda one: one[0]):
            work.wait()
            assert tensors[at].eq(sum(set([ranks for ranks in sets if ranks][at]))).all()


def check_order_of_ranks() -> None:
    """Ranks of a group are counted as they are given."""
    r, n = dist.get_rank(), dist.get_world_size()
    for order in (list(range(n))[::-1], [*range(1, n), 0], [n - 1, 0]):
        if n == 1 or r not in order:
            continue
        group = dist.new_group(order, sort_ranks=False, use_local_synchronization=True)
        size, own = len(order), order.index(r)
        assert dist.get_rank(group) == own
        for count in (1, 7, 40_000):  # in one piece, and in more
            mine = torch.full((count,), float(r))
            gathered = torch.empty(size * count)
            dist.all_gather_into_tensor(gathered, mine, group=group)
            assert gathered.eq(torch.tensor(order, dtype=torch.float32).repeat_interleave(count)).all()
            parts = torch.arange(size, dtype=torch.float32).repeat_interleave(count) + r
            share = torch.empty(count)
            dist.reduce_scatter_tensor(share, parts, group=group)
            assert share.eq(own * size + sum(order)).all()
            turned = torch.empty(size * count)
            dist.all_to_all_single(turned, parts, group=group)
            assert turned.eq(torch.tensor(order, dtype=torch.float32).repeat_interleave(count) + own).all()
            summed = mine.clone()
            dist.all_reduce(summed, group=group)
            assert summed.eq(sum(order)).all()
            dist.broadcast(mine, order[0], group=group)
            assert mine.eq(order[0]).all()
        told, heard = torch.tensor([r]), torch.empty(1, dtype=torch.int64)
        works = [dist.isend(told, order[(own + 1) % size], group), dist.irecv(heard, order[own - 1], group)]
        for work in works:
            work.wait()
        assert heard.item() == order[own - 1]
    dist.barrier()


def check_members_that_differ_in_the_order() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return
    order = list(range(n))
    with pytest.raises(RuntimeError, match=r"makes a group of ranks .* where rank 0 makes one of ranks 0, 1"):
        dist.new_group(order if r == 0 else order[::-1], sort_ranks=False)
    dist.barrier()


def check_mesh() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    if n % 2:
        return
    mesh = init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("outer", "inner"))
    inner, outer = mesh.get_group("inner"), mesh.get_group("outer")
    assert sum_in(inner, r) == r // 2 * 4 + 1
    assert sum_in(outer, r) == sum(rank for rank in range(n) if rank % 2 == r % 2)
    flat = mesh._flatten("both")
    assert sum_in(flat.get_group(), 1) == n


def check_split_group() -> None:
    """The group's own method, and torch's function from 2.15 on. Ranks are numbers in the group that is split."""
    r, n = dist.get_rank(), dist.get_world_size()
    if not BACKENDS_IN_PYTHON:
        with pytest.raises(hvd.ArgumentError, match="new_group"):
            dist.group.WORLD.split_group([0])
        return
    mine = [rank for rank in range(n) if (rank == 0) == (r == 0)]
    part = dist.group.WORLD.split_group(mine)
    assert sum_in(part, r) == sum(mine)
    again = part.split_group([part.rank()])
    assert sum_in(again, r) == r
    dist.barrier()
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        return  # torch's function asks for a GPU there
    halves = [[rank] for rank in range(n - 1)]  # the last rank is in none
    group = dist.split_group(split_ranks=halves or [[0]])
    outside = group is dist.GroupMember.NON_GROUP_MEMBER
    assert outside == (r == n - 1 and n > 1)
    assert outside or sum_in(group, r) == r
    whole = dist.split_group(split_ranks=[list(range(n))])
    assert sum_in(whole, r) == sum(range(n))


def check_group_names_and_backends() -> None:
    group = dist.new_group(list(range(dist.get_world_size())), group_desc="of all")
    assert group.group_desc == "of all"
    assert isinstance(group.group_name, str)
    assert dist.get_backend(group) == "dcoll"
    backend = group._get_backend(torch.device("cpu"))
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    memory = backend.allocate_tensor(12, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (memory.dtype, memory.numel()) == (torch.bfloat16, 12)
    dist.all_reduce(memory.fill_(1), group=group)
    assert memory.eq(dist.get_world_size()).all()
    assert is_mapped_shared(memory) == (hvd.local_size() > 1 and os.environ.get("DCOLL_TRANSPORT") != "mpi")
    place = memory.data_ptr()
    del memory
    again = backend.allocate_tensor(12, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert again.data_ptr() == place  # the pages that are there already


def check_wait_with_a_limit_names_who_is_missing() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return
    late = n - 1
    group = dist.new_group(list(range(n)))
    tensor = torch.ones(3)
    if r == late:
        time.sleep(2)
        dist.all_reduce(tensor, group=group)
    else:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        with pytest.raises(hvd.TimeoutError, match=rf"all-?reduce.* not finished after 0\.2\d* s.*rank.*{late}"):
            work.wait(timedelta(seconds=0.2))
        assert not work.is_completed()
        assert work.exception() is None
        work.wait()
    assert tensor.tolist() == [float(n)] * 3


def check_monitored_barrier() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(n)))
    dist.monitored_barrier()
    dist.monitored_barrier(group, 30.0, wait_all_ranks=True)
    if n == 1:
        return
    if r == 0:
        time.sleep(1.5)
        dist.monitored_barrier(group, timedelta(seconds=30))
        group.monitored_barrier(timedelta(seconds=30))
        return
    for call in (lambda limit: dist.monitored_barrier(group, limit), group.monitored_barrier):
        with pytest.raises(RuntimeError, match=r"barrier.*rank.*0"):
            call(timedelta(seconds=0.2))


def check_mismatch() -> None:
    """Ranks that call different things hear of it, and the job goes on in other groups."""
    r, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return
    group = dist.new_group(list(range(n)))
    call = (lambda: dist.broadcast(torch.zeros(4), 0, group=group)) if r == 0 else lambda: sum_in(group, 1)
    with pytest.raises(RuntimeError, match=r"different collectives"):
        call()
    assert sum_in(None, 1) == n


def check_sizes_that_differ() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return
    group = dist.new_group(list(range(n)))
    with pytest.raises(RuntimeError, match=r"elements|differ"):
        dist.all_gather_into_tensor(torch.empty(n * (r + 1)), torch.empty(r + 1), group=group)
    assert sum_in(None, 1) == n


def check_abort() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return
    wait_for_those_left()
    before, group = len(GROUPS), dist.new_group(list(range(n)))
    if r == 0:
        time.sleep(0.5)
        group.abort()
        with pytest.raises(RuntimeError, match="aborted"):
            sum_in(group, 1)
    else:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        with pytest.raises(RuntimeError, match="aborted"):
            work.wait()
        assert (work.is_completed(), work.is_success()) == (True, False)
        with pytest.raises(Exception, match="aborted"):
            work.get_future().wait()
    dist.distributed_c10d._abort_process_group(group)
    assert len(GROUPS) == before
    assert sum_in(None, 1) == n
    wait_for_those_left()


def check_groups_are_destroyed_by_each_rank_alone() -> None:
    """In other orders on each, and while others still call something."""
    r, n = dist.get_rank(), dist.get_world_size()
    begun = time.monotonic()
    made = [dist.new_group(list(range(n))) for _ in range(3)]
    for i in range(3):
        dist.destroy_process_group(made[(i + r) % 3])
    one = dist.new_group(list(range(n)))
    dist.barrier(group=one)
    if r > 0 and n > 1:
        with pytest.raises(hvd.DcollError, match="rank 0 called shutdown"):
            dist.all_reduce(torch.ones(3), group=one)
    dist.destroy_process_group(one)
    wait_for_those_left()
    dist.barrier()
    assert time.monotonic() - begun < float(os.environ["DCOLL_TIMEOUT"])


def check_callbacks_that_communicate() -> None:
    """A callback may start the next operation, in another group too."""
    n = dist.get_world_size()
    other = dist.new_group(list(range(n)))
    results = []

    def again(done: torch.futures.Future) -> None:
        tensor = done.value()[0]
        results.append(dist.all_reduce(tensor, group=other, async_op=True).get_future())

    futures = [dist.all_reduce(torch.ones(2), async_op=True).get_future().then(again) for _ in range(5)]
    torch.futures.wait_all(futures)
    assert all(one.wait()[0].eq(n * n).all() for one in results)


def check_callbacks_that_wait() -> None:
    """For the future of what they have started, as PowerSGD's hook does."""
    n = dist.get_world_size()

    def again(done: torch.futures.Future) -> torch.Tensor:
        first: torch.Tensor = dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0]
        return first

    dist.barrier()
    if dist.get_rank() == 0:  # so that the callbacks of the others are run by the thread that completes futures
        time.sleep(0.3)
    futures = [dist.all_reduce(torch.ones(100_000), async_op=True).get_future() for _ in range(3)]
    for future in futures:
        assert future.then(again).wait().eq(n * n).all()
    assert dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()[0].tolist() == [n] * 2


def check_callbacks_that_wait_for_what_was_started_before() -> None:
    """For the futures of operations before and behind theirs, in their group and another, in whatever order they were
    asked for."""
    n = dist.get_world_size()
    other = dist.new_group(list(range(n)))
    for order in itertools.permutations(range(3)):
        dist.barrier()
        if dist.get_rank() == 0:  # as above
            time.sleep(0.03)
        works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for group in (None, other, None)]
        futures = [works[i].get_future() for i in order]

        def total(_: torch.futures.Future, futures: list = futures) -> float:  # type: ignore[type-arg]
            return sum(float(future.wait()[0][0]) for future in futures)

        for future in [future.then(total) for future in futures]:
            assert future.wait() == 3 * n


def check_futures_of_tensors_made_for_inference() -> None:
    """The mode is the program's thread's, and the results are copied by another one."""
    n = dist.get_world_size()
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.3)
    with torch.inference_mode():
        parts = [torch.empty(4) for _ in range(n)]
        dist.all_gather(parts, torch.ones(4), async_op=True).get_future().wait()
    assert all(part.eq(1).all() for part in parts)


def check_futures_that_wait_leave_the_processor_alone() -> None:
    """What computes meanwhile is on the same core. A thread that spins would use all of that second; over MPI a sleep
    looks at MPI now and then."""
    if os.environ.get("DCOLL_TRANSPORT") == "mpi":
        return
    late = dist.get_rank() == 0
    dist.barrier()
    if late:
        time.sleep(1.5)
    futures = [dist.all_reduce(torch.ones(300_000), async_op=True).get_future() for _ in range(2)]
    if not late:
        begin = time.process_time()
        time.sleep(1)
        assert time.process_time() - begin < 0.5
    torch.futures.wait_all(futures)


def check_dcolls_own_calls_beside() -> None:
    n = dist.get_world_size()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [float(n)] * 2
    assert sum_in(None, 2) == 2 * n


def check_only_members_make_a_group() -> None:
    """Last, because from 2.14 on torch numbers the groups of those ranks differently afterwards."""
    r, n = dist.get_rank(), dist.get_world_size()
    if r < n - 1 or n == 1:
        group = dist.new_group(list(range(max(n - 1, 1))), use_local_synchronization=True)
        assert sum_in(group, 1) == max(n - 1, 1)
    dist.barrier()
