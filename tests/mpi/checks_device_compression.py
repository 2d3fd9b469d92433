"""Checks of 16 bits for gradients on a device (tested_device.py says on which): float32 only between nodes."""

import os
from typing import Any

import torch
from tested_device import DEVICE

import dcoll as hvd
from dcoll.compression.residuals import KEY

COUNT = 40000  # more than the 64 KiB that are never compressed
LOCAL = os.environ.get("DCOLL_COMPRESS_LOCAL") == "1"
Compression = hvd.Compression


def encoded() -> bool:
    nodes = max(hvd.allgather_object(hvd.cross_size()))
    return nodes > 1 or (LOCAL and hvd.size() > 1)


def ranks_of_my_node() -> int:
    """Whose sum is encoded."""
    return hvd.local_size() if max(hvd.allgather_object(hvd.cross_size())) > 1 else 1


def reduced(gradient: torch.Tensor, compression: Any, op: hvd.ReduceOp = hvd.Average) -> torch.Tensor:
    """After the second step: buckets are those of the observed order then."""
    p = torch.nn.Parameter(torch.zeros_like(gradient, device=DEVICE))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.0), [("p", p)], compression=compression, op=op)
    for _ in range(2):
        optimizer.zero_grad()
        (p * gradient.to(DEVICE)).sum().backward()
        optimizer.step()
    assert p.grad is not None
    assert p.grad.device.type == DEVICE.type
    got = p.grad.detach().cpu()
    assert all(torch.equal(one, got) for one in hvd.allgather_object(got))
    return got


def check_sums_are_of_float32() -> None:
    """Two of these are more than float16 has room for; their average is not."""
    value = 40000 / ranks_of_my_node()
    want = torch.full((COUNT,), float(hvd.allreduce(torch.tensor(value, dtype=torch.float64))))
    tolerance = 2e-3 if encoded() else 1e-6
    torch.testing.assert_close(reduced(torch.full((COUNT,), value), Compression.fp16), want, rtol=tolerance, atol=0)


def check_values_are_rounded_twice() -> None:
    gradient = torch.randn(COUNT, generator=torch.Generator().manual_seed(hvd.rank()))
    everyones = hvd.allgather_object((hvd.cross_rank(), gradient.double()))
    apart = ranks_of_my_node() == 1
    nodes: dict[int, torch.Tensor] = {}
    for rank, (node, one) in enumerate(everyones):
        key = rank if apart else node
        nodes[key] = nodes.get(key, torch.zeros(COUNT)) + one
    total = torch.stack(list(nodes.values())).sum(0)
    half = 2.0**-8  # of a step of bf16, beside the value
    once = torch.stack(list(nodes.values())).abs().sum(0) * half
    most = once + (total.abs() + once) * half if encoded() else torch.zeros(COUNT)
    off = (reduced(gradient, Compression.bf16, hvd.Sum).double() - total).abs()
    assert (off <= most + 1e-5).all(), float((off - most).max())
    assert bool((off > 1e-3).any()) == encoded()


def check_rounding_by_chance() -> None:
    got = reduced(torch.full((COUNT,), 1 + 2.0**-9), Compression.bf16(stochastic=True))
    assert abs(float(got.mean()) - (1 + 2.0**-9)) < 3e-4
    assert (len(got.unique()) > 1) == encoded()


def check_saturated_values_are_counted() -> None:
    got = reduced(torch.full((COUNT,), 1e6), Compression.fp16, hvd.Sum)
    told = hvd.allgather_object(sum(cost["saturated"] for cost in hvd.stats().values()))
    assert bool(got.eq(65504).all()) == encoded()
    assert (max(told) > 0) == encoded()


def check_other_dtypes_beside_float32() -> None:
    """float64 is cast inside a node too, as Horovod does; what has 16 bits travels as it is."""
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for some in (dtypes, dtypes[1:]):
        params = [torch.nn.Parameter(torch.zeros(300, 100, dtype=dtype, device=DEVICE)) for dtype in some]
        named = [(str(p.dtype), p) for p in params]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0), named, compression=Compression.bf16)
        for _ in range(2):
            optimizer.zero_grad()
            sum((p * (1 + 2.0**-7 + 2.0**-10)).sum().double() for p in params).backward()  # type: ignore[union-attr]
            optimizer.step()
        for p in params:
            exact = p.dtype is torch.float16 or (p.dtype is torch.float32 and not encoded())
            want = 1 + 2.0**-7 + (2.0**-10 if exact else 0)
            assert p.grad is not None
            torch.testing.assert_close(p.grad.cpu(), torch.full((300, 100), want, dtype=p.dtype), rtol=1e-6, atol=0)


def optimizer_of(compression: Any) -> tuple[Any, torch.nn.Parameter]:
    p = torch.nn.Parameter(torch.zeros(COUNT, device=DEVICE))
    return hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.0), [("p", p)], compression=compression, op=hvd.Sum), p


def step(optimizer: Any, p: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    (p * gradient.to(DEVICE)).sum().backward()
    optimizer.step()
    assert p.grad is not None
    return p.grad.detach().cpu().clone()


def check_what_was_lost_may_come_from_a_device() -> None:
    """As torch.load(map_location="cuda") has it. Where the next optimizer compresses nothing, it goes in full."""
    gradient = torch.randint(-50, 51, (COUNT,), generator=torch.Generator().manual_seed(hvd.rank())).float()
    total = hvd.allreduce(gradient, op=hvd.Sum)
    for compression in (Compression.topk(0.1), Compression.int8):
        optimizer, p = optimizer_of(compression)
        step(optimizer, p, gradient)
        state = optimizer.state_dict()
        assert (KEY in state) == encoded()
        if KEY not in state:
            continue
        lost = state[KEY]["lost"][0]["error"].clone()
        state[KEY]["lost"][0]["error"] = lost.to(DEVICE)
        again, _ = optimizer_of(compression)
        again.load_state_dict(state)
        assert torch.equal(again.state_dict()[KEY]["lost"][0]["error"], lost)
        plain, p = optimizer_of(Compression.none)
        plain.load_state_dict(state)
        assert not lost.any() or plain.state_dict()[KEY]["lost"][0]["error"].cpu().equal(lost)
        with_lost = hvd.allreduce(gradient.double() + lost, op=hvd.Sum)
        torch.testing.assert_close(step(plain, p, gradient).double(), with_lost, rtol=1e-6, atol=1e-4)
        torch.testing.assert_close(step(plain, p, gradient), total)
        assert not any(values.any() for kept in plain.state_dict().get(KEY, {"lost": {}})["lost"].values()
                       for values in kept.values())  # fmt: skip
