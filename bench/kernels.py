"""How fast the CPU kernels are: GB/s of result per dtype, op, size and instruction set, next to memcpy.

    python bench/kernels.py                          # the usual table
    python bench/kernels.py -p 2 4 8 --results all   # as the two-shot all-reduce: p sources into p results
    python bench/kernels.py -t bfloat16 -o max --isa avx2 --sources 4 --json kernels.json

"GB/s" counts the bytes of one result; p sources and one result move (p + 1) times that, which "moved" counts.
"memcpy" is moved GB/s against a plain copy of the same size (2 bytes moved per byte): about 1.0 is memory speed.
"float32" is GB/s against float32 with the same op, when that is measured too: put it before the types compared with it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from arguments import above_zero, at_least, parse_size

from dcoll import _C

DTYPES = {
    "float16": (_C.FLOAT16, 2),
    "bfloat16": (_C.BFLOAT16, 2),
    "float32": (_C.FLOAT32, 4),
    "float64": (_C.FLOAT64, 8),
    "int8": (_C.INT8, 1),
    "uint8": (_C.UINT8, 1),
    "int16": (_C.INT16, 2),
    "uint16": (_C.UINT16, 2),
    "uint32": (_C.UINT32, 4),
    "uint64": (_C.UINT64, 8),
    "int32": (_C.INT32, 4),
    "int64": (_C.INT64, 8),
    "bool": (_C.BOOL, 1),
}
OPS = {"sum": _C.SUM, "average": _C.AVERAGE, "min": _C.MIN, "max": _C.MAX, "product": _C.PRODUCT}


class Row(NamedTuple):
    isa: str
    dtype: str
    op: str
    size_bytes: int
    sources: int
    in_place: bool
    time_us: float
    gb_per_s: float
    moved_gb_per_s: float
    to_memcpy: float
    to_float32: float | None
    results: int


def aligned_buffer(nbytes: int, lines_off: int) -> np.ndarray:
    """Zeros, written, so that they are not all one page of zeros; a few cache lines after a page.

    Buffers at one page offset would compete for the same cache sets.
    """
    memory = np.empty(nbytes + 2 * 4096 + lines_off * 64, dtype=np.uint8)
    memory.fill(0)
    start = -memory.ctypes.data % 4096 + lines_off * 64
    return memory[start : start + nbytes]


def best_seconds(call: Callable[[], object], min_seconds: float) -> float:
    """The best of many repetitions, each long enough for the clock: what the kernel does when nothing disturbs it."""
    call()
    began = time.perf_counter()
    call()
    once = max(time.perf_counter() - began, 1e-7)
    repeat = max(1, round(0.001 / once))
    best, spent = float("inf"), 0.0
    while spent < min_seconds:
        began = time.perf_counter()
        for _ in range(repeat):
            call()
        took = time.perf_counter() - began
        best, spent = min(best, took / repeat), spent + took
    return best


def measure(options: argparse.Namespace, size: int, sources: int) -> list[Row]:
    results = sources if options.results == "all" else 1
    buffers = [aligned_buffer(size, 5 * i) for i in range(sources + results)]
    addresses = [b.ctypes.data for b in buffers]
    copy = best_seconds(lambda: ctypes.memmove(addresses[0], addresses[1], size), options.seconds)
    copy_rate = 2 * size / copy / 1e9
    rows: list[Row] = []
    float32: dict[tuple[str, str, bool], float] = {}
    for isa in options.isa:
        if not _C.kernels.set_isa(isa):
            print(f"# {isa}: not on this CPU or in this build")
            continue
        for dtype in options.dtype:
            code, width = DTYPES[dtype]
            for op in options.op:
                if dtype == "bool" and op == "average":
                    continue
                scale = 1.0 / sources if op == "average" else 1.0
                for in_place in (False, True):
                    srcs = addresses[:sources]
                    dsts = srcs[:results] if in_place else addresses[sources:]
                    call = partial(_C.kernels.reduce_n_to_n, dsts, srcs, size // width, code, OPS[op], scale)
                    took = best_seconds(call, options.seconds)
                    rate = size / took / 1e9
                    if dtype == "float32":
                        float32[isa, op, in_place] = rate
                    base = float32.get((isa, op, in_place))
                    moved = rate * (sources + results)
                    rows.append(
                        Row(
                            isa,
                            dtype,
                            op,
                            size,
                            sources,
                            in_place,
                            took * 1e6,
                            rate,
                            moved,
                            moved / copy_rate,
                            rate / base if base else None,
                            results,
                        )
                    )
                    print_row(rows[-1])
    print(f"# {size} bytes: memcpy {copy * 1e6:.2f} us, {copy_rate:.1f} GB/s moved")
    return rows


def print_header() -> None:
    print(
        f"{'isa':<10} {'type':<9} {'op':<8} {'bytes':>11} {'p':>2} {'place':<6} "
        f"{'us':>10} {'GB/s':>8} {'moved':>8} {'memcpy':>7} {'float32':>7}"
    )


def print_row(r: Row) -> None:
    to_float32 = f"{r.to_float32:.2f}" if r.to_float32 is not None else "-"
    print(
        f"{r.isa:<10} {r.dtype:<9} {r.op:<8} {r.size_bytes:>11} {r.sources:>2} {'in' if r.in_place else 'out':<6} "
        f"{r.time_us:>10.2f} {r.gb_per_s:>8.2f} {r.moved_gb_per_s:>8.2f} {r.to_memcpy:>7.2f} {to_float32:>7}",
        flush=True,
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-t", "--dtype", nargs="+", choices=DTYPES, default=["float32", "float16", "bfloat16"])
    parser.add_argument("-o", "--op", nargs="+", choices=OPS, default=["sum"])
    parser.add_argument(
        "-b",
        "--size",
        nargs="+",
        type=parse_size,
        default=[64 << 10, 512 << 10, 4 << 20, 64 << 20],
        help="bytes; K, M, G",
    )
    parser.add_argument(
        "--isa",
        nargs="+",
        choices=["generic", "avx2", "avx512", "avx512vnni"],
        default=[_C.kernels.active_isa()],
        help="default: what run-time dispatch chose",
    )
    parser.add_argument(
        "-p", "--sources", type=at_least(1), nargs="+", default=[2], help="how many sources are combined (default 2)"
    )
    parser.add_argument(
        "--results", choices=["one", "all"], default="one", help="into one result, or as many as sources"
    )
    parser.add_argument("--seconds", type=above_zero, default=0.2, help="time spent on each line (default 0.2)")
    parser.add_argument("--json", metavar="FILE", help="write the rows here too")
    options = parser.parse_args(argv)
    widest = max(DTYPES[dtype][1] for dtype in options.dtype)
    for size in options.size:
        if size == 0 or size % widest:
            parser.error(f"-b {size}: allowed are multiples of {widest}, the bytes of an element of the widest -t")
    return options


def main() -> None:
    options = parse()
    print_header()
    rows = [row for size in options.size for p in options.sources for row in measure(options, size, p)]
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([row._asdict() for row in rows], file, indent=1)


if __name__ == "__main__":
    main()
