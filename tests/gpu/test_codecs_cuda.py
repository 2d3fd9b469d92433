"""The CUDA encoders and decoders against their CPU twins: the same bytes, the same errors kept."""

from __future__ import annotations

import itertools

import presence
import pytest
import torch

from dcoll import _C

pytestmark = pytest.mark.gpu
presence.skip_module()

CODECS = ("fp16", "bf16", "int8", "fp32")
SIZES = (0, 1, 255, 256, 257, 4099, 1_000_003)


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    presence.require()


def some_floats(count: int, seed: int) -> torch.Tensor:
    """Numbers of many magnitudes, some beyond float16's, a few infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * torch.exp2(torch.randint(-20, 20, (count,), generator=generator))
    if count > 300 and seed == 1:  # two NaNs that are added leave either
        values[7], values[290], values[291] = float("nan"), float("inf"), -float("inf")
    return values


def room(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes + 16, dtype=torch.uint8)


def check(on_gpu: torch.Tensor, on_cpu: torch.Tensor, what: object) -> None:
    assert torch.equal(on_gpu.cpu().view(torch.uint8), on_cpu.view(torch.uint8)), what


@pytest.mark.parametrize("key", [None, 0x9E3779B97F4A7C15], ids=["nearest", "random"])
@pytest.mark.parametrize("codec", CODECS)
def test_encode_decode_and_sum(codec: str, key: int | None) -> None:
    for count, feedback in itertools.product(SIZES, (False, True)):
        src, error = some_floats(count, 1), some_floats(count, 2)
        other = some_floats(count, 3)
        wires = [room(_C.kernels.encoded_bytes(codec, count)) for _ in range(2)]
        beyond = torch.zeros(1, dtype=torch.int64, device="cuda")
        d_src, d_error, d_wire = src.cuda(), error.cuda(), wires[0].cuda()
        found = _C.kernels.encode(
            codec, wires[0].data_ptr(), src.data_ptr(), count, error.data_ptr() if feedback else 0, key
        )
        _C.cuda.encode(codec, d_wire.data_ptr(), d_src.data_ptr(), count,
                       d_error.data_ptr() if feedback else 0, beyond.data_ptr(), key)  # fmt: skip
        check(d_wire, wires[0], (count, feedback))
        check(d_error, error, (count, feedback))
        assert int(beyond) == found

        back = torch.zeros(count)
        d_back = back.cuda()
        _C.kernels.decode(codec, back.data_ptr(), wires[0].data_ptr(), count)
        _C.cuda.decode(codec, d_back.data_ptr(), d_wire.data_ptr(), count)
        check(d_back, back, count)

        _C.kernels.encode(codec, wires[1].data_ptr(), other.data_ptr(), count)
        sums = room(wires[0].numel() - 16)
        d_sums, d_wires = sums.cuda(), [wire.cuda() for wire in wires]
        left = torch.zeros(count)
        d_left = left.cuda()
        messages, d_messages = [w.data_ptr() for w in wires], [w.data_ptr() for w in d_wires]
        _C.kernels.sum_encoded(codec, sums.data_ptr(), messages, count, 1 / 3, left.data_ptr(), key)
        _C.cuda.sum_encoded(codec, d_sums.data_ptr(), d_messages, count, 1 / 3, d_left.data_ptr(), 0, key)
        check(d_sums, sums, (count, "sum"))
        check(d_left, left, (count, "sum"))


@pytest.mark.parametrize("kind", ["normal", "equal", "rounded", "zeros"])
def test_top_k(kind: str) -> None:
    for count, share in itertools.product((1, 1000, 65537, 3_000_001), (0.001, 0.01, 0.5, 1.0)):
        k = max(1, round(count * share))
        normal = some_floats(count, 5)
        values = {"normal": normal, "equal": normal.sign() * 2.5, "rounded": torch.randn(count).round()}
        src = values.get(kind, torch.zeros(count))
        error, velocity = torch.randn(count), torch.randn(count)
        message = room(_C.kernels.top_bytes(count, k))
        d_src, d_error, d_velocity, d_message = src.cuda(), error.cuda(), velocity.cuda(), message.cuda()
        scratch = torch.empty(_C.cuda.encode_top_scratch(count, k), dtype=torch.uint8, device="cuda")
        sent = torch.zeros(1, dtype=torch.int32, device="cuda")
        found = _C.kernels.encode_top(
            message.data_ptr(), src.data_ptr(), count, k, error.data_ptr(), velocity.data_ptr(), 0.9
        )
        _C.cuda.encode_top(d_message.data_ptr(), d_src.data_ptr(), count, k, scratch.data_ptr(), d_error.data_ptr(),
                           d_velocity.data_ptr(), 0.9, sent.data_ptr())  # fmt: skip
        what = (count, share)
        check(d_message, message, what)
        check(d_error, error, what)
        check(d_velocity, velocity, what)
        assert int(sent) == found
        total = torch.zeros(count)
        d_total, first_bad = total.cuda(), torch.full((1,), 99, dtype=torch.int32, device="cuda")
        assert _C.kernels.sum_top(total.data_ptr(), [message.data_ptr()] * 2, count, k, 1 / 3)
        scratch = torch.empty(_C.cuda.sum_top_scratch(count, 2), dtype=torch.uint8, device="cuda")
        _C.cuda.sum_top(d_total.data_ptr(), [d_message.data_ptr()] * 2, count, k, scratch.data_ptr(),
                        first_bad.data_ptr(), 1 / 3)  # fmt: skip
        check(d_total, total, what)
        assert int(first_bad) == 99
