"""Checks of models on a device, and of such that are half on the CPU (tested_device.py says on which device).

Ranks compute the same as one process with all their batches. Values are small whole numbers: nothing is rounded."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tested_device import DEVICE, PRETENDED, is_there
from torch import nn
from torch.utils.checkpoint import checkpoint

import dcoll as hvd
from dcoll.collectives import memory, sparse_exchange

CPU = torch.device("cpu")


def there(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE)


def everyones(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    return hvd.allgather_object([one.detach().cpu() for one in tensors])  # type: ignore[no-any-return]


def assert_all_have(tensors: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for rank, of_rank in enumerate(everyones(tensors)):
        for one, want in zip(of_rank, wanted, strict=True):
            assert torch.equal(one, want.detach().cpu()), rank


class Halves(nn.Module):
    """The first layer on the CPU, the second on the device, a third again on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.second = nn.Linear(4, 4).to(DEVICE)
        self.last = nn.Linear(4, 2)
        with torch.no_grad():
            for place, p in enumerate(self.parameters()):
                p.copy_((torch.arange(p.numel()).view(p.shape) + place) % 3 - 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.second(there(self.first(x))).cpu())
        return y


def batch(rank: int, step: int) -> torch.Tensor:
    return (torch.arange(6.0).view(2, 3) + rank + step) % 4


def check_a_model_on_both() -> None:
    n = hvd.size()
    top = {"compression": hvd.Compression.topk(ratio=1.0)}  # all of them
    for options in ({}, {"compression": hvd.Compression.fp16}, top, {"op": hvd.Sum}, {"groups": 2}):
        model, alone = Halves(), Halves()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=n / 64), model.named_parameters(), **options
        )
        plain = torch.optim.SGD(alone.parameters(), lr=n / 64)
        for step in range(2):
            optimizer.zero_grad()
            plain.zero_grad()
            model(batch(hvd.rank(), step)).sum().backward()
            for rank in range(n):
                share = alone(batch(rank, step)).sum()
                (share if options.get("op") is hvd.Sum else share / n).backward()
            if step == 0 and n & (n - 1) == 0:  # others are rounded
                assert_all_have([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])
            optimizer.step()
            plain.step()
        assert {is_there(p) for p in model.second.parameters()} == {True}
        for of_rank in everyones(list(model.parameters())):
            for p, q in zip(of_rank, alone.parameters(), strict=True):
                torch.testing.assert_close(p, q.detach().cpu(), rtol=1e-2, atol=1e-2)


def check_a_model_on_both_starts_alike() -> None:
    model = Halves()
    wanted = [p.detach().cpu() + 1 for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1 if hvd.rank() == 0 else 7 + hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert_all_have(list(model.parameters()), wanted)
    hvd.broadcast_parameters(model, root_rank=0)
    assert_all_have(list(model.parameters()), wanted)


def check_the_state_of_an_optimizer() -> None:
    """Ranks that have none get the root's, where their parameters are."""
    model = Halves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    if hvd.rank() == 0:
        model(batch(0, 0)).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model, root_rank=0)
    momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    assert [m.device.type for m in momenta] == [p.device.type for p in model.parameters()]
    wanted = hvd.broadcast_object([m.cpu() for m in momenta], root_rank=0)
    assert_all_have(momenta, wanted)
    assert any(m.any() for m in wanted)
    optimizer.zero_grad()
    model(batch(0, 1)).sum().backward()
    optimizer.step()
    assert_all_have(list(model.parameters()), list(model.parameters()))


def check_adasum() -> None:
    """Of two orthogonal steps it is the sum, of equal ones the average."""
    n = hvd.size()
    if n & (n - 1):
        return
    for dtypes in ((torch.float32,), (torch.float32, torch.float64)):
        rows = [torch.nn.Parameter(torch.zeros(n, 5, dtype=dtype, device=DEVICE)) for dtype in dtypes]
        rows += [torch.nn.Parameter(torch.zeros(n, 3))]  # on the CPU
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(rows, lr=1.0), op=hvd.Adasum)
        for step in range(2):
            optimizer.zero_grad()
            for p in rows:
                (p[hvd.rank()] if step == 0 else p).sum().backward()
            optimizer.step()
            for p in rows:
                assert torch.equal(p.detach(), torch.full_like(p, -1.0 - step)), (step, p)
        if torch.device(DEVICE).type == "cuda":
            assert [p.device.type for p in rows] == ["cuda"] * len(dtypes) + ["cpu"]
    wide = torch.zeros(n, 5, device=DEVICE)
    wide[hvd.rank()] = 2
    assert torch.equal(hvd.allreduce(wide, op=hvd.Adasum), torch.full_like(wide, 2))


def _table(rows: int) -> nn.Embedding:
    table = nn.Embedding(rows, 3, sparse=True).to(DEVICE)
    with torch.no_grad():
        table.weight.zero_()
    return table


def check_sparse_gradients() -> None:
    """Every way, on ranks with other rows, with none, and with no gradient at all."""
    n, r, rows = hvd.size(), hvd.rank(), 7
    for way in sparse_exchange.WAYS:
        for op in (hvd.Sum, hvd.Average):
            table, dense = _table(rows), nn.Linear(3, 1, bias=False).to(DEVICE)
            torch.nn.init.ones_(dense.weight)
            params = [*table.parameters(), *dense.parameters()]
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), op=op)
            used = torch.zeros(rows)
            for step in range(3):
                optimizer.zero_grad()
                numbers = [[0, 0, (rank + step) % rows] if rank != 1 or step != 1 else [] for rank in range(n)]
                if step:
                    optimizer._dcoll.sparse._ways[0].proposed = way
                if numbers[r]:
                    dense(table(there(torch.tensor(numbers[r])))).sum().backward()
                optimizer.step()
                for of_rank in numbers:
                    for number in of_rank:
                        used[number] += 1
                assert table.weight.grad is None or (table.weight.grad.is_sparse and is_there(table.weight.grad))
                with torch.no_grad():
                    dense.weight.fill_(1)
            factor = n if op is hvd.Average else 1
            torch.testing.assert_close(table.weight.detach().cpu() * factor, -used[:, None].expand(rows, 3))
            everyone = everyones([table.weight])
            assert all(torch.equal(of_rank[0], everyone[0][0]) for of_rank in everyone)


def check_a_sparse_allreduce() -> None:
    n, r = hvd.size(), hvd.rank()
    places, values = there(torch.tensor([[0, r + 1]])), there(torch.tensor([1.0, 2.0]))
    mine = torch.sparse_coo_tensor(places, values, (n + 1,), check_invariants=True)
    found = hvd.sparse_allreduce_async(mine, name="sparse", op=hvd.Sum)()
    assert is_there(found)
    assert found.to_dense().tolist() == [float(n), *[2.0] * n]
    dense = hvd.DistributedOptimizer(torch.optim.SGD(_table(4).parameters(), lr=1.0), sparse_as_dense=True)
    table = dense.param_groups[0]["params"][0]
    nn.functional.embedding(there(torch.tensor([r % 4])), table, sparse=True).sum().backward()
    dense.step()
    assert table.grad.is_sparse
    assert is_there(table.grad)
    used = torch.tensor([float(sum(rank % 4 == row for rank in range(n))) for row in range(4)])
    torch.testing.assert_close(table.detach().cpu() * n, -used[:, None].expand(4, 3))


def check_batch_norm() -> None:
    n, r = hvd.size(), hvd.rank()
    torch.manual_seed(1)
    ours, theirs = hvd.SyncBatchNorm(3).double().to(DEVICE), nn.BatchNorm1d(3).double().to(DEVICE)
    whole = [torch.randn(2 + rank, 3, dtype=torch.float64) + 100 for rank in range(n)]
    all_of_them, mine = there(torch.cat(whole)).requires_grad_(), there(whole[r]).requires_grad_()
    out, wanted = ours(mine), theirs(all_of_them)
    assert is_there(out)
    out.square().sum().backward()
    wanted.square().sum().backward()
    sizes = [len(one) for one in whole]
    torch.testing.assert_close(out.cpu(), wanted.cpu().split(sizes)[r])
    torch.testing.assert_close(mine.grad.cpu(), all_of_them.grad.cpu().split(sizes)[r], atol=1e-6, rtol=1e-6)
    for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu())


def check_join() -> None:
    """Rank r has r + 1 batches; those that have ended count as zeros, and divide."""
    n, r = hvd.size(), hvd.rank()
    layer = nn.Linear(4, 700, bias=False).to(DEVICE)
    torch.nn.init.zeros_(layer.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0))
    with hvd.Join(range(r + 1)) as steps:
        for _ in steps:
            optimizer.zero_grad()
            layer(torch.ones(1, 4, device=DEVICE)).sum().backward()
            optimizer.step()
            hvd.allreduce(torch.ones(3, device=DEVICE), op=hvd.Max, name="loss")
    assert hvd.join() in range(n)
    hvd.broadcast_parameters(layer, root_rank=n - 1)
    total = sum((n - step) / n for step in range(n))
    torch.testing.assert_close(layer.weight.detach().cpu(), torch.full((700, 4), -total))


def check_a_gradient_scaler() -> None:
    """An infinity on one rank has all skip the step, and halve the scale."""
    kind = DEVICE.type if torch.cuda.is_available() else "cpu"  # which knows no other without a GPU
    for fused in (False, True) if torch.cuda.is_available() else (False,):
        layer = nn.Linear(4, 2, bias=False).to(DEVICE)
        torch.nn.init.zeros_(layer.weight)
        extra: dict[str, Any] = {"fused": True} if fused else {}
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.5, **extra))
        scaler = torch.amp.GradScaler(kind, init_scale=64.0, growth_interval=100)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.full((1, 4), float("inf") if step == 1 and hvd.rank() == hvd.size() - 1 else 1.0, device=DEVICE)
            scaler.scale(layer(x).sum()).backward()
            if step == 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(layer.parameters(), 1e9)
                assert torch.equal(layer.weight.grad, torch.ones_like(layer.weight))
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (64.0 if step == 0 else 32.0)
        assert_all_have([layer.weight], [torch.full((2, 4), -1.0)])


def check_a_checkpoint_inside_backward() -> None:
    """Reentrant: a backward inside the backward, which on a GPU runs on a thread of autograd's."""
    n, r = hvd.size(), hvd.rank()
    for reentrant in (True,) if PRETENDED else (True, False):  # what is computed again there is the CPU's
        layers = [nn.Linear(40, 40, bias=False).to(DEVICE) for _ in range(3)]
        for layer in layers:
            torch.nn.init.eye_(layer.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([layer.weight for layer in layers], lr=1.0))
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.full((1, 40), r + 1.0, device=DEVICE, requires_grad=True)
            y = layers[0](x)
            y = checkpoint(layers[1], y, use_reentrant=reentrant)
            layers[2](y).sum().backward()
            for layer in layers:
                assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, (n + 1) / 2))


def check_a_backward_that_raises() -> None:
    """All ranks have an error, and go on."""
    layer = nn.Linear(40, 40, bias=False).to(DEVICE)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0))

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("of a test")

    for round_ in range(2):
        optimizer.zero_grad()
        x = torch.full((1, 40), round_ + 1.0, device=DEVICE, requires_grad=True)
        y = layer(Raises.apply(x) if hvd.rank() == 0 and round_ == 0 else x).sum()
        if round_ == 0:
            with pytest.raises(ValueError if hvd.rank() == 0 else hvd.DcollError, match="of a test"):
                y.backward()
        else:
            y.backward()
            assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, 2)), layer.weight.grad


def check_gradients_that_the_program_keeps() -> None:
    """They keep their values, though buckets are reduced in place: all of a bucket, one of it, again and again."""
    n = hvd.size()
    for kept_of in ((0, 1, 2, 3), (1,), (0, 2)):
        model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 5).double()).to(DEVICE)
        params = list(model.parameters())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0), model.named_parameters(), op=hvd.Sum)
        kept: list[tuple[int, int, torch.Tensor]] = []
        for step in range(7):
            optimizer.zero_grad()
            loss = sum((p.double() * (hvd.rank() + step + place)).sum() for place, p in enumerate(params))
            loss.backward()  # type: ignore[union-attr]
            optimizer.step()
            for place, p in enumerate(params):
                assert p.grad is not None
                assert (p.grad == sum(r + step + place for r in range(n))).all(), (step, place)
                if place in kept_of and step != 3:
                    kept.append((step, place, p.grad))
        for step, place, grad in kept:
            assert (grad == sum(r + step + place for r in range(n))).all(), (step, place, kept_of)


def check_a_rank_without_room_for_buckets() -> None:
    """On its device, from the first on or when they are to be moved: to the others its buckets are what they were. Once
    it has room again, later ones are side by side."""
    n, last = hvd.size(), hvd.rank() == hvd.size() - 1

    def no_room(groups: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("no room, as a test has asked for")

    for first in (0, 2):
        params = [torch.nn.Parameter(torch.zeros(count, device=DEVICE)) for count in (5, 30_000, 7)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), op=hvd.Sum)
        kept: list[tuple[int, int, torch.Tensor]] = []
        with pytest.MonkeyPatch.context() as patch:
            for step in range(6):
                if last and step == first:
                    patch.setattr(memory, "zeros_side_by_side", no_room)
                optimizer.zero_grad()
                sum((p * (hvd.rank() + step + place)).sum() for place, p in enumerate(params)).backward()  # type: ignore[union-attr]
                optimizer.step()
                kept += [(step, place, p.grad) for place, p in enumerate(params) if p.grad is not None]
        if last and n > 1:  # alone there is nothing to reduce
            assert optimizer._dcoll._reducer._without_room  # type: ignore[union-attr]
        assert len(kept) == 6 * len(params)
        for step, place, grad in kept:
            assert (grad == sum(r + step + place for r in range(n))).all(), (first, step, place)


def check_torchs_memory_is_told_of() -> None:
    """Where dcoll finds none: buckets are reduced through it, and a warning says so, once."""
    told: list[str] = []

    def none_left(like: torch.Tensor, nbytes: int) -> Any:
        raise hvd.DcollError("no memory left, as a test has asked for")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_buffer_for", none_left)
        patch.setattr(memory, "_told", set())
        patch.setattr(memory, "communicator", lambda: SimpleNamespace(log=lambda *words: told.append(": ".join(words))))
        for _ in range(2):
            flat, (piece,) = memory.zeros_side_by_side([[torch.ones(5, device=DEVICE)]])[0]
            assert not flat.any()
            assert piece.shape == (5,)
    assert told == [
        "warning: buckets of gradients on a device lie in torch's memory, out of which they are copied: "
        "no memory left, as a test has asked for"
    ]


def check_power_sgd() -> None:
    """What it gives for matrices of rank 1 is exact but for rounding; those of the CPU have a bucket of their own."""
    model, alone = Halves(), copy.deepcopy(Halves().state_dict())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), compression=hvd.Compression.powersgd(1)
    )
    for _ in range(2):
        model.load_state_dict(alone)
        optimizer.zero_grad()
        model(torch.ones(1, 3) * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    other = Halves()
    for rank in range(hvd.size()):
        (other(torch.ones(1, 3) * (rank + 1)).sum() / hvd.size()).backward()
    for got, want in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got.grad.cpu(), want.grad.cpu(), atol=1e-4, rtol=1e-4)


def check_memory_of_the_device() -> None:
    n = hvd.size()
    for shape in ((), 5, (2, 3), (0, 4)):
        made = hvd.empty(shape, torch.float64, device=DEVICE)
        assert is_there(made)
        assert made.shape == torch.Size((shape,) if isinstance(shape, int) else shape)
        assert torch.equal(made, torch.zeros_like(made))
        assert torch.equal(hvd.allreduce_(made.fill_(1), op=hvd.Sum), torch.full_like(made, n))
        like = hvd.empty_like(made)
        assert (like.shape, like.dtype, like.device) == (made.shape, made.dtype, made.device)
        assert torch.equal(like, torch.zeros_like(made))
    for device in (None, "cpu", CPU):
        assert hvd.empty(3, device=device).is_cpu
        assert hvd.empty(3, np.float32, device).tolist() == [0, 0, 0]
    assert hvd.empty_like(np.ones(2, np.int8)).tolist() == [0, 0]
    for dtype, device in ((torch.float32, "meta"), (np.float32, "cuda")):
        with pytest.raises(hvd.ArgumentError, match=rf"dcoll.empty\(\) got device {device} and dtype .*float32"):
            hvd.empty(3, dtype, device)
