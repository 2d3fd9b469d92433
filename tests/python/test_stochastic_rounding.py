"""Stochastic rounding against a twin in NumPy, on every instruction set; and that it is what its name says."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

import dcoll
from dcoll import _C
from dcoll.compression.codecs import check_adasum, encode, narrow

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
K = _C.kernels
KEY = 0x0123_4567_89AB_CDEF
CODECS = ("fp16", "bf16", "int8")
SIZES = (0, 1, 127, 128, 255, 256, 257, 2047, 2048, 2049, 5000)


def rounded(codec: str, values: Floats, key: int | None = KEY) -> Floats:
    wire, decoded = np.zeros(K.encoded_bytes(codec, len(values)) + 1, np.uint8), np.empty_like(values)
    wire[-1] = 77
    K.encode(codec, wire.ctypes.data, values.ctypes.data, len(values), 0, key)
    assert wire[-1] == 77
    K.decode(codec, decoded.ctypes.data, wire.ctypes.data, len(values))
    return decoded


def draws(key: int, count: int) -> Words:
    """Of each element 16 bits: csrc/kernels/simd_draw.h."""
    numbers = np.arange(-(-count // 256) * 128, dtype=np.uint32)
    x = numbers + np.uint32(key & 0xFFFFFFFF)
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15) ^ np.uint32(key >> 32)) * np.uint32(0x846CA68B)
    x = (x ^ (x >> 16)).reshape(-1, 128)
    return np.concatenate([x & np.uint32(0xFFFF), x >> 16], axis=1).reshape(-1)[:count]


def between(values: Floats, quantum: npt.NDArray[np.float64], bits: npt.NDArray[np.int64], draw: Words) -> Floats:
    """The multiple of the quantum below, or the one above where so many drawn bits say so."""
    magnitude = np.abs(values.astype(np.float64)) / quantum
    below = np.floor(magnitude)
    chance = np.floor((magnitude - below) * 2.0**bits).astype(np.int64)
    up = chance + (draw >> (16 - bits)).astype(np.int64) >= 2**bits
    return np.copysign((below + up) * quantum, values).astype(np.float32)


def twin(codec: str, values: Floats, key: int) -> Floats:
    draw = draws(key, len(values))
    if codec == "int8":
        wanted = np.empty_like(values)
        for begin in range(0, len(values), 256):
            block, here = values[begin : begin + 256], draw[begin : begin + 256]
            greatest = np.abs(block).max()
            dither = here.astype(np.float32) / np.float32(65536) - np.float32(0.5 - 2.0**-17)
            steps = np.rint(block * (np.float32(127) / greatest) + dither).clip(-127, 127)
            wanted[begin : begin + 256] = steps * (greatest / np.float32(127))
        return wanted
    if codec == "fp16":
        values = np.clip(values, -65504, 65504)
    exponent = np.frexp(values)[1].astype(np.int64) - 1
    if codec == "bf16":
        return between(values, np.exp2(exponent - 7.0), np.full(len(values), 16), draw)
    normal = exponent >= -14
    quantum, bits = np.where(normal, np.exp2(exponent - 10.0), 2.0**-24), np.where(normal, 13, 16)
    return between(values, quantum, bits, draw)


def some_values(count: int, widest: int = 8) -> Floats:
    dice = np.random.default_rng(count)
    scales = np.exp2(dice.integers(-widest, widest + 1, count))
    return (dice.standard_normal(count) * scales).astype(np.float32)


@pytest.mark.parametrize("codec", CODECS)
def test_it_is_what_the_twin_makes(codec: str, isa: str) -> None:
    for count in SIZES:
        for values in (some_values(count), some_values(count, 25)):
            assert np.array_equal(rounded(codec, values), twin(codec, values, KEY)), count


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_it_takes_one_of_the_two_neighbours(codec: str, isa: str) -> None:
    values = some_values(20000, 20)
    results = [rounded(codec, values, key) for key in range(50)]
    nearest = rounded(codec, values, None)
    wire = np.zeros(len(values), np.uint16)
    K.encode(codec, wire.ctypes.data, nearest.ctypes.data, len(values))
    neighbours = []
    for step in (-1, 0, 1):
        other, moved = np.empty_like(values), wire + np.uint16(step % 65536)
        K.decode(codec, other.ctypes.data, moved.ctypes.data, len(values))
        neighbours.append(other)
    magnitudes = np.abs(neighbours)
    fits = np.abs(values) <= (65504 if codec == "fp16" else np.inf)
    for result in results:
        exact = nearest == values
        assert np.array_equal(result[exact], values[exact])
        size, own = np.abs(result), np.abs(values)
        below = np.where(magnitudes[1] <= own, magnitudes[1], magnitudes[0])
        above = np.where(magnitudes[1] >= own, magnitudes[1], magnitudes[2])
        inner = fits & ~exact & (nearest != 0)
        assert ((size == below) | (size == above))[inner].all()
        assert (np.signbit(result) == np.signbit(values)).all()
    differ = np.any(np.array(results) != results[0], axis=0)
    assert differ[fits].mean() > 0.9


@pytest.mark.parametrize("codec", CODECS)
def test_the_mean_of_many_is_the_value(codec: str) -> None:
    values, times = some_values(512, 15 if codec == "fp16" else 2).clip(-60000, 60000), 20000
    total, squares = np.zeros(512), np.zeros(512)
    for key in range(times):
        off = rounded(codec, values, key * 0x9E3779B97F4A7C15 % 2**64).astype(np.float64) - values
        total += off
        squares += off * off
    deviation = np.sqrt(squares / times)
    away = np.abs(total / times) / np.maximum(deviation / np.sqrt(times), 1e-30)
    assert (deviation > 0).mean() > 0.9
    assert away[deviation > 0].max() < 5  # of standard errors, of 512 values
    assert np.sqrt(np.mean(away[deviation > 0] ** 2)) == pytest.approx(1, abs=0.2)
    nearest = rounded(codec, values, None).astype(np.float64) - values
    assert np.abs(nearest)[deviation > 0].max() > 10 * np.abs(total / times)[deviation > 0].max()


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_edges(codec: str, isa: str) -> None:
    most = {"fp16": 65504.0, "bf16": float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0])}[codec]
    greatest = np.finfo(np.float32).max
    edges = np.tile(np.array([0, -0.0, np.inf, -np.inf, most, -most, greatest, -greatest], np.float32), 40)
    for key in range(20):
        got = rounded(codec, edges, key)
        assert np.array_equal(got.reshape(-1, 8)[:, :6], edges.reshape(-1, 8)[:, :6])
        assert (np.abs(got.reshape(-1, 8)[:, 6:]) == most).all()
        assert np.array_equal(np.signbit(got), np.signbit(edges))
        nans = np.array([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFF800001], np.uint32).view(np.float32)
        assert np.isnan(rounded(codec, np.tile(nans, 70), key)).all()


@pytest.mark.parametrize("seed", range(3))
def test_draws_are_even_and_of_a_key_alone(seed: int) -> None:
    """Of keys that are hashes, as those of calls are."""
    count = 1 << 20
    keys = np.random.default_rng(seed).integers(0, 2**64, 2, dtype=np.uint64)
    mine, others = (draws(int(key), count).astype(np.float64) for key in keys)
    bins = np.bincount((mine / 256).astype(np.int64), minlength=256)
    assert ((bins - count / 256) ** 2 / (count / 256)).sum() == pytest.approx(255, abs=6 * np.sqrt(2 * 255))
    pairs = {"another key": others, "the next": np.roll(mine, 1), "the other half": np.roll(mine, 128)}
    for what, other in pairs.items():
        assert abs(np.corrcoef(mine, other)[0, 1]) < 6 / np.sqrt(count), what


@pytest.mark.parametrize("op", [dcoll.Min, dcoll.Max, dcoll.Product, dcoll.Adasum])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_other_operators_are_refused(name: str, op: dcoll.ReduceOp) -> None:
    """Rather than rounded to nearest, which the class itself does."""
    compression, x = getattr(dcoll.Compression, name), torch.ones(3)
    assert encode(compression, x, op)[2] == ""
    assert encode(compression(stochastic=True), x, dcoll.Sum)[2] == f"{name} stochastic"
    with pytest.raises(dcoll.ArgumentError, match=rf"{name}\(stochastic=True\) .* Average|but op is Adasum"):
        encode(compression(stochastic=True), x, op)
    if op is dcoll.Adasum:
        with pytest.raises(dcoll.ArgumentError, match=rf"{name}\(stochastic=True\) .*, but op is Adasum"):
            check_adasum(compression(stochastic=True))
    with pytest.raises(dcoll.ArgumentError, match=rf"{name}\(stochastic=True\) is for all-reduces"):
        narrow(compression(stochastic=True), x)  # as a reduce-scatter does


def test_numbers_may_be_numpys() -> None:
    topk = dcoll.Compression.topk(np.float32(0.01), momentum=np.float64(0.5))  # type: ignore[arg-type]
    assert topk.codec == f"topk {float(np.float32(0.01))!r}"
    assert dcoll.Compression.powersgd(min_compression_rate=np.float32(3)).min_compression_rate == 3  # type: ignore[arg-type]
    for wrong in (True, "0.1", np.float32(2), 1j):
        with pytest.raises(dcoll.ArgumentError, match=r"ratio is .*, but must be a share of the elements"):
            dcoll.Compression.topk(wrong)  # type: ignore[arg-type]


def test_names_of_codecs() -> None:
    assert dcoll.Compression.bf16.codec == "bf16"
    assert dcoll.Compression.bf16().codec == "bf16"
    assert dcoll.Compression.bf16(stochastic=True).codec == "bf16 stochastic"
    assert dcoll.Compression.fp16(stochastic=True).codec == "fp16 stochastic"
    assert dcoll.Compression.int8(feedback=False, stochastic=True).codec == "int8 stochastic"
    with pytest.raises(dcoll.ArgumentError, match="got stochastic 'yes', but takes True or False"):
        dcoll.Compression.bf16(stochastic="yes")  # type: ignore[arg-type]
    for name in ("topk 0.1 stochastic", "fp32 stochastic", "stochastic", "bf16 stochastic stochastic"):
        with pytest.raises(dcoll.ArgumentError):
            K.encoded_bytes(name, 5)
