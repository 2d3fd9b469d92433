"""torch.distributed on dcoll with tensors of a device: with DCOLL_DEVICE=emulated on any machine, else on a GPU."""

import copy

import torch
import torch.distributed as dist
from tested_device import DEVICE, EMULATED
from torch.nn.parallel import DistributedDataParallel

import dcoll.torch  # noqa: F401 - registers the backend

SIZES = (0, 1, 1023, 300_001)


def check_init() -> None:
    dist.init_process_group("dcoll")


def mine(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The rank's number and one, on the device."""
    return torch.full((count,), dist.get_rank() + 1, dtype=dtype, device=DEVICE)


def filled(count: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((count,), value, dtype=dtype, device=DEVICE)


def total() -> int:
    return dist.get_world_size() * (dist.get_world_size() + 1) // 2


def check_reductions() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for count in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            one = mine(count, dtype)
            dist.all_reduce(one)
            assert torch.equal(one, filled(count, total(), dtype))
        work = dist.all_reduce(one := mine(2 * count)[::2], async_op=True)
        work.wait()
        assert torch.equal(one, filled(count, total()))
        share = filled(count, 0)
        dist.reduce_scatter_tensor(share, mine(count * size))
        assert torch.equal(share, filled(count, total()))
        dist.reduce(one := mine(count), 0, op=dist.ReduceOp.MAX)
        assert rank or torch.equal(one, filled(count, size))


def check_movement() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for count in SIZES:
        dist.broadcast(one := mine(count), size - 1)
        assert torch.equal(one, filled(count, size))
        everything = filled(count * size, 0)
        dist.all_gather_into_tensor(everything, mine(count))
        assert torch.equal(everything, torch.arange(1.0, size + 1, device=DEVICE).repeat_interleave(count))
        rooms = [filled(count, 0) for _ in range(size)]
        dist.all_gather(rooms, mine(count), async_op=True).wait()
        assert all(torch.equal(room, filled(count, r + 1)) for r, room in enumerate(rooms))
        swapped = filled(count * size, 0)
        dist.all_to_all_single(swapped, mine(count * size))
        assert torch.equal(swapped, everything)
        part = filled(count, 0)
        dist.scatter(part, [filled(count, r) for r in range(size)] if rank == 0 else None, 0)
        assert torch.equal(part, filled(count, rank))


def check_messages() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    before, behind = (rank - 1) % size, (rank + 1) % size
    for count in SIZES:
        works, got = [], [filled(count, 0) for _ in range(3)]
        for i, room in enumerate(got):
            works.append(dist.isend(mine(count) + i, behind, tag=i))
            works.append(dist.irecv(room, before, tag=i))
        for work in works:
            work.wait()
        assert all(torch.equal(room, filled(count, before + 1 + i)) for i, room in enumerate(got))
        room = filled(count, 0)
        ops = [dist.P2POp(dist.isend, mine(count), behind), dist.P2POp(dist.irecv, room, before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(room, filled(count, before + 1))
        roomy = filled(count + 1000, 7)
        sent, received = dist.isend(mine(count), behind), dist.irecv(roomy, before)
        sent.wait()
        received.wait()
        assert torch.equal(roomy[:count], filled(count, before + 1))
        assert torch.equal(roomy[count:], filled(1000, 7))


def check_the_stream_waits_for_what_was_called() -> None:
    """The program synchronises nothing: what is queued behind wait() sees the result, the call sees its operand."""
    side = 300 if EMULATED else 1500  # several milliseconds of products
    work = torch.ones(side, side, device=DEVICE)
    for i in range(10):
        one = mine(1000)
        for _ in range(20):
            work = (work @ work).clamp_(0, 1)
        one.mul_(i + work[0, 0])  # late, behind the products
        done = dist.all_reduce(one, async_op=True)
        done.wait()
        doubled = one * 2
        one.zero_()
        assert torch.equal(doubled, filled(1000, 2 * i * total() + 2 * total()))


def check_a_future() -> None:
    future = dist.all_reduce(one := mine(100_000), async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    assert torch.equal(doubled, filled(100_000, 2 * total()))
    assert torch.equal(one, filled(100_000, total()))


def check_data_parallel() -> None:
    """As one process that has all samples."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).double().to(DEVICE)
    alone = copy.deepcopy(model)
    data = torch.randn(6 * size, 16, dtype=torch.float64).to(DEVICE)
    parallel = DistributedDataParallel(model)
    for replica, samples in ((parallel, data[rank * 6 : rank * 6 + 6]), (alone, data)):
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            replica(samples).square().mean().backward()
            optimizer.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def check_objects_and_barrier() -> None:
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"rank": dist.get_rank()})
    assert found == [{"rank": r} for r in range(dist.get_world_size())]
    dist.barrier()


def check_end() -> None:
    dist.destroy_process_group()
