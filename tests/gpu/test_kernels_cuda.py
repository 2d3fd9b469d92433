"""The CUDA kernels against their CPU twins: bit for bit, whatever the dtype, op, size, alignment and aliasing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import presence
import pytest
import torch

from dcoll import _C

pytestmark = pytest.mark.gpu
presence.skip_module()


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    presence.require()


DTYPES = {
    _C.FLOAT16: torch.float16,
    _C.BFLOAT16: torch.bfloat16,
    _C.FLOAT32: torch.float32,
    _C.FLOAT64: torch.float64,
    _C.INT8: torch.int8,
    _C.UINT8: torch.uint8,
    _C.INT16: torch.int16,
    _C.UINT16: torch.uint16,
    _C.UINT32: torch.uint32,
    _C.UINT64: torch.uint64,
    _C.INT32: torch.int32,
    _C.INT64: torch.int64,
    _C.BOOL: torch.bool,
}
FLOATS = (_C.FLOAT16, _C.BFLOAT16, _C.FLOAT32, _C.FLOAT64)
BITS = (_C.BIT_AND, _C.BIT_OR, _C.BIT_XOR)
OPS = (_C.SUM, _C.AVERAGE, _C.MIN, _C.MAX, _C.PRODUCT, *BITS)
REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in OPS if dtype not in FLOATS or op not in BITS]
# 1,000,003 elements take more threads than any device holds at once for the scalar path, so the grid strides.
SIZES = (0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 1000, 4099, 1_000_003)
GUARD = 64


def width(dtype: int) -> int:
    return torch.empty(0, dtype=DTYPES[dtype]).element_size()


def random_bytes(dtype: int, count: int, seed: int) -> torch.Tensor:
    """Bytes of `count` elements: any bit pattern, so NaNs, infinities and subnormals too; bool holds 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == _C.BOOL else 256
    return torch.randint(0, high, (count * width(dtype),), dtype=torch.uint8, generator=generator)


class Placed:
    """The same bytes on the CPU and on the GPU, `offset` bytes after an aligned address, with guard bytes around."""

    def __init__(self, data: torch.Tensor, offset: int = 0) -> None:
        self.start = GUARD + offset
        self.nbytes = data.numel()
        self.host = torch.full((self.nbytes + self.start + GUARD,), 0xA5, dtype=torch.uint8)
        self.host[self.start : self.start + self.nbytes] = data
        self.device = self.host.cuda()

    @property
    def cpu(self) -> int:
        return self.host.data_ptr() + self.start

    @property
    def gpu(self) -> int:
        return self.device.data_ptr() + self.start

    def check(self, dtype: int, what: object) -> None:
        """Both sides are equal, guards included; any NaN equals any NaN."""
        got, want = self.device.cpu(), self.host
        end = self.start + self.nbytes
        if dtype in FLOATS:
            got, want = got.clone(), want.clone()
            for side in (got, want):
                values = side[self.start : end].clone().view(DTYPES[dtype])
                values[values.isnan()] = float("nan")
                side[self.start : end] = values.view(torch.uint8)
        assert torch.equal(got, want), (what, (got != want).nonzero()[:4].flatten().tolist())


def placements(dtype: int) -> Iterator[tuple[int, int]]:
    """Offsets of destination and sources: all aligned, alike but not at 16 bytes, and each its own way."""
    w = width(dtype)
    yield 0, 0
    yield w, w
    yield 0, w


def operands(dtype: int, count: int, p: int, offset: int) -> list[Placed]:
    return [Placed(random_bytes(dtype, count, seed), offset) for seed in range(p)]


def scale_of(dtype: int, op: int, p: int) -> float:
    return 1.0 / p if op == _C.AVERAGE and dtype != _C.BOOL else 1.0


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_reduce2(dtype: int, op: int) -> None:
    for count, (to, source) in itertools.product(SIZES, placements(dtype)):
        a, b = operands(dtype, count, 2, source)
        out = Placed(random_bytes(dtype, count, 9), to)
        scale = scale_of(dtype, op, 2)
        _C.kernels.reduce2(out.cpu, a.cpu, b.cpu, count, dtype, op, scale)
        _C.cuda.reduce2(out.gpu, a.gpu, b.gpu, count, dtype, op, scale)
        out.check(dtype, (count, to, source))
        _C.kernels.reduce2(a.cpu, a.cpu, b.cpu, count, dtype, op, scale)
        _C.cuda.reduce2(a.gpu, a.gpu, b.gpu, count, dtype, op, scale)
        a.check(dtype, (count, "in place"))
        b.check(dtype, (count, "source"))


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 17])
def test_reduce_n(dtype: int, op: int, p: int) -> None:
    for count, (to, source) in itertools.product((0, 1, 17, 4099, 100_003), placements(dtype)):
        sources = operands(dtype, count, p, source)
        out = Placed(random_bytes(dtype, count, 99), to)
        scale = scale_of(dtype, op, p)
        _C.kernels.reduce_n(out.cpu, [s.cpu for s in sources], count, dtype, op, scale)
        _C.cuda.reduce_n(out.gpu, [s.gpu for s in sources], count, dtype, op, scale)
        out.check(dtype, (count, to, source))
        everywhere_cpu, everywhere_gpu = [s.cpu for s in sources], [s.gpu for s in sources]
        _C.kernels.reduce_n_to_n(everywhere_cpu, everywhere_cpu, count, dtype, op, scale)
        _C.cuda.reduce_n_to_n(everywhere_gpu, everywhere_gpu, count, dtype, op, scale)
        for s in sources:
            s.check(dtype, (count, "n to n, in place"))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != _C.BOOL])
@pytest.mark.parametrize("scale", [1.0, 0.5, 1.0 / 3, 1.0 / 1000, 0.3, -2.5])
def test_scale(dtype: int, scale: float) -> None:
    for count in SIZES:
        (source,) = operands(dtype, count, 1, width(dtype))
        out = Placed(random_bytes(dtype, count, 9))
        _C.kernels.scale(out.cpu, source.cpu, count, dtype, scale)
        _C.cuda.scale(out.gpu, source.gpu, count, dtype, scale)
        out.check(dtype, count)


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_cast(source: int, to: int) -> None:
    for count, misalign in itertools.product((*SIZES, 65536 * 3), (0, 1, 3)):
        data = Placed(random_bytes(source, count, 7), misalign * width(source))
        out = Placed(random_bytes(to, count, 8), misalign * width(to))
        _C.kernels.cast(out.cpu, to, data.cpu, source, count)
        _C.cuda.cast(out.gpu, to, data.gpu, source, count)
        out.check(to, (count, misalign))
        if width(source) == width(to):
            _C.kernels.cast(data.cpu, to, data.cpu, source, count)
            _C.cuda.cast(data.gpu, to, data.gpu, source, count)
            data.check(to, (count, misalign, "in place"))


@pytest.mark.parametrize("narrow", [_C.FLOAT16, _C.BFLOAT16])
def test_cast_every_16_bit_value(narrow: int) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    for wide in (_C.FLOAT32, _C.FLOAT64):
        data, out = Placed(every), Placed(random_bytes(wide, 65536, 1))
        _C.kernels.cast(out.cpu, wide, data.cpu, narrow, 65536)
        _C.cuda.cast(out.gpu, wide, data.gpu, narrow, 65536)
        out.check(wide, "every value")


def test_pack_and_unpack() -> None:
    # More segments than one launch takes; sizes around the tile of 32 KiB; every alignment; every fifth is absent.
    sizes = [0, 1, 2, 3, 15, 16, 17, 1000, 32767, 32768, 32769, 100_001] * 20
    tensors = [Placed(random_bytes(_C.UINT8, n, i), i % 16) for i, n in enumerate(sizes)]
    offsets = [0, *itertools.accumulate(n + 3 for n in sizes)]
    flat = Placed(random_bytes(_C.UINT8, offsets[-1], 1234), 1)

    def segments(on_gpu: bool) -> list[tuple[int, int, int]]:
        addresses = [0 if i % 5 == 4 else t.gpu if on_gpu else t.cpu for i, t in enumerate(tensors)]
        return list(zip(addresses, offsets, sizes, strict=False))

    _C.kernels.pack(flat.cpu, segments(False))
    _C.cuda.pack(flat.gpu, segments(True))
    flat.check(_C.UINT8, "pack")
    fresh = random_bytes(_C.UINT8, offsets[-1], 4321)
    flat = Placed(fresh, 1)
    _C.kernels.unpack(segments(False), flat.cpu)
    _C.cuda.unpack(segments(True), flat.gpu)
    for i, tensor in enumerate(tensors):
        tensor.check(_C.UINT8, ("unpack", i))


def test_stream_orders_the_work() -> None:
    """On a stream of its own, the reduction sees what was enqueued on that stream before it."""
    stream = torch.cuda.Stream()
    count = 1 << 22
    a, b, out = (torch.zeros(count, device="cuda") for _ in range(3))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        a.fill_(2.0)
        b.fill_(3.0)
    _C.cuda.reduce2(out.data_ptr(), a.data_ptr(), b.data_ptr(), count, _C.FLOAT32, _C.SUM, 1.0, stream.cuda_stream)
    stream.synchronize()
    assert bool((out == 5.0).all())


def test_errors() -> None:
    x = torch.zeros(4, device="cuda")
    with pytest.raises(_C.ArgumentError, match="128"):
        _C.cuda.reduce_n(x.data_ptr(), [x.data_ptr()] * 129, 4, _C.FLOAT32, _C.SUM)
    with pytest.raises(_C.ArgumentError, match="bool"):
        _C.cuda.scale(x.data_ptr(), x.data_ptr(), 4, _C.BOOL, 0.5)
    with pytest.raises(_C.ArgumentError, match="cannot cast"):
        _C.cuda.cast(x.data_ptr(), _C.INT32, x.data_ptr(), _C.FLOAT32, 4)
    with pytest.raises(_C.ArgumentError, match="no CUDA device"):
        _C.cuda.device_name(_C.cuda.device_count())
    assert _C.cuda.device_name(0) == torch.cuda.get_device_name(0)
