"""Every collective of torch.distributed on dcoll: exact values, every operator and dtype, sizes, layouts."""

import functools
import operator
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import dcoll.torch  # noqa: F401 - registers the backend
from dcoll.torch import dtypes

INTEGERS = [dtype for dtype in dtypes.REDUCED if not dtype.is_floating_point and dtype is not torch.bool]
FLOATS = [dtype for dtype in dtypes.REDUCED if dtype.is_floating_point]
COMPLEX = list(dtypes.PAIRS)
MOVED = [
    *dtypes.REDUCED, *COMPLEX, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def check_init() -> None:
    dist.init_process_group("dcoll")
    assert dist.get_backend() == "dcoll"


@functools.cache
def values(dtype: torch.dtype, count: int, rank: int) -> torch.Tensor:
    """Small whole numbers, different on every rank; products of four of them are exact in every dtype. To be cloned
    where they are written to."""
    whole = ((torch.arange(3) + rank) % 3 + 1).repeat(count // 3 + 1)[:count]
    if dtype.is_complex:
        return torch.complex(whole.double(), 4.0 - whole.double()).to(dtype)
    return whole > 1 if dtype is torch.bool else whole.to(dtype)


def filled(dtype: torch.dtype, count: int, value: int) -> torch.Tensor:
    """Any bits, different at most places and for most values."""
    return bits_of(dtype, count, value).clone()


@functools.lru_cache(64)
def bits_of(dtype: torch.dtype, count: int, value: int) -> torch.Tensor:
    index = torch.arange(count * dtype.itemsize, dtype=torch.int32)
    bits = (index * 7 + (index >> 8) + value * 31).to(torch.uint8)
    return bits % 3 == 0 if dtype is torch.bool else bits.view(dtype)


def times(tensor: torch.Tensor, factor: int) -> torch.Tensor:
    """Not of complex32 on every version of torch."""
    return (tensor.to(torch.complex128) * factor).to(tensor.dtype) if tensor.is_complex() else tensor * factor


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same bits: some dtypes have no comparison."""
    if one.dtype is torch.bool:
        return torch.equal(one, other)
    flat, flat_other = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(flat, flat_other)


def sizes(dtype: torch.dtype) -> tuple[int, ...]:
    """The last is above 64 KiB, in float32 far above: there is another way for what is large."""
    large = 65_537 if dtype is torch.float32 else (64 << 10) // dtype.itemsize + 1
    return 0, 1, 5, 1023, large


def run(call, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
    call(*args, **kwargs)


def later(call, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
    work = call(*args, async_op=True, **kwargs)
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()


def polled(call, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
    work = call(*args, async_op=True, **kwargs)
    while not work.is_completed():
        time.sleep(0)
    assert work.exception() is None


def by_future(call, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
    work = call(*args, async_op=True, **kwargs)
    work.get_future().wait()


WAYS = (run, later, polled, by_future)


def ways(count: int) -> tuple[Callable[..., None], ...]:
    """Of a large tensor one: to look at every element takes longer than the call."""
    return WAYS if count <= 1023 else WAYS[1:2]


PYTHON = {
    ReduceOp.SUM: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}


def reduced(op, parts: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """In 64 bits, which hold all of it."""
    dtype = parts[0].dtype
    if dtype is torch.bool:
        wide = functools.reduce(PYTHON[op], [part.long() for part in parts])
        return wide != 0
    wide_dtype = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    if op == ReduceOp.AVG:
        total = functools.reduce(operator.add, [part.to(wide_dtype) for part in parts])
        rounding = {} if dtype.is_floating_point or dtype.is_complex else {"rounding_mode": "trunc"}
        return torch.div(total, len(parts), **rounding).to(dtype)
    return functools.reduce(PYTHON[op], [part.to(wide_dtype) for part in parts]).to(dtype)


def pairs_of() -> list[tuple[ReduceOp, torch.dtype]]:
    there = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
    bits = [op for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR) if op in dtypes.OPERATORS]
    return [
        *((op, dtype) for op in there for dtype in dtypes.REDUCED),
        *((op, dtype) for op in bits for dtype in (*INTEGERS, torch.bool)),
        *((ReduceOp.AVG, dtype) for dtype in (*INTEGERS, *FLOATS, *COMPLEX)),
        *((ReduceOp.SUM, dtype) for dtype in COMPLEX),
    ]


def mine_and_all(dtype: torch.dtype, count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    parts = [values(dtype, count, rank) for rank in range(dist.get_world_size())]
    return parts[dist.get_rank()].clone(), parts


def check_all_reduce() -> None:
    for op, dtype in pairs_of():
        for count in sizes(dtype):
            mine, parts = mine_and_all(dtype, count)
            if op == ReduceOp.AVG:  # exact where the sum is a multiple of the size
                mine, parts = times(mine, len(parts)), [times(part, len(parts)) for part in parts]
            expected = reduced(op, parts)
            for way in WAYS if count == 5 else ways(count)[:2]:
                tensor = mine.clone()
                way(dist.all_reduce, tensor, op=op)
                assert equal(tensor, expected), (op, dtype, count, way.__name__)


def check_all_reduce_layouts() -> None:
    n = dist.get_world_size()
    for way in WAYS:
        for make in (
            lambda: torch.arange(24.0).view(4, 6).t(),
            lambda: torch.arange(24.0).view(4, 6)[:, ::2],
            lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
            lambda: torch.tensor(3.0),
        ):
            tensor = make()
            way(dist.all_reduce, tensor)
            assert torch.equal(tensor, make() * n), (way, make())


def check_premul_sum() -> None:
    factor = (
        torch.distributed._make_nccl_premul_sum(0.5) if hasattr(torch.distributed, "_make_nccl_premul_sum") else None
    )
    op = factor or torch._C._distributed_c10d._make_nccl_premul_sum(0.5)
    for dtype in (*FLOATS, *COMPLEX):
        tensor, parts = mine_and_all(dtype, 17)
        dist.all_reduce(tensor, op=op)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        assert equal(tensor, (sum(part.to(wide) for part in parts) / 2).to(dtype)), dtype
    for dtype in FLOATS:  # torch has no view of pairs here
        whole = torch.cat([values(dtype, 4, rank) for rank in range(dist.get_world_size())])
        mine = torch.empty(4, dtype=dtype)
        dist.reduce_scatter_tensor(mine, whole, op=op)
        assert equal(mine, values(dtype, 4, dist.get_rank()) * dist.get_world_size() / 2), dtype


def check_premul_sum_of_other_reductions() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    op = torch._C._distributed_c10d._make_nccl_premul_sum(0.5)
    for dtype in FLOATS:
        tensor, parts = mine_and_all(dtype, 17)
        want = (sum(part.double() for part in parts) / 2).to(dtype)
        dist.reduce(tensor, n - 1, op=op)
        assert equal(tensor, want if r == n - 1 else parts[r]), dtype
        mine = torch.empty(4, dtype=dtype)
        dist.reduce_scatter(mine, [values(dtype, 4, rank) for rank in range(n)], op=op)
        assert equal(mine, values(dtype, 4, r) * n / 2), dtype


def check_sparse_all_reduce() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    for way in WAYS:
        tensor = torch.sparse_coo_tensor([[0, r + 1]], [1.0, 2.0], (n + 1,), check_invariants=True)
        way(dist.all_reduce, tensor)
        assert tensor.to_dense().tolist() == [float(n), *[2.0] * n]


def check_reduce() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    for op, dtype in pairs_of():
        before, parts = mine_and_all(dtype, 7)
        if op == ReduceOp.AVG:
            before, parts = times(before, n), [times(part, n) for part in parts]
        expected = reduced(op, parts)
        for root in range(n):
            for way in WAYS[:2]:
                tensor = before.clone()
                way(dist.reduce, tensor, root, op=op)
                assert equal(tensor, expected if r == root else before), (op, dtype)


def check_reduce_scatter() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    for op, dtype in pairs_of():
        for count in (0, 1, 5, 4097):
            wholes = [values(dtype, count * n, rank) for rank in range(n)]
            if op == ReduceOp.AVG:
                wholes = [times(whole, n) for whole in wholes]
            expected = reduced(op, wholes)[r * count : (r + 1) * count]
            for way in WAYS[:2]:
                if not dtype.is_complex:  # torch has no view of pairs here
                    out = torch.empty(count, dtype=dtype)
                    way(dist.reduce_scatter_tensor, out, wholes[r].clone(), op=op)
                    assert equal(out, expected), (op, dtype, count)
                    inside = wholes[r].clone()
                    way(dist.reduce_scatter_tensor, inside[r * count : (r + 1) * count], inside, op=op)
                    assert equal(inside[r * count : (r + 1) * count], expected), (op, dtype, count, "in place")
                for inputs in (
                    list(wholes[r].clone().chunk(n)) if count else [wholes[r].clone() for _ in range(n)],
                    [part.clone() for part in wholes[r].split(max(count, 1))] if count else [wholes[r]] * n,
                ):
                    out = torch.empty(count, dtype=dtype)
                    way(dist.reduce_scatter, out, inputs, op=op)
                    assert equal(out, expected), (op, dtype, count, "list")


def check_reduce_scatter_of_unequal_parts() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        for step in (2, 5000):
            sizes = [rank * step for rank in range(n)]
            expected = reduced(ReduceOp.SUM, [values(dtype, sizes[r], rank) for rank in range(n)])
            for way in WAYS:
                out = torch.empty(sizes[r], dtype=dtype)
                way(dist.reduce_scatter, out, [values(dtype, count, r).clone() for count in sizes])
                assert equal(out, expected), (dtype, step, way)
    if n > 1:
        sizes = [3, 1, *[1] * (n - 2)] if r == 0 else [1, 3, *[1] * (n - 2)]
        with pytest.raises(RuntimeError, match="different collectives"):
            dist.reduce_scatter(torch.empty(sizes[r]), [torch.ones(count) for count in sizes])
    dist.barrier()


def check_broadcast() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    for dtype in MOVED:
        for root in range(n):
            for count in sizes(dtype):
                for way in ways(count):
                    tensor = filled(dtype, count, r + 1)
                    way(dist.broadcast, tensor, root)
                    assert equal(tensor, filled(dtype, count, root + 1)), (dtype, root, count)
    tensor = torch.full((3, 4), float(r)).t()
    dist.broadcast(tensor, n - 1)
    assert torch.equal(tensor, torch.full((4, 3), n - 1.0))


def check_all_gather() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    for dtype in MOVED:
        for count in sizes(dtype):
            expected = [filled(dtype, count, rank + 1) for rank in range(n)]
            whole = torch.cat([one.view(torch.uint8) for one in expected]).view(dtype)
            for way in ways(count):
                out = filled(dtype, count * n, 0)
                way(dist.all_gather_into_tensor, out, filled(dtype, count, r + 1))
                assert equal(out, whole), (dtype, count)
                out = filled(dtype, count * n, 0)
                share = out[r * count : (r + 1) * count].copy_(expected[r])
                way(dist.all_gather_into_tensor, out, share)
                assert equal(out, whole), (dtype, count)
                outs = [filled(dtype, count, 0) for _ in range(n)]
                way(dist.all_gather, outs, filled(dtype, count, r + 1))
                assert all(map(equal, outs, expected)), (dtype, count)
    flat = torch.zeros(n * 3)
    dist.all_gather(list(flat.chunk(n)), torch.full((3,), float(r)))
    assert flat.tolist() == [float(rank) for rank in range(n) for _ in range(3)]
    outs = [torch.zeros(2, 3).t() for _ in range(n)]
    dist.all_gather(outs, torch.full((2, 3), float(r)).t())
    assert [out.unique().tolist() for out in outs] == [[float(rank)] for rank in range(n)]


def check_gather_and_scatter() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    for dtype in MOVED:
        for root in range(n):
            for count in (0, 1, 129):
                expected = [filled(dtype, count, rank + 1) for rank in range(n)]
                for way in WAYS:
                    outs = [filled(dtype, count, 0) for _ in range(n)] if r == root else None
                    way(dist.gather, filled(dtype, count, r + 1), outs, dst=root)
                    assert outs is None or all(map(equal, outs, expected)), (dtype, count)
                    out = filled(dtype, count, 0)
                    way(dist.scatter, out, expected if r == root else None, src=root)
                    assert equal(out, expected[r]), (dtype, count)


def check_all_to_all() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    for dtype in MOVED:
        for rows in (0, 1, 3, 700):
            for way in WAYS:
                send = torch.cat([filled(dtype, rows * 2, r * n + to + 1) for to in range(n)]).view(-1, 2)
                out = filled(dtype, rows * 2 * n, 0).view(-1, 2)
                way(dist.all_to_all_single, out, send)
                expected = torch.cat([filled(dtype, rows * 2, rank * n + r + 1) for rank in range(n)])
                assert equal(out, expected.view(-1, 2)), (dtype, rows)
    for way in WAYS:
        # Rank s sends s + d + 1 rows to rank d.
        send = torch.cat([torch.full((r + to + 1, 3), float(10 * r + to)) for to in range(n)])
        out = torch.empty(sum(rank + r + 1 for rank in range(n)), 3)
        way(dist.all_to_all_single, out, send, [rank + r + 1 for rank in range(n)], [r + to + 1 for to in range(n)])
        expected = torch.cat([torch.full((rank + r + 1, 3), float(10 * rank + r)) for rank in range(n)])
        assert torch.equal(out, expected)
        outs = [torch.empty(rank + r + 1, 3) for rank in range(n)]
        way(dist.all_to_all, outs, [torch.full((r + to + 1, 3), float(10 * r + to)) for to in range(n)])
        assert torch.equal(torch.cat(outs), expected)


def check_objects() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    everybody = [None] * n
    dist.all_gather_object(everybody, {"rank": r, "text": "x" * r})
    assert everybody == [{"rank": rank, "text": "x" * rank} for rank in range(n)]
    sent = [r, "root"] if r == n - 1 else [None, None]
    dist.broadcast_object_list(sent, src=n - 1)
    assert sent == [n - 1, "root"]
    gathered = [None] * n if r == 0 else None
    dist.gather_object(r * 2, gathered, dst=0)
    assert gathered in (None, [rank * 2 for rank in range(n)])
    received: list[object] = [None]
    dist.scatter_object_list(received, [f"for {rank}" for rank in range(n)] if r == 0 else None, src=0)
    assert received == [f"for {r}"]


def check_coalescing() -> None:
    r, n = dist.get_rank(), dist.get_world_size()
    for async_ops in (False, True):
        tensors = [torch.full((size,), float(r)) for size in (1, 100, 10_000)]
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if async_ops:
            manager.wait()
        assert all(tensor.eq(sum(range(n))).all() for tensor in tensors)
        outs = [torch.empty(size * n) for size in (1, 10)]
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for out in outs:
                dist.all_gather_into_tensor(out, torch.full((out.numel() // n,), float(r)))
        if async_ops:
            manager.wait()
        assert [out.unique().tolist() for out in outs] == [[float(rank) for rank in range(n)]] * 2
        shares = [torch.empty(size) for size in (1, 10)]
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for share in shares:
                dist.reduce_scatter_tensor(share, torch.ones(share.numel() * n))
        if async_ops:
            manager.wait()
        assert all(share.eq(n).all() for share in shares)


def check_many_at_once() -> None:
    """Several hundred operations under way, waited for in another order."""
    r, n = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((1 + 37 * i,), float(r + i)) for i in range(300)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works[::2]):
        work.wait()
    torch.futures.wait_all([work.get_future() for work in works[1::2]])
    assert all(tensor.eq(sum(range(n)) + n * i).all() for i, tensor in enumerate(tensors))


def check_works_may_be_dropped() -> None:
    n = dist.get_world_size()
    seen = []
    for _ in range(20):
        tensor = torch.ones(200_000)
        dist.all_reduce(tensor, async_op=True)
        future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
        seen.append(future.then(lambda done: done.value()[0] * 2))
    assert all(one.wait().eq(2 * n).all() for one in seen)
    dist.barrier()


def check_destroy() -> None:
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("dcoll")
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(dist.get_world_size())] * 2
    dist.destroy_process_group()
