"""Checks of Compression.auto: between nodes a codec is used where the cost model says that it pays, by all ranks."""

import math
import os
import re
from typing import Any

import pytest
import torch
from checks_optimizer_options import Toy, distributed

import dcoll as hvd
from dcoll import _C, plan
from dcoll.collectives.tensors import CODES, library
from dcoll.job.world import communicator

COUNT = 1 << 21
FORCED = os.environ.get("DCOLL_COMPRESS_LOCAL") == "1"
"""Everything is encoded, whether or not it pays."""
UNMEASURED = os.environ.get("DCOLL_CALIBRATE") == "off"
"""The cost model has its built-in constants: of 100 Gbit/s, where int8 does not pay."""
CODECS = {"bf16": hvd.Compression.bf16, "int8": hvd.Compression.int8, "topk": hvd.Compression.topk}


def operand() -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(hvd.rank()))


def calls_of(name: str) -> int:
    return int(hvd.stats().get(name, {"calls": 0})["calls"])


def check_what_arrives_is_the_codecs_or_all_of_it() -> None:
    x = operand()
    plain = hvd.allreduce(x, op=hvd.Sum)
    for lossy, codec in CODECS.items():
        encoded, compression, name = hvd.allreduce(x, op=hvd.Sum, compression=codec), hvd.Compression.auto(lossy), lossy
        hvd.allreduce(x, op=hvd.Sum, compression=compression)  # has measured
        before = calls_of(name)
        got = hvd.allreduce(x, op=hvd.Sum, compression=compression, name=name)
        assert torch.equal(got, encoded if calls_of(name) > before else plain)
        assert all(torch.equal(one, got) for one in hvd.allgather(got[None]))
        if FORCED:
            assert calls_of(name) > before
        if UNMEASURED and lossy == "int8":
            assert calls_of(name) == before


def check_what_takes_another_time_is_measured_by_itself() -> None:
    comm = communicator()
    in_memory = comm.num_nodes == 1 and os.environ.get("DCOLL_TRANSPORT") != "mpi"
    hvd.allreduce(operand(), compression=hvd.Compression.auto("topk", ratio=0.01))
    measured = comm.coding("auto topk 0.01")
    assert (measured is None) == in_memory
    assert comm.coding("auto topk 0.012") == measured
    assert comm.coding("auto topk 0.25") is None
    hvd.allreduce(operand(), compression=hvd.Compression.auto("topk", ratio=0.25))
    assert (comm.coding("auto topk 0.25") is None) == in_memory


def a_close_one() -> tuple[int, float]:
    """A count, and a ratio of top-k that is predicted to take about as long as all of it. Collective.

    Which they are depends on the links as they were measured. Where bytes cost most, some of the bytes are as fast as
    all of them; where each message does, so is a short call.
    """
    comm = communicator()
    off = {}
    for ratio in [0.001 * 1.6**step for step in range(14)] + [0.5 + 0.04 * step for step in range(13)]:
        if comm.coding(f"auto topk {ratio!r}") is None:
            hvd.allreduce(operand(), compression=hvd.Compression.auto("topk", ratio=ratio))  # measures
        coding = comm.coding(f"auto topk {ratio!r}")
        assert coding is not None
        for count in (COUNT, COUNT // 4):
            options = {"constants": comm.constants(), "two_levels": comm.num_nodes < comm.size}
            found = _C.plan.encoded(f"topk {ratio!r}", 4 * count, comm.nodes, *coding, **options)
            off[count, ratio] = (not found["close"], abs(math.log(found["plain_us"] / found["encoded_us"])))
    closest = min(off, key=lambda one: off[one])
    assert off[closest] < (True,), (comm.constants(), off)
    return closest


def check_calls_that_are_close_are_tried_and_then_decided() -> None:
    told = FORCED or UNMEASURED  # what was told not to measure is believed
    hvd.allreduce(operand(), compression=hvd.Compression.auto("topk", ratio=0.3))  # has measured
    count, ratio = (COUNT, 0.3) if told else hvd.broadcast_object(a_close_one(), root_rank=0)
    x, tried = operand()[:count], 2 * max(4, (4 << 20) // count)
    before, encoded = calls_of("tried"), []
    for _ in range(tried + 6):
        hvd.allreduce(x, compression=hvd.Compression.auto("topk", ratio=ratio), name="tried")
        encoded.append(calls_of("tried") - before)
        before += encoded[-1]
    anybody = [max(calls) for calls in zip(*hvd.allgather_object(encoded), strict=True)]
    if told:
        assert len(set(anybody)) == 1, encoded
        return
    assert anybody[:8] == [0, 1, 1, 1, 1, 0, 0, 0], (count, ratio, encoded)  # 4 calls are timed each way, or more
    assert len(set(anybody[tried:])) == 1, (count, ratio, encoded)


def check_what_is_kept_goes_with_calls_that_go_in_full() -> None:
    """Of gradients that are whole numbers nothing is ever lost, whichever way each step took."""
    library("torch")  # fills CODES
    comm, steps, codec = communicator(), 14, "auto topk 0.1"
    generator = torch.Generator().manual_seed(hvd.rank())
    gradient = torch.randint(-50, 51, (1 << 20,), generator=generator).float()
    options = {"op": _C.SUM, "bucket_bytes": 1 << 25, "first_bucket_bytes": 1 << 25, "codec": codec, "label": "kept"}
    reducer = _C.Reducer(comm, [len(gradient)], [CODES[torch.float32]], ["w"], **options)
    arrived, encoded = torch.zeros_like(gradient), 0
    for _ in range(steps):
        before = sum(calls_of(name) for name in hvd.stats() if "of kept" in name)
        reducer.mark_ready(0, gradient.data_ptr())
        reducer.finish()
        buffer, offset = reducer.gradient(0)
        arrived += torch.frombuffer(buffer, dtype=torch.float32, count=len(gradient), offset=offset)
        encoded = sum(calls_of(name) for name in hvd.stats() if "of kept" in name) - before
    kept = torch.as_tensor(reducer.kept(0)["error"])
    given = steps * hvd.allreduce(gradient, op=hvd.Sum)
    assert torch.equal(arrived + hvd.allreduce(kept, op=hvd.Sum), given)
    if not hvd.allreduce(torch.tensor(float(encoded))):
        assert not kept.any()
    elif FORCED:
        assert hvd.allreduce(kept.abs().sum())


def check_a_thousandth_of_the_bytes_pays() -> None:
    if FORCED or UNMEASURED:
        return
    x = operand()
    for _ in range(10):
        hvd.allreduce(x, compression=hvd.Compression.auto("topk", ratio=0.001), name="a thousandth")
    assert hvd.cross_size() == 1 or max(hvd.allgather_object(calls_of("a thousandth"))) > 0


def check_no_loss_is_none() -> None:
    x = operand()
    for compression in (hvd.Compression.auto(), hvd.Compression.auto):
        assert torch.equal(hvd.allreduce(x, compression=compression), hvd.allreduce(x))
        distributed(Toy(1), compression=compression)
    assert hvd.allreduce(x.double(), compression=hvd.Compression.auto("int8")).dtype == torch.float64
    assert torch.equal(
        hvd.allreduce(x, op=hvd.Max, compression=hvd.Compression.auto("bf16")), hvd.allreduce(x, op=hvd.Max)
    )
    distributed(Toy(1), compression=hvd.Compression.auto(), op=hvd.Adasum)


def check_other_losses_are_refused() -> None:
    with pytest.raises(hvd.ArgumentError, match=r"lossy 'int4', but takes bf16, fp16, int8, topk or None"):
        hvd.Compression.auto("int4")
    with pytest.raises(hvd.ArgumentError, match="ratio is 2"):
        hvd.Compression.auto("topk", ratio=2)


def check_adasum_is_refused() -> None:
    """Where a loss is allowed: it would change nothing."""
    x = torch.ones(3)
    calls: tuple[tuple[Any, Any], ...] = ((hvd.allreduce, x), (hvd.grouped_allreduce, [x, x]), (distributed, Toy(1)))
    for lossy in CODECS:
        for call, given in calls:
            with pytest.raises(hvd.ArgumentError, match=rf"auto\('{lossy}'\) encodes sums .*, but op is Adasum\. Use"):
                call(given, op=hvd.Adasum, compression=hvd.Compression.auto(lossy))


def check_an_optimizer_ends_alike_everywhere() -> None:
    for lossy in CODECS:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 1))
        optimizer = distributed(model, compression=hvd.Compression.auto(lossy))
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 64, generator=torch.Generator().manual_seed(step * 8 + hvd.rank()))).sum().backward()
            optimizer.step()
        for parameter in model.parameters():
            assert all(torch.equal(one, parameter) for one in hvd.allgather(parameter.detach()[None]))


def check_auto_on_one_rank_alone_is_a_mismatch() -> None:
    x = torch.ones(COUNT)
    with pytest.raises(hvd.DcollError, match="as auto int8"):
        hvd.allreduce(x, compression=hvd.Compression.auto("int8") if hvd.rank() == 0 else hvd.Compression.int8)


def check_explain_in_the_job() -> None:
    """As `explain --compression` does, with what this job has measured."""
    hvd.allreduce(operand(), compression=hvd.Compression.auto("int8"))
    comm = communicator()
    if comm.num_nodes == 1:
        pytest.skip("nothing is measured on one node")
    coding = comm.coding("auto int8")
    assert coding is not None
    assert all(one == coding for one in hvd.allgather_object(coding))
    text = plan.explain_compression(64 << 20, comm.nodes, {"int8": coding}, comm.constants())
    said = r"int8 +[\d.]+ us +[\d.]+x  (probably )?(int8|in full).* \(coding [\d.]+ and [\d.]+ GB/s\)"
    assert re.search(said, text)
