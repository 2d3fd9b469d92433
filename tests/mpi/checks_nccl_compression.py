"""Checks of fp16 and bf16 by NCCL, which sums what a GPU has cast: emulated_nccl.cc, or a GPU for each rank."""

import os
import resource
from typing import Any

import pytest
import torch
from checks_device_memory import expected, filled, total, ways_of
from tested_device import DEVICE, EMULATED

import dcoll as hvd

COUNT = 70_001
LOCAL = os.environ.get("DCOLL_COMPRESS_LOCAL") == "1"
CAST = LOCAL or os.environ.get("DCOLL_TRANSPORT") == "mpi" or "DCOLL_NODES" in os.environ
Compression = hvd.Compression
CASTS = {"fp16": Compression.fp16, "bf16": Compression.bf16}
AUTO = {"fp16": Compression.auto("fp16"), "bf16": Compression.auto("bf16")}


def full(value: float, count: int = COUNT) -> torch.Tensor:
    return torch.full((count,), value, device=DEVICE)


def check_which_way_it_takes() -> None:
    hvd.broadcast_(full(1.0), 0)  # by which NCCL is found
    for name, cast in CASTS.items():
        for compression in (cast, AUTO[name]):
            found = ways_of(lambda some=compression: hvd.allreduce(full(1.0), compression=some))  # type: ignore[misc]
            assert (found == {f"NCCL of {name}"}) == CAST, found
            assert CAST or found & {"NCCL", "device, two-shot"}, found  # on one node nothing is cast
        small = ways_of(lambda some=cast: hvd.allreduce(full(1.0, 500), compression=some))  # type: ignore[misc]
        assert (small == {f"NCCL of {name}"}) == LOCAL, small
        least = ways_of(lambda some=cast: hvd.allreduce(full(1.0), op=hvd.Min, compression=some))  # type: ignore[misc]
        assert f"NCCL of {name}" not in least, least
    for others in (Compression.int8, Compression.fp16(stochastic=True)):  # which the host encodes
        found = ways_of(lambda some=others: hvd.allreduce(full(1.0), compression=some))  # type: ignore[misc]
        assert not any(way.startswith("NCCL") for way in found), found


def check_sums_and_scales() -> None:
    n = hvd.size()
    for compression in (*CASTS.values(), *AUTO.values()):
        for count in (0, 1, 1023, COUNT):
            want = expected(count, torch.float32, total)
            one = filled(count, torch.float32, shared=count == 1023)
            assert torch.equal(hvd.allreduce(one, op=hvd.Sum, compression=compression), want)
            assert torch.equal(one, filled(count, torch.float32, False))
            hvd.allreduce_(one, op=hvd.Sum, compression=compression)
            assert torch.equal(one, want)
        one, average = full(8.0 * n * (hvd.rank() + 1)), full(4.0 * n * (n + 1))
        assert torch.equal(hvd.allreduce(one, compression=compression), average)
        assert torch.equal(hvd.allreduce(one, compression=compression, postscale_factor=4.0), 4 * average)
        scaled = hvd.allreduce(one, op=hvd.Sum, compression=compression, prescale_factor=0.25, postscale_factor=2.0)
        assert torch.equal(scaled, 0.5 * n * average)
        together = hvd.grouped_allreduce([one, one[:500]], compression=compression)
        assert all(torch.equal(a, b) for a, b in zip(together, (average, average[:500]), strict=True))


def check_what_is_lost() -> None:
    """A cast on each rank, and one for each sum of NCCL's; an average is taken of the sum, in float32."""
    assert torch.equal(hvd.allreduce(full(1 + 2.0**-12), compression=Compression.fp16), full(1 + 2.0**-12 * (not CAST)))
    beyond = hvd.allreduce(full(1e6), compression=Compression.fp16)
    assert bool(beyond.isinf().all()) == CAST
    assert torch.equal(hvd.allreduce(full(2.0**-24), compression=Compression.fp16), full(2.0**-24))
    assert hvd.allreduce(full(float("nan")), compression=Compression.bf16).isnan().all()


def check_long_ones_in_pieces() -> None:
    count = (16 << 20) + 5
    one = filled(count, torch.float32, shared=False)
    hvd.allreduce_(one, op=hvd.Sum, prescale_factor=2.0, compression=Compression.bf16)
    assert torch.equal(one, 2 * expected(count, torch.float32, total))


def check_what_stats_tell() -> None:
    n = hvd.size()
    hvd.allreduce_(full(1.0), name="weighed", compression=Compression.bf16)
    told = hvd.stats().get("weighed")
    assert (told is not None) == CAST
    if told is not None:
        plain = 2 * (n - 1) * 4 * COUNT // n
        assert (told["codec"], told["elements"], told["plain_bytes"]) == ("bf16", COUNT, plain)
        assert told["wire_bytes"] == plain // 2


def check_gradients() -> None:
    """Of float32 in buckets on the device, float64 beside them, and a small bucket."""
    n = hvd.size()
    for name, compression in (*CASTS.items(), *AUTO.items()):
        shapes = ((300, 300), (7,), (300, 100))
        params = [torch.nn.Parameter(torch.zeros(shape, device=DEVICE)) for shape in shapes]
        params.append(torch.nn.Parameter(torch.zeros(5, dtype=torch.float64, device=DEVICE)))
        named = [(str(i), p) for i, p in enumerate(params)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), named, compression=compression)

        def step(optimizer: Any = optimizer, params: list[torch.nn.Parameter] = params) -> None:
            optimizer.zero_grad()
            sum((p * (n * (hvd.rank() + 1.0))).sum().double() for p in params).backward()  # type: ignore[union-attr]
            optimizer.step()

        step()
        assert (f"NCCL of {name}" in ways_of(step)) == CAST
        for p in params:
            assert torch.equal(p, torch.full_like(p, -n * (n + 1.0)))


def check_no_memory_for_casts() -> None:
    """On one rank: this once all go by the host, and encode there."""
    if not EMULATED:
        return

    def reduced() -> torch.Tensor:
        """By name: in a sequence whose NCCL has cast nothing yet."""
        one = filled(COUNT, torch.float32, False)
        handle = hvd.allreduce_async(one, op=hvd.Sum, name="without memory", compression=Compression.fp16)
        return handle.wait()  # type: ignore[no-any-return]

    hvd.allreduce_async(full(1.0), name="which finds NCCL").wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if hvd.rank() == hvd.size() - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    try:
        assert torch.equal(reduced(), expected(COUNT, torch.float32, total))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (ways_of(reduced) == {"NCCL of fp16"}) == CAST


def check_beside_a_rank_that_has_joined() -> None:
    def reduced() -> torch.Tensor:
        return hvd.allreduce(filled(COUNT, torch.float32, False), op=hvd.Sum, compression=Compression.fp16)

    if hvd.rank() > 0:
        assert torch.equal(reduced(), expected(COUNT, torch.float32, lambda parts: total(parts[1:])))
    hvd.join()
    assert torch.equal(reduced(), expected(COUNT, torch.float32, total))


def check_others_that_do_not_agree() -> None:
    for _ in range(2):
        with pytest.raises(hvd.MismatchError, match="bf16"):
            hvd.allreduce(full(1.0), compression=Compression.bf16 if hvd.rank() == 0 else Compression.fp16)
        assert torch.equal(hvd.allreduce(full(1.0), compression=Compression.fp16), full(1.0))
