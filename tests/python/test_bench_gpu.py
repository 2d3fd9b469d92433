"""bench/gpu_kernels.py without a GPU: its arguments, what it calls, its arithmetic, its refusal to run."""

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dcoll import _C

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import gpu_kernels

BASE = 1 << 20
COPY_RATE, KERNEL_RATE = 2e12, 1.5e12  # bytes moved per second
L2 = 32 << 20


class FakeDevice:
    """Stands in for dcoll._C and for the clock: a call takes as long as the bytes it moves, and notes its buffers."""

    def __init__(self) -> None:
        self.cuda = self.kernels = self
        self.now = 0.0
        self.buffers: list[tuple[int, int]] = []

    def takes(self, nbytes: int, rate: float, *buffers: tuple[int, int]) -> None:
        self.now += nbytes / rate
        self.buffers += buffers

    def reduce_n(self, dst, srcs, count, dtype, op, scale, stream):
        size = count * WIDTHS[dtype]
        assert scale == (1 / len(srcs) if op == _C.AVERAGE else 1)
        self.takes((len(srcs) + 1) * size, KERNEL_RATE, *((at, size) for at in (dst, *srcs)))

    def cast(self, dst, to, src, source, count, stream):
        written, read = count * WIDTHS[to], count * WIDTHS[source]
        self.takes(written + read, KERNEL_RATE, (dst, written), (src, read))

    def pack(self, flat, segments, stream):
        size = sum(nbytes for _, _, nbytes in segments)
        self.takes(2 * size, KERNEL_RATE, (flat, size), *((at, nbytes) for at, _, nbytes in segments))

    def unpack(self, segments, flat, stream):
        self.pack(flat, segments, stream)

    def encoded_bytes(self, codec, count):
        return _C.kernels.encoded_bytes(codec, count)

    def top_bytes(self, count, k):
        return _C.kernels.top_bytes(count, k)

    def encode_top_scratch(self, count, k):
        return count // 2 + 8 * k

    def encode(self, codec, dst, src, count, error=0, *, stream):
        size, wire = 4 * count, self.encoded_bytes(codec, count)
        kept = [(error, size)] if error else []
        self.takes(size + wire + 2 * size * len(kept), KERNEL_RATE, (dst, wire), (src, size), *kept)

    def decode(self, codec, dst, src, count, stream):
        self.encode(codec, src, dst, count, stream=stream)

    def encode_top(self, message, src, count, k, scratch, error, stream):
        size, wire = 4 * count, self.top_bytes(count, k)
        used = (scratch, self.encode_top_scratch(count, k))
        self.takes(3 * size + wire, KERNEL_RATE, (message, wire), (src, size), (error, size), used)

    def scale(self, dst, src, count, dtype, scale, stream):
        assert (dtype, scale) == (_C.UINT8, 1.0)
        self.takes(2 * count, COPY_RATE, (dst, count), (src, count))

    def timer(self, call, repeat):
        began = self.now
        for _ in range(repeat):
            call()
        return max(self.now - began, 1e-9) / repeat  # torch's own calls take no time here


WIDTHS = dict(gpu_kernels.DTYPES.values())


@pytest.fixture
def device(monkeypatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(gpu_kernels, "_C", fake)
    return fake


def lines_of(argv: str) -> list[gpu_kernels.Case]:
    options = gpu_kernels.parse(argv.split())
    arena = gpu_kernels.Arena(BASE, gpu_kernels.needed_bytes(options))
    return [case for size in options.size for case in gpu_kernels.cases(options, size, arena, 0)]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-b", "4"], ["-b 4 is less than one element", "at least 8"]),
        (["-b", "1X"], ["'1X' is not a size"]),
        (["-p", "0"], ["'0' is not valid", "at least 1"]),
        (["--cast", "float32:int8"], ["'float32:int8' is no cast", "bfloat16"]),
        (["--cast", "float32"], ["'float32' is no cast", "FROM:TO"]),
        (["--cast", "float16:float16"], ["two different ones"]),
        (["--what", "scan"], ["reduce", "cast", "pack"]),
        (["-t", "complex64"], ["float32", "bool"]),
        (["-o", "adasum"], ["sum", "average"]),
        (["--rounds", "0"], ["'0' is not valid"]),
        (["--tensors", "none"], ["'none' is not valid"]),
    ],
)
def test_bad_arguments_say_what_is_allowed(argv, said, capsys):
    with pytest.raises(SystemExit) as error:
        gpu_kernels.parse(argv)
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert [part for part in said if part not in message] == []


def test_lines_are_types_times_operators_times_sources(device):
    found = lines_of("--what reduce -t float16 bool -o sum average -p 2 8 -b 1K 2K")
    assert [(c.dtype, c.op, c.sources, c.size_bytes) for c in found] == [
        (dtype, op, p, size)
        for size in (1024, 2048)
        for dtype, op in (("float16", "sum"), ("float16", "average"), ("bool", "sum"))  # bool has no average
        for p in (2, 8)
    ]


def test_bytes_moved_are_those_read_and_written(device):
    found = lines_of("-t float64 -p 3 -b 1000 --cast float16:float64 --tensors 3")
    assert [(c.kernel, c.moved_bytes) for c in found] == [
        ("reduce", 4 * 1000),
        ("cast", 125 * (2 + 8)),
        ("pack", 2 * 3 * 320),  # tensors of whole 16-byte units
        ("unpack", 2 * 3 * 320),
        *[(kernel, floats + _C.kernels.encoded_bytes(codec, 250)) for codec in ("fp16", "bf16", "int8")
          for kernel, floats in (("encode", 1000), ("encode", 3000), ("decode", 1000))],
        ("encode", 3000 + _C.kernels.top_bytes(250, 2)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "argv",
    ["-b 8 -p 1", "-b 256 -p 8", "-b 255 256 257 1000 4096 -p 2 8", "-b 16 --tensors 500", "-b 1M -p 127",
     "--what code -p 2 -b 64K", "--what code -p 1 -b 8 257 1M", "--what reduce cast pack -p 1 -b 8 1M"],
)  # fmt: skip
def test_calls_and_copies_stay_inside_the_arena_and_apart(device, argv):
    argv += f" -t {' '.join(gpu_kernels.DTYPES)} -o {' '.join(gpu_kernels.OPS)}"
    end = BASE + gpu_kernels.needed_bytes(gpu_kernels.parse(argv.split()))
    for case in lines_of(argv):
        for call in (case.call, case.copy):
            device.buffers.clear()
            call()
            spans = sorted((at, at + nbytes) for at, nbytes in device.buffers)
            assert spans[0][0] >= BASE
            assert spans[-1][1] <= end
            assert [one for one, other in itertools.pairwise(spans) if one[1] > other[0]] == []


def test_rates_and_the_ratio_to_the_copy(device):
    found = lines_of("-t float32 bfloat16 -p 2 8 -b 1M 64M")
    rows = gpu_kernels.measure(found, device.timer, 3, L2)
    assert len(rows) == len(found) == 2 * (4 + 2 + 2 + 3 * 3 + 1)
    for case, row in zip(found, rows, strict=True):
        assert row["gb_per_s"] == pytest.approx(KERNEL_RATE / 1e9)
        assert row["copy_gb_per_s"] == pytest.approx(COPY_RATE / 1e9)
        assert row["to_copy"] == pytest.approx(0.75, rel=1e-5)
        assert row["time_us"] == pytest.approx(case.moved_bytes / KERNEL_RATE * 1e6)
        assert row["rounds"] == 3
        assert row["fits_l2"] == (case.moved_bytes <= L2)
    json.dumps(rows)
    assert gpu_kernels.footer(rows) == "# beyond the L2: 0.75 of the copy's rate (median), 0.75 at least"
    slow = rows[-1] | {"kernel": "torch.topk(abs)", "to_copy": 0.01}
    assert gpu_kernels.footer([*rows, slow]) == gpu_kernels.footer(rows)
    assert "every line fits" in gpu_kernels.footer([row for row in rows if row["fits_l2"]])
    text = gpu_kernels.line(rows[0])
    assert text.split() == ["reduce", "float32", "sum", "1048576", "2", "2.10", "1500.0", "2000.0", "0.75", "L2"]
    assert gpu_kernels.HEAD.index("GB/s") + 4 == text.index("1500.0") + 6


def test_a_slow_round_hits_both_sides_of_a_ratio():
    case = gpu_kernels.Case("reduce", "float32", "sum", 400, 2, 1200, lambda: None, lambda: None)
    row = gpu_kernels.row(case, [1e-6, 4e-6, 2e-6], [2e-6, 8e-6, 4e-6], 0)
    assert row["to_copy"] == pytest.approx(0.5)
    assert (row["time_us"], row["copy_us"]) == (pytest.approx(4), pytest.approx(2))


def test_a_turn_takes_as_many_calls_as_fill_it():
    def timer_of(seconds):
        return lambda call, repeat: seconds

    assert gpu_kernels.calls_per_turn(lambda: None, timer_of(gpu_kernels.TURN_S / 40)) == 40
    assert gpu_kernels.calls_per_turn(lambda: None, timer_of(1.0)) == 1
    assert gpu_kernels.calls_per_turn(lambda: None, timer_of(0.0)) == gpu_kernels.MOST_CALLS


@pytest.mark.parametrize(("size", "count", "parts"), [(16, 100, 1), (1000, 3, 3), (1 << 20, 100, 100), (40, 2, 2)])
def test_segments_lie_one_behind_the_other(size, count, parts):
    segments = gpu_kernels.equal_segments(BASE, size, count)
    assert len(segments) == parts
    assert [at - BASE for at, _, _ in segments] == [offset for _, offset, _ in segments]
    ends = [offset + nbytes for _, offset, nbytes in segments]
    assert [offset for _, offset, _ in segments] == [0, *ends[:-1]]
    assert size - 16 * count < ends[-1] <= size


@pytest.mark.parametrize(
    ("built", "available", "said"),
    [(False, False, "built without CUDA"), (True, False, "no CUDA device: the driver's words"), (True, True, "torch ")],
)
def test_without_a_gpu_it_says_so_and_ends_with_2(monkeypatch, capsys, built, available, said, tmp_path):
    cuda = SimpleNamespace(available=lambda: available, unavailable_reason=lambda: "the driver's words")
    monkeypatch.setattr(gpu_kernels, "_C", SimpleNamespace(cuda_built=built, cuda=cuda))
    monkeypatch.setattr(gpu_kernels.torch.cuda, "is_available", lambda: False)
    result = tmp_path / "gpu.json"
    assert gpu_kernels.main(["--json", str(result)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gpu_kernels.py: nothing to measure: ")
    assert said in err
    assert not result.exists()


def test_the_document_has_rows_arguments_and_environment(device, monkeypatch, capsys, tmp_path):
    env = {
        "date": "today", "device": "a GPU", "compute_capability": "9.0", "multiprocessors": 132, "l2_bytes": L2,
        "cuda_driver": "13.0", "cuda_runtime": "13.0", "dcoll": "1", "torch": "2", "python": "3",
    }  # fmt: skip
    torch = gpu_kernels.torch
    random = torch.randint

    def on_the_host(*args, device, **more):
        assert device == "cuda"
        return random(*args, **more)

    monkeypatch.setattr(gpu_kernels, "why_not", lambda: "")
    monkeypatch.setattr(gpu_kernels, "describe", lambda: env)
    monkeypatch.setattr(gpu_kernels, "event_timer", device.timer)
    monkeypatch.setattr(torch, "randint", on_the_host)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 20, 1 << 30))
    result = tmp_path / "gpu.json"
    assert gpu_kernels.main(["-b", "64K", "4K", "--rounds", "2", "--json", str(result)]) == 0
    document = json.loads(result.read_text())
    assert document["environment"] == env
    assert document["arguments"]["size"] == [64 << 10, 4 << 10]
    assert len(document["rows"]) == 2 * (3 * 3 + 2 + 2 + 3 * 3 + 1 + 2)  # the last two are torch's
    named = [(row["kernel"], row["dtype"]) for row in document["rows"] if "torch" in row["kernel"]]
    assert named[:2] == [("torch._foreach_copy_", "100 parts"), ("torch.topk(abs)", "top 163")]
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 1 + len(document["rows"]) + 1
    assert table[0] == "# today  a GPU (sm_90, 132 multiprocessors, L2 32 MiB)"
    assert gpu_kernels.main(["-b", "1M"]) == 2
    assert "9 MiB are needed for these -b and -p, 1 MiB are free" in capsys.readouterr().err


def test_versions_are_written_as_cuda_writes_them():
    assert [gpu_kernels.version_text(n) for n in (0, 12080, 13000)] == ["0.0", "12.8", "13.0"]
