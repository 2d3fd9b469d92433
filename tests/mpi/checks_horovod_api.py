"""Checks of groups, gradients and argument forms, as Horovod documents them; with 2, 3 and 4 ranks."""

import random
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from mpirun import SEED

import dcoll as hvd


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(np.prod(shape, dtype=np.int64))
    return ((torch.arange(count) * 7 + rank * 5) % 11).to(dtype).view(shape)


SHAPES = [(3,), (), (0,), (2, 5), (1000,), (7, 1, 3)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def group_of(rank: int) -> list[torch.Tensor]:
    return [values(rank, *shape, dtype=dtype) for dtype in DTYPES for shape in SHAPES]


def equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in want]
    return all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def check_grouped_allreduce() -> None:
    n, r = hvd.size(), hvd.rank()
    want = [torch.stack(parts).sum(0, dtype=parts[0].dtype) for parts in zip(*map(group_of, range(n)), strict=True)]
    mine = group_of(r)
    assert equal(hvd.grouped_allreduce(mine, op=hvd.Sum, name="g"), want)
    assert equal(mine, group_of(r)), "the inputs changed"
    handle = hvd.grouped_allreduce_async(mine, op=hvd.Sum)
    assert equal(hvd.synchronize(handle), want)
    assert hvd.poll(handle)
    handles = [hvd.grouped_allreduce_async(group_of(r), op=hvd.Sum) for _ in range(5)]
    assert all(equal(handle.wait(60), want) for handle in reversed(handles))
    versions = [t._version for t in mine]
    got = hvd.grouped_allreduce_(mine, op=hvd.Sum)
    assert all(one is other for one, other in zip(got, mine, strict=True))
    assert equal(mine, want)
    assert all(t._version > version for t, version in zip(mine, versions, strict=True))
    mine = group_of(r)
    assert hvd.synchronize(hvd.grouped_allreduce_async_(mine, op=hvd.Sum))[3] is mine[3]
    assert equal(mine, want)
    largest = hvd.grouped_allreduce(group_of(r), op=hvd.Max)
    assert equal(largest, [torch.stack(p).amax(0) for p in zip(*map(group_of, range(n)), strict=True)])
    assert hvd.grouped_allreduce([]) == []


def check_grouped_allreduce_of_the_same_memory_twice() -> None:
    n, r = hvd.size(), hvd.rank()
    twice, rest = torch.full((3000,), float(r)), torch.full((60_000,), float(r))
    hvd.grouped_allreduce_([twice, rest, twice[1000:2000], twice, rest[50:100]], op=hvd.Sum)
    for one in (twice, rest):
        assert one.unique().tolist() == [n * (n - 1) / 2]


def check_grouped_allreduce_of_odd_layouts() -> None:
    n, r = hvd.size(), hvd.rank()
    base = values(r, 4, 6)
    want = sum(values(k, 4, 6) for k in range(n))
    mine = [base.t(), base[:, ::2], np.asfortranarray(base.numpy()), base.numpy()[0]]
    wanted = [want.t(), want[:, ::2], want.numpy(), want.numpy()[0]]
    got = hvd.grouped_allreduce(mine, op=hvd.Sum)
    assert [type(one) for one in got] == [type(one) for one in mine]
    for one, other in zip(got, wanted, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))
    apart = [base.clone().t(), base.clone()[:, ::2]]
    hvd.grouped_allreduce_(apart, average=False)
    assert equal(apart, wanted[:2])
    scaled = hvd.grouped_allreduce([torch.ones(3)], op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert scaled[0].tolist() == [2.0 * n] * 3
    large = hvd.grouped_allreduce([torch.full((300_000,), float(r)) for _ in range(4)], op=hvd.Sum)
    assert all(one.eq(n * (n - 1) / 2).all() for one in large)


def check_a_group_fails_as_a_whole() -> None:
    odd = hvd.rank() == hvd.size() - 1
    for mine in (
        [torch.ones(2 + odd), torch.ones(3 - odd)],  # as many elements in all
        [torch.ones(2), *([torch.ones(2, dtype=torch.float64)] if odd else [])],
        [torch.ones(2), torch.ones(3, dtype=(torch.float32, torch.float64)[odd])],
    ):
        with pytest.raises(hvd.MismatchError):
            hvd.grouped_allreduce_(mine, op=hvd.Sum)
        assert all(one.eq(1).all() for one in mine), "something was reduced"
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    with pytest.raises(ValueError, match="the average of bool"):
        hvd.grouped_allreduce([torch.ones(2), torch.ones(2, dtype=torch.bool)])
    with pytest.raises(ValueError, match="list of tensors"):
        hvd.grouped_allreduce(torch.ones(2))
    with pytest.raises(ValueError, match="op is"):
        hvd.grouped_allreduce([torch.ones(2)], op="sum")


def check_grouped_allgather_and_reducescatter() -> None:
    n, r = hvd.size(), hvd.rank()

    def parts(rank: int) -> list[torch.Tensor]:
        return [values(rank, rank + 1, 2), values(rank, 0, 3), values(rank, 500, dtype=torch.int32)]

    want = [torch.cat(each) for each in zip(*map(parts, range(n)), strict=True)]
    assert equal(hvd.grouped_allgather(parts(r), name="g"), want)
    assert equal(hvd.synchronize(hvd.grouped_allgather_async(parts(r))), want)

    def rows(rank: int) -> list[torch.Tensor]:
        return [values(rank, 2 * n + 1, 3), values(rank, 1), values(rank, n, dtype=torch.float64)]

    sums = [torch.stack(each).sum(0) for each in zip(*map(rows, range(n)), strict=True)]
    shares = [torch.tensor_split(each, n)[r] for each in sums]
    assert equal(hvd.grouped_reducescatter(rows(r), op=hvd.Sum), shares)
    assert equal(hvd.synchronize(hvd.grouped_reducescatter_async(rows(r), op=hvd.Sum)), shares)
    halved = hvd.grouped_reducescatter(rows(r), compression=hvd.Compression.fp16, op=hvd.Sum)
    assert equal(halved, shares)
    for call in (hvd.grouped_allgather, hvd.grouped_reducescatter, lambda group: hvd.reducescatter(group[1])):
        with pytest.raises(ValueError, match="without dimensions"):
            call([torch.ones(2), torch.tensor(1.0)])


def check_grouped_allgather_of_any_rows() -> None:
    """Blocks beside the posts, in slots, in rounds and above what one poll moves; a rank leaves its own where it is."""
    n, r = hvd.size(), hvd.rank()
    rng = random.Random(SEED)
    for call in range(12):
        shapes = [[(rng.choice([0, 1, 7, 100, 3000, 400_000]), cols) for _ in range(n)] for cols in (1, 3, 5)]
        blocks = [[values(rank + i, *shape) for rank, shape in enumerate(each)] for i, each in enumerate(shapes)]
        mine = [each[r] for each in blocks]
        got = hvd.grouped_allgather(mine) if call % 2 else hvd.grouped_allgather_async(mine, name=f"{call}").wait()
        assert equal(got, [torch.cat(each) for each in blocks]), shapes


Collective = Callable[[torch.Tensor], torch.Tensor]


def gradient(call: Collective, mine: torch.Tensor, weight: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What backward() leaves where the loss is (weight * call(x)).sum()."""
    x = mine.clone().requires_grad_()
    out = call(x)
    assert out.requires_grad
    (weight(out) * out).sum().backward()
    assert x.grad is not None
    return x.grad


def weight_of(rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda out: values(rank + 1, *out.shape, dtype=out.dtype)


def check_gradients_of_allreduce() -> None:
    n, r = hvd.size(), hvd.rank()
    mine = values(r, 4, 3, dtype=torch.float64)
    weights = [values(k + 1, 4, 3, dtype=torch.float64) for k in range(n)]
    total = sum(weights)
    # In one process: the loss is the sum over ranks of weight . sum of all x.
    xs = [values(k, 4, 3, dtype=torch.float64).requires_grad_() for k in range(n)]
    sum((w * sum(xs)).sum() for w in weights).backward()
    assert torch.equal(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), mine, weight_of(r)), xs[r].grad)
    assert torch.equal(gradient(hvd.allreduce, mine, weight_of(r)), total / n)
    scaled = gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25), mine,
                      weight_of(r))  # fmt: skip
    assert torch.equal(scaled, total / 2)
    halved = gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16), mine, weight_of(r))
    assert torch.equal(halved, total)
    group = [values(r, 3).requires_grad_(), values(r, 2, 2), values(r, 5).requires_grad_()]
    out = hvd.grouped_allreduce(group, op=hvd.Sum)
    sum((one * (i + 1)).sum() for i, one in enumerate(out)).backward()
    assert group[0].grad.tolist() == [float(n)] * 3
    assert group[1].grad is None
    assert group[2].grad.tolist() == [3.0 * n] * 5
    with torch.no_grad():
        assert not hvd.allreduce(group[0]).requires_grad
        assert not hvd.allgather(group[0]).requires_grad
    assert not hvd.allreduce(group[0].detach()).requires_grad
    twice = hvd.allreduce(hvd.allreduce(group[0], op=hvd.Sum), op=hvd.Sum)
    (grad,) = torch.autograd.grad(twice.sum(), group[0])
    assert grad.tolist() == [float(n * n)] * 3


def check_gradients_of_the_others() -> None:
    n, r = hvd.size(), hvd.rank()
    # All-gather with other numbers of rows: this rank's rows of the average of the weights.
    rows = [k + 1 for k in range(n)]
    whole = (sum(rows), 2)
    average = sum(values(k + 1, *whole) for k in range(n)) / n
    got = gradient(hvd.allgather, values(r, rows[r], 2), weight_of(r))
    assert torch.equal(got, average.split(rows)[r])
    # Broadcast: the average at the root, zero elsewhere.
    average = sum(values(k + 1, 5) for k in range(n)) / n
    got = gradient(lambda x: hvd.broadcast(x, n - 1), values(r, 5), weight_of(r))
    assert torch.equal(got, average if r == n - 1 else torch.zeros(5))
    # All-to-all: what rank k weighs the rows from here with.
    splits = [r + k for k in range(n)]
    sent = values(r, sum(splits), 2)
    got = gradient(lambda x: hvd.alltoall(x, splits=torch.tensor(splits, dtype=torch.int32))[0], sent, weight_of(r))
    received = [values(k + 1, sum(j + k for j in range(n)), 2).split([j + k for j in range(n)]) for k in range(n)]
    assert torch.equal(got, torch.cat([received[k][r] for k in range(n)]))
    even = gradient(hvd.alltoall, values(r, n), weight_of(r))
    assert torch.equal(even, torch.stack([values(k + 1, n)[r] for k in range(n)]))
    # Reduce-scatter: all weights, times the number of ranks for a sum.
    shares = [len(part) for part in torch.arange(2 * n + 1).tensor_split(n)]
    gathered = torch.cat([values(k + 1, share) for k, share in enumerate(shares)])
    mine = values(r, 2 * n + 1)
    assert torch.equal(gradient(hvd.reducescatter, mine, weight_of(r)), gathered)
    assert torch.equal(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), mine, weight_of(r)), n * gathered)
    scaled = gradient(lambda x: hvd.reducescatter(x, prescale_factor=2.0, postscale_factor=2.0), mine, weight_of(r))
    assert torch.equal(scaled, 4 * gathered)


def check_gradients_of_groups() -> None:
    """The same as those of one call per tensor."""
    n, r = hvd.size(), hvd.rank()
    calls: list[tuple[Callable[[list[torch.Tensor]], list[torch.Tensor]], Collective]] = [
        (hvd.grouped_allgather, hvd.allgather),
        (hvd.grouped_reducescatter, hvd.reducescatter),
        (
            lambda group: hvd.grouped_reducescatter(group, op=hvd.Sum, prescale_factor=2.0, postscale_factor=4.0),
            lambda one: hvd.reducescatter(one, op=hvd.Sum, prescale_factor=2.0, postscale_factor=4.0),
        ),
        (
            lambda group: hvd.grouped_reducescatter(group, compression=hvd.Compression.fp16, op=hvd.Sum),
            lambda one: hvd.reducescatter(one, compression=hvd.Compression.fp16, op=hvd.Sum),
        ),
    ]
    for together, alone in calls:
        more = r if alone is hvd.allgather else 0
        parts = [values(r, 3 + more, 2), values(r, n, dtype=torch.float64), values(r, 4, 2)]
        want = [gradient(alone, one, weight_of(r)) for one in (parts[0], parts[1])]
        group = [parts[0].clone().requires_grad_(), parts[1].clone().requires_grad_(), parts[2]]
        out = together(group)
        assert out[0].requires_grad
        sum((weight_of(r)(one) * one).sum() for one in out[:2]).backward()  # nothing depends on the last
        assert torch.equal(group[0].grad, want[0])
        assert torch.equal(group[1].grad, want[1])
        assert group[2].grad is None
        assert equal([one.detach() for one in out], [alone(one) for one in parts])


def check_gradients_of_gradients() -> None:
    """d/dx of g, the gradient of the sum of y ** 3 where y comes of x ** 2: 30 x ** 4 by hand on one rank. Where the
    gradient is an average of all ranks', so is its gradient."""
    n, r = hvd.size(), hvd.rank()
    x = torch.arange(1.0, 2 * n + 1, dtype=torch.float64)
    averaged, plain = (6 + 24 / n) * x**4, 30 * x**4
    calls: list[tuple[Collective, torch.Tensor]] = [
        (hvd.allreduce, plain),
        (lambda t: hvd.grouped_allreduce([t])[0], plain),
        (hvd.allgather, averaged),
        (lambda t: hvd.grouped_allgather([t])[0], averaged),
        (lambda t: hvd.broadcast(t, n - 1), averaged if r == n - 1 else 0 * x),
        (hvd.alltoall, plain),
        (hvd.reducescatter, plain),
        (lambda t: hvd.grouped_reducescatter([t])[0], plain),
    ]
    for call, want in calls:
        mine = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad((call(mine**2) ** 3).sum(), mine, create_graph=True)
        grad.sum().backward()
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, want)


def check_compression() -> None:
    class Negated:
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, float]:
            return -tensor, 3.0

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: float) -> torch.Tensor:
            return tensor * ctx

    n = hvd.size()
    for compression, factor in ((hvd.Compression.none, 1), (hvd.Compression.fp16, 1), (Negated, -3)):
        for dtype in (torch.float32, torch.int64):
            got = hvd.allreduce(torch.ones(3, dtype=dtype), None, "c", compression, hvd.Sum)
            assert got.tolist() == [factor * n] * 3
            got, other = hvd.grouped_allreduce([torch.ones(3, dtype=dtype)] * 2, compression=compression, op=hvd.Sum)
            assert got.tolist() == other.tolist() == [factor * n] * 3
            share = hvd.reducescatter(torch.ones(n, dtype=dtype), None, compression, hvd.Sum)
            assert share.tolist() == [factor * n]


def check_sparse() -> None:
    n, r = hvd.size(), hvd.rank()
    mine = torch.sparse_coo_tensor(torch.tensor([[0, r + 1]]), torch.tensor([1.0, 2.0]), (n + 1,))
    want = [float(n), *[2.0] * n]
    assert hvd.sparse_allreduce_async(mine, name="s", op=hvd.Sum)().to_dense().tolist() == want
    rows = torch.arange(6.0).view(2, 3)
    others = [rows.view(3, 2).to_sparse(), rows.int().to_sparse(), rows.to_sparse(1)]
    for i, (other, op) in enumerate([*((other, hvd.Sum) for other in others), (rows.to_sparse(), hvd.Average)]):
        odd = n > 1 and r == n - 1
        finish = hvd.sparse_allreduce_async(other if odd else rows.to_sparse(), f"odd {i}", op if odd else hvd.Sum)
        with pytest.raises(hvd.MismatchError, match="of float32 2x3, sparse in 2") if n > 1 else nullcontext():
            finish()
    finish = hvd.sparse_allreduce_async(mine.to_sparse(), name="a", op=hvd.Average)
    assert torch.allclose(finish().to_dense(), torch.tensor(want) / n)
    with pytest.raises(ValueError, match="op is"):
        hvd.sparse_allreduce_async(mine, name="s", op=hvd.Max)
    with pytest.raises(ValueError, match="COO"):
        hvd.sparse_allreduce_async(torch.ones(3), name="s", op=hvd.Sum)


def check_alltoall_forms() -> None:
    n, r = hvd.size(), hvd.rank()
    sent = torch.arange(n, dtype=torch.bfloat16) + 10 * r
    plain = hvd.alltoall(sent)
    assert isinstance(plain, torch.Tensor)
    for splits in ([1] * n, torch.ones(n, dtype=torch.int32), np.ones(n, dtype=np.int64)):
        got, received = hvd.alltoall(sent, splits)
        assert torch.equal(got, plain)
        assert (received.dtype, received.tolist()) == (torch.int32, [1] * n)
    nothing, received = hvd.alltoall(torch.empty(0, 3), [0] * n)
    assert nothing.shape == (0, 3)
    assert received.tolist() == [0] * n
    for wrong in ([1] * (n + 1), [-1, *[1] * (n - 1)], [2] * n):
        with pytest.raises(ValueError, match="splits"):
            hvd.alltoall(sent, wrong)
    with pytest.raises(ValueError, match="without dimensions"):
        hvd.alltoall(torch.tensor(1.0))


def check_shapes_are_compared() -> None:
    with pytest.raises(hvd.MismatchError, match=r"sum of 17x1311 float32.*sum of 17x23x57 float32"):
        hvd.allreduce(torch.ones(17, 23 * 57) if hvd.rank() == 0 else torch.ones(17, 23, 57), op=hvd.Sum)
    assert hvd.allreduce(torch.ones(17, 23), op=hvd.Sum).eq(hvd.size()).all()


def check_model_helpers() -> None:
    model = torch.nn.Linear(2, 3)
    torch.nn.init.constant_(model.weight, float(hvd.rank()))
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    assert model.weight.eq(1).all()
    for wrong in (3, [3], model.weight, "weights"):
        with pytest.raises(ValueError, match="broadcast_parameters takes"):
            hvd.broadcast_parameters(wrong, root_rank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (hvd.rank() + 1))
    hvd.broadcast_optimizer_state(optimizer, root_rank=1, model=model)
    assert optimizer.param_groups[0]["lr"] == 0.2
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), root_rank=0)
    other = torch.nn.Linear(2, 3 + (hvd.rank() == 0))
    with pytest.raises(hvd.MismatchError, match="weight"):
        hvd.broadcast_optimizer_state(torch.optim.SGD(other.parameters()), 0, other)


def check_what_is_no_handle() -> None:
    for call in (hvd.poll, hvd.synchronize):
        for wrong in (3, None, torch.ones(1)):
            with pytest.raises(ValueError, match="what an asynchronous collective has returned, but got"):
                call(wrong)


def check_arguments_that_differ_are_no_skipped_call() -> None:
    """Ranks that ask for the same with other arguments are in step with their next calls, whatever those are."""
    n, r = hvd.size(), hvd.rank()
    for _ in range(2):
        with pytest.raises(hvd.MismatchError, match="rank 0 called broadcast"):
            hvd.broadcast(torch.ones(17, 3), r)  # each rank takes itself for the root
        with pytest.raises(hvd.MismatchError, match="rank 0 called broadcast"):
            hvd.broadcast(torch.ones(17, 3, dtype=(torch.float32 if r else torch.int32)), 0)
        assert hvd.allgather(torch.full((1,), r)).tolist() == list(range(n))
        with pytest.raises(hvd.MismatchError, match="rank 0 called allreduce"):
            hvd.allreduce(torch.ones(5), op=hvd.Max if r else hvd.Sum)
        assert hvd.broadcast(torch.full((2,), r), 1).tolist() == [1, 1]
