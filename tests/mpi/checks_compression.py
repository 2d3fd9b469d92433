"""Checks of compression, in jobs where something is: pretended nodes, MPI, DCOLL_COMPRESS_LOCAL."""

import numpy as np
import pytest
import torch
from checks_optimizer_options import Toy, distributed

import dcoll as hvd

OURS = (hvd.Compression.fp16, hvd.Compression.bf16, hvd.Compression.int8)
COUNT = 40000  # more than the 64 KiB that are never compressed


def whole(count: int) -> torch.Tensor:
    """Values that each of the three keeps, equal on all ranks: so their averages are kept too."""
    values = torch.arange(count, dtype=torch.float32) % 64 - 32
    values[::16] = 127
    return values


def by_every_call(x: torch.Tensor, compression: object, op: hvd.ReduceOp) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    graded = hvd.allreduce(leaf, compression=compression, op=op)
    graded.backward(x)
    assert leaf.grad is not None
    return [
        hvd.allreduce(x, compression=compression, op=op),
        torch.as_tensor(hvd.allreduce(x.numpy(), compression=compression, op=op)),
        hvd.allreduce(x, compression=compression, op=op, process_set=hvd.global_process_set),
        hvd.allreduce_(x.clone(), compression=compression, op=op),
        *(hvd.allreduce_async(x, name=name, compression=compression, op=op).wait() for name in (None, "named")),
        *(
            hvd.allreduce_async_(x.clone(), name=name, compression=compression, op=op).wait()
            for name in (None, "named")
        ),
        *hvd.grouped_allreduce([x, x], compression=compression, op=op),
        *hvd.grouped_allreduce_([x.clone(), x.clone()], compression=compression, op=op),
        *hvd.grouped_allreduce_async([x, x], name="of two", compression=compression, op=op).wait(),
        *hvd.grouped_allreduce_async_([x.clone(), x.clone()], compression=compression, op=op).wait(),
        graded.detach(),
        leaf.grad,
    ]


def check_values_that_survive_are_exact() -> None:
    x = whole(COUNT)
    for compression in OURS:
        for got in by_every_call(x, compression, hvd.Average):
            assert got.dtype == torch.float32
            assert torch.equal(got, x)


def check_every_call_compresses() -> None:
    x = torch.linspace(-1.0, 1.0, COUNT)
    for compression, most in ((hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 2e-2), (hvd.Compression.int8, 2e-2)):
        first, *others = by_every_call(x, compression, hvd.Average)
        off = (first - x).abs()
        assert 0 < off.max() < most
        for other in others:
            assert (other - x).abs().max() < most
            assert not torch.equal(other, x)
        everyones = hvd.allgather(first[None])
        assert all(torch.equal(one, first) for one in everyones)


class Halves:
    """A compressor as Horovod's users write them."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.half() / 2, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx) * 2


def check_compressors_of_the_programs_own() -> None:
    x = whole(60)[::2]
    into = x.clone().repeat_interleave(2)[::2]
    handle = hvd.allreduce_async_(into, compression=Halves)
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle) is into
    asynchronous = hvd.allreduce_async(x, op=hvd.Sum, compression=Halves).wait()
    assert torch.equal(asynchronous, hvd.size() * x)
    assert asynchronous.dtype == torch.float32
    for got in (into, hvd.allreduce(x, compression=Halves), hvd.allreduce_(x.clone(), compression=Halves)):
        assert torch.equal(got, x)
    parts = [x.clone(), 2 * torch.arange(3)]
    both = hvd.grouped_allreduce_async_(parts, op=hvd.Sum, compression=Halves).wait()
    assert all(one is part for one, part in zip(both, parts, strict=True))
    assert torch.equal(parts[0], hvd.size() * x)
    assert parts[1].tolist() == [0, 2 * hvd.size(), 4 * hvd.size()]
    for call in (hvd.allreduce_async, hvd.allreduce_):
        with pytest.raises(hvd.ArgumentError, match="Compression"):
            call(x.clone(), compression="fp16")
    hvd.barrier()


def check_groups_of_several_dtypes() -> None:
    """The codec is float32's; what else is in the group goes as it does alone."""
    rounded, kept = torch.linspace(-1.0, 1.0, COUNT), whole(COUNT)
    fine = torch.full((5,), 1 + 2**-12, dtype=torch.float64)
    group = [kept, fine, torch.arange(7), rounded, np.full(3, 1 + 2**-12)]
    of_all = hvd.Compression.topk(1.0)
    for compression in (*OURS, hvd.Compression.auto("int8"), of_all, hvd.Compression.none):
        cast = compression in (hvd.Compression.fp16, hvd.Compression.bf16)
        some = group[:4] if compression is hvd.Compression.bf16 else group  # which NumPy has not
        got = hvd.grouped_allreduce(some, compression=compression, name="of several dtypes")
        assert [one.dtype for one in got] == [one.dtype for one in some]
        assert torch.equal(got[0], kept)
        assert (got[1] == (1 if cast else fine)).all()
        assert torch.equal(got[2], group[2])
        off = float((got[3] - rounded).abs().max())
        assert off < 1e-6 if compression in (of_all, hvd.Compression.none) else 1e-4 < off < 2e-2
        assert cast or bool((got[-1] == group[-1]).all())
    with pytest.raises(hvd.ArgumentError, match=r"Compression\.int8 is for all-reduces with op Sum or Average"):
        hvd.grouped_allreduce(group[:2], compression=hvd.Compression.int8, op=hvd.Max)


def check_stochastic_rounding() -> None:
    """Equal bits on all ranks, others in the next call, the same again in a job that begins anew, right on average."""
    x = torch.linspace(-1.0, 1.0, COUNT)
    ours = (hvd.Compression.fp16, hvd.Compression.bf16, lambda **how: hvd.Compression.int8(feedback=False, **how))

    def results() -> list[torch.Tensor]:
        return [hvd.allreduce(x, compression=one(stochastic=True), name=f"drawn {i}") for i, one in enumerate(ours)]

    hvd.shutdown()
    hvd.init()
    first, second = results(), results()
    hvd.shutdown()
    hvd.init()
    again = results()
    for i, one in enumerate(ours):
        assert torch.equal(hvd.allreduce(whole(COUNT), compression=one(stochastic=True)), whole(COUNT)) or i == 2
        assert all(torch.equal(other, first[i]) for other in hvd.allgather(first[i][None]))
        assert torch.equal(again[i], first[i])
        assert not torch.equal(second[i], first[i])
        times, total = 64, torch.zeros(COUNT, dtype=torch.float64)
        for _ in range(times):
            total += hvd.allreduce(x, compression=one(stochastic=True))
        nearest = hvd.allreduce(x, compression=one()) - x
        away = total / times - x
        assert float(away.square().mean()) < 0.1 * float(nearest.square().mean())
        assert abs(float(away.mean())) < 1e-5


def check_how_it_is_rounded_is_compared() -> None:
    with pytest.raises(hvd.MismatchError, match="as bf16 stochastic"):
        hvd.allreduce(torch.ones(COUNT), compression=hvd.Compression.bf16(stochastic=hvd.rank() == 0))
    assert hvd.allreduce(torch.ones(COUNT)).eq(1).all()


def check_what_is_not_encoded_goes_as_before() -> None:
    x = torch.full((COUNT,), 1 + 2**-12, dtype=torch.float64)
    assert torch.equal(hvd.allreduce(x, compression=hvd.Compression.int8), x)
    assert hvd.allreduce(x, compression=hvd.Compression.fp16).eq(1).all()
    assert hvd.allreduce(x.float(), compression=hvd.Compression.fp16, op=hvd.Max).eq(1).all()
    whole_numbers = torch.arange(COUNT)
    assert torch.equal(hvd.allreduce(whole_numbers, compression=hvd.Compression.int8, op=hvd.Max), whole_numbers)
    with pytest.raises(hvd.ArgumentError, match=r"Compression\.int8 is for all-reduces with op Sum or Average"):
        hvd.allreduce(x.float(), compression=hvd.Compression.int8, op=hvd.Max)
    with pytest.raises(hvd.ArgumentError, match=r"Compression\.int8 is for all-reduces"):
        hvd.reducescatter(torch.ones(hvd.size()), compression=hvd.Compression.int8)
    with pytest.raises(hvd.ArgumentError, match=r"none, fp16, bf16, int8, topk\(ratio\) or auto\(lossy\), or a class"):
        hvd.allreduce(x, compression="topk")
    with pytest.raises(hvd.ArgumentError, match="op is Adasum"):
        distributed(Toy(1), compression=hvd.Compression.int8, op=hvd.Adasum)


def check_float16_saturates() -> None:
    x = torch.full((COUNT,), 1e6)
    x[0], x[1] = float("inf"), float("nan")
    got = hvd.allreduce(x, compression=hvd.Compression.fp16)
    assert got[0].isinf()
    assert got[1].isnan()
    assert got[2:].ge(65504 / hvd.size()).all()  # of nodes' sums that are no greater
    assert got[2:].le(65504).all()


def check_joined_ranks_take_part_with_zeros() -> None:
    x = whole(COUNT)
    if hvd.rank() == 0:
        for compression in OURS:
            got = hvd.allreduce(x, compression=compression, op=hvd.Sum)
            assert torch.equal(got, x)
            assert torch.equal(hvd.allreduce(x, compression=compression, op=hvd.Sum, name="named"), x)
    assert hvd.join() == 0


def check_other_codecs_are_a_mismatch() -> None:
    x = torch.ones(COUNT)
    with pytest.raises(hvd.MismatchError, match="as fp16"):
        hvd.allreduce(x, compression=hvd.Compression.fp16 if hvd.rank() == 0 else hvd.Compression.bf16)
    assert hvd.allreduce(x).eq(1).all()


def check_int8_gives_later_what_it_lost() -> None:
    """Many steps of equal gradients: their sum is off by what one step loses, not by what all do."""
    steps = 50
    for options in ({}, {"groups": 2}, {"gradient_predivide_factor": 2.0}):
        torch.manual_seed(1)
        model = torch.nn.Linear(300, 100, bias=False)
        spread = torch.randn(100, 300) * torch.logspace(-3, 0, 300)
        optimizer = distributed(model, compression=hvd.Compression.int8, op=hvd.Average, **options)
        total, worst = torch.zeros(100, 300), 0.0
        for _ in range(steps):
            optimizer.zero_grad()
            (model.weight * spread).sum().backward()
            optimizer.synchronize()
            assert model.weight.grad is not None
            total += model.weight.grad
            worst = max(worst, float((model.weight.grad - spread).abs().max()))
            with optimizer.skip_synchronize():
                optimizer.step()
        assert worst > 1e-3  # it does compress
        assert float((total - steps * spread).abs().max()) < 4 * worst
        assert all(torch.equal(one, total) for one in hvd.allgather(total[None]))


def check_unused_parameters_are_known_beside_large_gradients() -> None:
    model = Toy(3)
    optimizer = distributed(model, compression=hvd.Compression.int8, op=hvd.Sum)
    used = [0, 1] if hvd.rank() == 0 else [0]
    model(1e6, used).backward()
    grads = model.grads()
    assert grads[0] is not None
    assert grads[1] is not None
    assert grads[2] is None
    optimizer.step()


def check_a_model_trains_as_without() -> None:
    torch.manual_seed(3)
    x = torch.randn(64, 200)
    y = x @ torch.randn(200, 100) / 14
    losses = {}
    for name in ("none", "fp16", "bf16", "int8"):
        torch.manual_seed(4)
        model = torch.nn.Sequential(torch.nn.Linear(200, 120), torch.nn.Tanh(), torch.nn.Linear(120, 100))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5),
            model.named_parameters(),
            compression=getattr(hvd.Compression, name),
        )
        for _ in range(60):
            optimizer.zero_grad()
            mine = slice(hvd.rank(), None, hvd.size())
            loss = torch.nn.functional.mse_loss(model(x[mine]), y[mine])
            loss.backward()
            optimizer.step()
        losses[name] = float(hvd.allreduce(loss.detach()))
        same = np.asarray([float(p.detach().double().sum()) for p in model.parameters()])
        assert (hvd.allgather(same[None]) == same).all(), name
    assert losses["none"] < 1.0
    for name, loss_there in losses.items():
        assert loss_there == pytest.approx(losses["none"], rel=0.02), name


def check_stats_of_single_calls() -> None:
    x = torch.ones(COUNT)
    x[0] = 1e6
    before = hvd.stats().get("told", {"calls": 0, "saturated": 0})
    assert "plain" not in hvd.stats()
    hvd.allreduce(x, compression=hvd.Compression.fp16, name="told")
    hvd.allreduce(x, name="plain")
    cost = hvd.stats()["told"]
    assert "plain" not in hvd.stats()
    assert cost["codec"] == "fp16"
    assert cost["calls"] == before["calls"] + 1
    assert "residual_norm" not in cost
    totals = hvd.allreduce(
        np.array([cost["elements"], cost["plain_bytes"], cost["wire_bytes"]], dtype=np.int64), op=hvd.Sum
    )
    nodes = max(hvd.allgather_object(hvd.cross_size()))
    nodes = nodes if nodes > 1 else hvd.size()
    everybodys = hvd.allgather_object(cost["saturated"])
    assert totals[0] == nodes * COUNT * cost["calls"]
    assert totals[1] == pytest.approx(2 * (nodes - 1) * 4 * COUNT * cost["calls"], rel=1e-3)
    assert totals[1] == pytest.approx(2 * totals[2], rel=0.02)
    assert sum(everybodys) > 0
    assert all(cost[what] >= 0 for what in ("encode_seconds", "decode_seconds", "wire_seconds"))


def check_stats_of_buckets() -> None:
    torch.manual_seed(2)
    model = torch.nn.Linear(300, 100)
    optimizer = distributed(model, compression=hvd.Compression.topk(0.02), op=hvd.Average)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 300)).square().sum().backward()
        optimizer.step()
    ours = [cost for name, cost in hvd.stats().items() if name == optimizer._dcoll._reducer.bucket_name(0)]
    assert len(ours) == 1
    assert ours[0]["codec"].startswith("topk 0.02")
    assert ours[0]["calls"] in (2, 3)  # a bucket may be called otherwise when the order is known
    norms = hvd.allgather_object(ours[0]["residual_norm"])
    assert max(norms) > 0  # where ranks share the work, of what is each one's
    wire, plain = (sum(hvd.allgather_object(ours[0][what])) for what in ("wire_bytes", "plain_bytes"))
    assert wire < plain / 10
    with pytest.raises(hvd.ArgumentError):
        hvd.stats(hvd.ProcessSet([0]))
