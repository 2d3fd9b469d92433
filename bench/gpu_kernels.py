"""How fast the CUDA kernels are, next to the device's own copy: reduce, cast, pack, encoders and top-k over sizes.

    python bench/gpu_kernels.py                                  # the usual table
    python bench/gpu_kernels.py --what reduce -p 8 -t bfloat16 -o sum max -b 1M 256M
    python bench/gpu_kernels.py --json bench/results/gpu-h200.json

A kernel and a cudaMemcpyAsync from device to device that moves as many bytes are timed in turns, with CUDA events, over
all rounds. "GB/s" counts every byte read and written; "copy" is the kernel's rate over the copy's, the median over the
rounds, so 1.00 is what the device can do. Calls of one turn repeat on the same buffers, one launch behind the other:
what fits in the L2 cache is served by it ("L2"), and of small sizes it is the launches that are measured.

"error": the encoder also reads and writes what it has lost, for the next call. Lines of torch do what the lines before
them do; their bytes are counted as those of dcoll's kernel, so that the rates compare.
"""

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from arguments import at_least, parse_size
from environment import cpu_model
from interleaved.report import paired_ratio, spread
from kernels import DTYPES, OPS

import dcoll
from dcoll import _C

UINT8 = DTYPES["uint8"][0]
FLOATS = ("float16", "bfloat16", "float32", "float64")
WHAT = ("reduce", "cast", "pack", "code", "topk")
CODECS = ("fp16", "bf16", "int8")
TOP_SHARE = 100  # one element of so many is sent
TURN_S = 2e-3
MOST_CALLS = 1000
ALIGNMENT = 256  # between buffers, as cudaMalloc gives it

Call = Callable[[], object]
Timer = Callable[[Call, int], float]
"""Seconds that a call takes on the device, from so many of them back to back."""


class Case(NamedTuple):
    """One line of the table: what is called, and how many bytes it reads and writes."""

    kernel: str
    dtype: str
    op: str
    size_bytes: int
    sources: int
    moved_bytes: int
    call: Call
    copy: Call


class Arena:
    """Device memory from `base` on, handed out anew for every case."""

    def __init__(self, base: int, nbytes: int, memory: torch.Tensor | None = None) -> None:
        """memory: bytes, of which the arena is a part; without, nothing of torch is measured."""
        self.base, self.nbytes, self._memory = base, nbytes, memory

    def buffers(self, count: int, nbytes: int) -> list[int]:
        step = aligned(nbytes)
        assert count * step <= self.nbytes, (count, nbytes, self.nbytes)
        return [self.base + i * step for i in range(count)]

    def tensors(self, address: int, count: int, nbytes: int) -> list[torch.Tensor]:
        """float32 tensors of so many bytes each, one behind the other; none without torch's memory."""
        if self._memory is None:
            return []
        begin = address - self._memory.data_ptr()
        whole = self._memory[begin : begin + count * nbytes].view(torch.float32)
        return list(whole.view(count, nbytes // 4))


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def needed_bytes(options: argparse.Namespace) -> int:
    """Of one arena for all cases: the most buffers of the greatest size, or the two of a copy that moves as much."""
    most = max(4, max(options.sources) + 1)  # an encoder that keeps its error moves up to four times the size
    longest = [longest_of_top(size) if "topk" in options.what else size for size in options.size]
    return most * max(map(aligned, longest)) + 2 * ALIGNMENT


def longest_of_top(size: int) -> int:
    """Bytes of the longest of operand, message and scratch memory."""
    count = size // 4
    k = top_k(count)
    return max(size, _C.kernels.top_bytes(count, k), _C.cuda.encode_top_scratch(count, k))


def top_k(count: int) -> int:
    return max(1, count // TOP_SHARE)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT), help="default: all")
    parser.add_argument("-t", "--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16", "float16"],
                        help="of reduce (default float32 bfloat16 float16)")  # fmt: skip
    parser.add_argument("-o", "--op", nargs="+", choices=OPS, default=["sum"], help="of reduce (default sum)")
    parser.add_argument("-p", "--sources", nargs="+", type=at_least(1), default=[2, 4, 8],
                        help="how many sources reduce combines (default 2 4 8)")  # fmt: skip
    parser.add_argument("--cast", nargs="+", type=parse_cast, metavar="FROM:TO",
                        default=[("float32", "bfloat16"), ("bfloat16", "float32")],
                        help="default float32:bfloat16 bfloat16:float32")  # fmt: skip
    parser.add_argument("--tensors", type=at_least(1), default=100, help="that pack gathers (default 100)")
    parser.add_argument("-b", "--size", nargs="+", type=parse_size, default=[64 << 10, 1 << 20, 16 << 20, 256 << 20],
                        help="bytes of the result, of the wider type in a cast; K, M, G")  # fmt: skip
    parser.add_argument("--rounds", type=at_least(1), default=21, help="turns of each line (default 21)")
    parser.add_argument("--json", metavar="FILE", help="write rows and environment here: bench/results/gpu-*.json")
    options = parser.parse_args(argv)
    if min(options.size) < 8:
        parser.error(f"-b {min(options.size)} is less than one element of the widest type: at least 8 bytes are needed")
    return options


def parse_cast(text: str) -> tuple[str, str]:
    source, _, to = text.partition(":")
    if source not in FLOATS or to not in FLOATS or source == to:
        raise argparse.ArgumentTypeError(f"{text!r} is no cast: FROM:TO, two different ones of {', '.join(FLOATS)}")
    return source, to


class Lines:
    """All lines of one size."""

    def __init__(self, options: argparse.Namespace, size: int, arena: Arena, stream: int) -> None:
        self.found: list[Case] = []
        self._options, self._size, self._arena, self._stream = options, size, arena, stream

    def _add(self, kernel: str, dtype: str, op: str, moved: int, call: Call, sources: int = 1) -> None:
        dst, src = self._arena.buffers(2, moved // 2)
        # Bytes scaled by 1 are one cudaMemcpyAsync, called as the kernels are.
        copy = partial(_C.cuda.scale, dst, src, moved // 2, UINT8, 1.0, self._stream)
        self.found.append(Case(kernel, dtype, op, self._size, sources, moved, call, copy))

    def reduce(self) -> None:
        for dtype, op in product(self._options.dtype, self._options.op):
            if dtype == "bool" and op == "average":
                continue
            code, width = DTYPES[dtype]
            count = self._size // width
            for p in self._options.sources:
                dst, *srcs = self._arena.buffers(p + 1, self._size)
                scale = 1.0 / p if op == "average" else 1.0
                call = partial(_C.cuda.reduce_n, dst, srcs, count, code, OPS[op], scale, self._stream)
                self._add("reduce", dtype, op, (p + 1) * count * width, call, p)

    def cast(self) -> None:
        for source, to in self._options.cast:
            (from_code, from_width), (to_code, to_width) = DTYPES[source], DTYPES[to]
            count = self._size // max(from_width, to_width)
            dst, src = self._arena.buffers(2, self._size)
            call = partial(_C.cuda.cast, dst, to_code, src, from_code, count, self._stream)
            self._add("cast", f"{source}:{to}", "-", count * (from_width + to_width), call)

    def pack(self) -> None:
        flat, tensors = self._arena.buffers(2, self._size)
        segments = equal_segments(tensors, self._size, self._options.tensors)
        parts, moved = f"{len(segments)} parts", 2 * sum(nbytes for _, _, nbytes in segments)
        self._add("pack", parts, "-", moved, partial(_C.cuda.pack, flat, segments, self._stream))
        self._add("unpack", parts, "-", moved, partial(_C.cuda.unpack, segments, flat, self._stream))
        each = segments[0][2]
        equal = [segment for segment in segments if segment[2] == each]
        into, out_of = (self._arena.tensors(at, len(equal), each) for at in (flat, tensors))
        if into:
            call = partial(torch._foreach_copy_, into, out_of)
            self._add("torch._foreach_copy_", f"{len(equal)} parts", "-", 2 * len(equal) * each, call)

    def code(self) -> None:
        count = self._size // 4
        for codec in CODECS:
            wire = _C.kernels.encoded_bytes(codec, count)
            message, values, error = self._arena.buffers(3, max(self._size, wire))
            encode = partial(_C.cuda.encode, codec, message, values, count, stream=self._stream)
            self._add("encode", codec, "-", 4 * count + wire, encode)
            self._add("encode", codec, "error", 3 * 4 * count + wire, partial(encode, error=error))
            decode = partial(_C.cuda.decode, codec, values, message, count, stream=self._stream)
            self._add("decode", codec, "-", 4 * count + wire, decode)

    def topk(self) -> None:
        count = self._size // 4
        k = top_k(count)
        message, values, error, scratch = self._arena.buffers(4, longest_of_top(self._size))
        call = partial(_C.cuda.encode_top, message, values, count, k, scratch, error=error, stream=self._stream)
        moved = 3 * 4 * count + _C.kernels.top_bytes(count, k)
        self._add("encode", f"top {k}", "error", moved, call)
        for tensor in self._arena.tensors(values, 1, 4 * count):
            self._add("torch.topk(abs)", f"top {k}", "-", moved, partial(torch_top, tensor, k))


def torch_top(tensor: torch.Tensor, k: int) -> object:
    return torch.topk(tensor.abs(), k)


def cases(options: argparse.Namespace, size: int, arena: Arena, stream: int) -> list[Case]:
    """All lines of one size."""
    lines = Lines(options, size, arena, stream)
    for what in options.what:
        getattr(lines, what)()
    return lines.found


def equal_segments(tensors: int, size: int, count: int) -> list[tuple[int, int, int]]:
    """(address, offset, bytes) of up to `count` equal tensors of whole 16-byte units; a tensor of 16 bytes at least."""
    each = max(16, size // count // 16 * 16)
    return [(tensors + at, at, min(each, size - at)) for at in range(0, size, each)][:count]


def measure(lines: list[Case], timer: Timer, rounds: int, l2_bytes: int) -> list[dict[str, Any]]:
    """A row for each case: all of them and their copies in turns, so that what the device does in a round hits all."""
    calls = [call for case in lines for call in (case.copy, case.call)]
    repeats = [calls_per_turn(call, timer) for call in calls]
    samples: list[list[float | None]] = [[] for _ in calls]
    for _ in range(rounds):
        for taken, call, repeat in zip(samples, calls, repeats, strict=True):
            taken.append(timer(call, repeat))
    return [row(case, samples[2 * i], samples[2 * i + 1], l2_bytes) for i, case in enumerate(lines)]


def calls_per_turn(call: Call, timer: Timer) -> int:
    timer(call, 3)  # the first call loads the kernel's code
    return max(1, min(MOST_CALLS, round(TURN_S / max(timer(call, 3), 1e-7))))


def row(case: Case, copy_s: list[float | None], kernel_s: list[float | None], l2_bytes: int) -> dict[str, Any]:
    times, copies = spread(kernel_s), spread(copy_s)
    faster = paired_ratio(copy_s, kernel_s)
    assert times
    assert copies
    assert faster
    copied = 2 * (case.moved_bytes // 2)
    return {
        "kernel": case.kernel, "dtype": case.dtype, "op": case.op, "size_bytes": case.size_bytes,
        "sources": case.sources, "moved_bytes": case.moved_bytes, **times,
        "gb_per_s": case.moved_bytes / times["time_us"] / 1e3,
        "copy_us": copies["time_us"], "copy_gb_per_s": copied / copies["time_us"] / 1e3,
        "to_copy": faster * case.moved_bytes / copied, "fits_l2": case.moved_bytes <= l2_bytes,
    }  # fmt: skip


HEAD = (
    f"{'kernel':<20} {'type':<18} {'op':<8} {'bytes':>11} {'p':>2} {'us':>10} {'GB/s':>8} {'copy GB/s':>9} {'copy':>5}"
)


def line(found: dict[str, Any]) -> str:
    return (
        f"{found['kernel']:<20} {found['dtype']:<18} {found['op']:<8} {found['size_bytes']:>11} {found['sources']:>2} "
        f"{found['time_us']:>10.2f} {found['gb_per_s']:>8.1f} {found['copy_gb_per_s']:>9.1f} {found['to_copy']:>5.2f}"
        f"{'  L2' if found['fits_l2'] else ''}"
    )


def footer(rows: list[dict[str, Any]]) -> str:
    """One median over what came from memory, which is what the kernels are for. torch's are not among them."""
    ratios = [found["to_copy"] for found in rows if not found["fits_l2"] and not found["kernel"].startswith("torch")]
    if not ratios:
        return "# every line fits in the L2 cache: nothing is said of memory"
    return f"# beyond the L2: {statistics.median(ratios):.2f} of the copy's rate (median), {min(ratios):.2f} at least"


def why_not() -> str:
    """Why nothing can be measured here; "" where it can."""
    if not _C.cuda_built:
        return "dcoll was built without CUDA (see `python -m dcoll doctor`)"
    if not _C.cuda.available():
        return f"no CUDA device: {_C.cuda.unavailable_reason()}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device; it allocates the buffers"
    return ""


def event_timer(call: Call, repeat: int) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(repeat):
        call()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3 / repeat


def version_text(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def describe() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _C.cuda.device_name(torch.cuda.current_device()),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", 0),
        "cuda_driver": version_text(_C.cuda.driver_version()),
        "cuda_runtime": version_text(_C.cuda.runtime_version()),
        "cuda_of_torch": torch.version.cuda,
        "dcoll": dcoll.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "command": " ".join(sys.argv),
    }


def header(env: dict[str, Any]) -> str:
    return (
        f"# {env['date']}  {env['device']} (sm_{env['compute_capability'].replace('.', '')}, "
        f"{env['multiprocessors']} multiprocessors, L2 {env['l2_bytes'] >> 20} MiB)\n"
        f"# dcoll {env['dcoll']} with CUDA {env['cuda_runtime']}, driver for {env['cuda_driver']}, "
        f"torch {env['torch']}, Python {env['python']}"
    )


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if reason := why_not():
        print(f"gpu_kernels.py: nothing to measure: {reason}", file=sys.stderr)
        return 2
    needed, free = needed_bytes(options), torch.cuda.mem_get_info()[0]
    if needed > free:
        print(f"gpu_kernels.py: {needed >> 20} MiB are needed for these -b and -p, {free >> 20} MiB are free on the "
              "device: take smaller ones", file=sys.stderr)  # fmt: skip
        return 2
    env = describe()
    # Bytes below 64: finite numbers of every type, and not zeros, which some devices move faster.
    memory = torch.randint(0, 64, (needed + ALIGNMENT,), dtype=torch.uint8, device="cuda")
    arena = Arena(aligned(memory.data_ptr()), needed, memory)
    print(header(env), HEAD, sep="\n")
    rows = []
    for size in options.size:
        found = cases(options, size, arena, torch.cuda.current_stream().cuda_stream)
        rows += measure(found, event_timer, options.rounds, env["l2_bytes"])
        for measured in rows[-len(found) :]:
            print(line(measured), flush=True)
    print(footer(rows))
    if options.json:
        document = {"environment": env, "arguments": vars(options), "rows": rows}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
