"""What compression costs and saves: encoders beside the memory's speed, and all-reduces over links of several rates.

    python bench/compression.py kernels                       # one core, 25 million float32
    sudo python bench/compression.py lab --methods bf16,auto-bf16,int8,auto-int8 --json c.json --markdown c.md

kernels: "moved" is the bytes that must be read and written, per second; "of a copy" compares it with memcpy's, which
moves two bytes for each it copies, of the same array in the same turn; "in copies": how many of these take as long.

lab: all-reduces of float32, in place, between hosts in network namespaces (bench/netlab, so root is needed), plain and
with each codec in turns; a figure is the median over the turns of the slowest rank, beside it how many times
faster than plain. Below 1.0 a codec does not pay; below the table is where each begins to lose. "gpt" instead of a
size: the gradients of examples/train_gpt.py's model, by a DistributedOptimizer.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from arguments import at_least, format_size, parse_size
from lab import lab_for

CODECS = ("fp16", "bf16", "int8")
METHODS = (*CODECS, "topk")
RATIO = 0.01
GRADIENTS = "gpt"
PIECE = 512 << 10
"""Elements that top-k chooses from at once; the engine's pieces are about as long."""
JOB = "job"
AUTO_TRIES = 33  # after so many calls of a size Compression.auto has decided (Trial::calls_each_way)


def methods(text: str) -> str:
    known = (*METHODS, "powersgd", *(f"auto-{name}" for name in METHODS))
    for name in text.split(","):
        if name not in known:
            raise argparse.ArgumentTypeError(
                f"got {name!r}; allowed are {', '.join(known)}. Plain, not compressed, is measured beside them"
            )
    return text


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{kernels,lab}")  # JOB is not for users
    kernels = commands.add_parser("kernels", help="encoders and decoders on one core")
    kernels.add_argument("--count", type=at_least(1), default=25_000_000, help="float32 elements")
    lab = commands.add_parser("lab", help="all-reduces between hosts")
    lab.add_argument("--hosts", type=at_least(2), default=4)
    lab.add_argument("--slots", type=at_least(1), default=1, help="ranks per host")
    lab.add_argument("--rates", default="100mbit,1gbit,10gbit,unshaped", help="of each host's link, in turn")
    lab.add_argument("--sizes", default="1M,16M,64M", help=f"of the buffer, in bytes, or {GRADIENTS}")
    lab.add_argument(
        "--methods",
        type=methods,
        default=",".join(METHODS),
        help="names in dcoll.Compression; auto-int8: auto(lossy='int8')",
    )
    lab.add_argument("--timeout", type=at_least(1), default=900, help="seconds for the job of a rate")
    for command in (kernels, lab):
        command.add_argument("--turns", type=at_least(1), default=7)
        command.add_argument("--json", type=Path)
        command.add_argument("--markdown", type=Path)
    job = commands.add_parser(JOB)
    job.add_argument("output", type=Path)
    job.add_argument("sizes")
    job.add_argument("turns", type=int)
    job.add_argument("methods")
    return parser.parse_args(argv)


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure_kernels(args: argparse.Namespace) -> dict[str, Any]:
    from dcoll import _C

    count, k = args.count, _C.kernels
    x = np.random.default_rng().standard_normal(count).astype(np.float32)
    longest = max(k.encoded_bytes(codec, count) for codec in CODECS)
    other, error, wire = np.empty_like(x), np.empty_like(x), np.zeros(longest, np.uint8)
    source, target, lost, encoded = (a.ctypes.data for a in (x, other, error, wire))
    calls: dict[str, tuple[Callable[[], object], int]] = {"memcpy": (lambda: np.copyto(other, x), 8 * count)}
    for codec in CODECS:
        size = k.encoded_bytes(codec, count)
        calls[f"{codec} encode"] = (lambda c=codec: k.encode(c, encoded, source, count), 4 * count + size)
        calls[f"{codec} encode, error kept"] = (
            lambda c=codec: k.encode(c, encoded, source, count, lost), 12 * count + size
        )  # fmt: skip
        calls[f"{codec} encode, stochastic"] = (
            lambda c=codec: k.encode(c, encoded, source, count, 0, 20), 4 * count + size
        )  # fmt: skip
        calls[f"{codec} decode"] = (lambda c=codec: k.decode(c, target, encoded, count), 4 * count + size)
    calls |= top_k_calls(k, x, other, error)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for codec in CODECS:
        k.encode(codec, encoded, source, count, lost)
    for _ in range(args.turns):
        for name, (call, _) in calls.items():
            if name.endswith("kept"):
                error[:] = 0
                call()
            if name.endswith("decode"):
                calls[name.replace("decode", "encode")][0]()
            times[name].append(seconds(call))
    rows = []
    for name, (_, moved) in calls.items():
        of_copy = [
            (moved / t) / (calls["memcpy"][1] / c) for t, c in zip(times[name], times["memcpy"], strict=True)
        ]  # fmt: skip
        median = statistics.median(times[name])
        rows.append(
            {"kernel": name, "ms": median * 1e3, "moved_gb_s": moved / median / 1e9,
             "of_copy": statistics.median(of_copy), "copies": median / statistics.median(times["memcpy"])}
        )  # fmt: skip
    return {"isa": k.active_isa(), "count": count, "rows": rows}


def top_k_calls(k: Any, x: Any, target: Any, error: Any) -> dict[str, tuple[Callable[[], object], int]]:
    """Top-k of a hundredth, in pieces, each with how many bytes it must move; and what torch has."""
    import torch

    torch.set_num_threads(1)
    pieces = [(at, min(PIECE, len(x) - at)) for at in range(0, len(x), PIECE)]
    wanted = [max(1, round(RATIO * n)) for _, n in pieces]
    messages = [np.zeros(k.top_bytes(n, most), np.uint8) for (_, n), most in zip(pieces, wanted, strict=True)]
    size = sum(len(one) for one in messages)
    tensor = torch.from_numpy(x)

    def encode(lost: int = 0) -> None:
        for (at, n), most, message in zip(pieces, wanted, messages, strict=True):
            k.encode_top(message.ctypes.data, x.ctypes.data + 4 * at, n, most, lost and lost + 4 * at)

    def add_up() -> None:
        for (at, n), most, message in zip(pieces, wanted, messages, strict=True):
            assert k.sum_top(target.ctypes.data + 4 * at, [message.ctypes.data], n, most)

    return {
        "topk 1 % encode": (encode, 4 * len(x) + size),
        "topk 1 % encode, error kept": (lambda: encode(error.ctypes.data), 12 * len(x) + size),
        "topk 1 % sum": (add_up, 4 * len(x) + size),
        "torch.topk(x.abs(), 1 %)": (lambda: torch.topk(tensor.abs(), int(RATIO * len(x))), 4 * len(x) + size),
    }


Reductions = dict[str, tuple[Callable[[], object], Callable[[], object]]]
"""By the name of the method: what comes before it, and what is timed."""


def compression_named(name: str) -> Any:
    """int8: Compression.int8; auto-int8: Compression.auto(lossy="int8")."""
    import dcoll as hvd

    kind, _, lossy = name.partition("-")
    found = getattr(hvd.Compression, kind)
    return found(lossy) if lossy else found


def reductions_of(size: int, names: Sequence[str]) -> tuple[int, Reductions]:
    """A buffer, in place, as buckets are reduced: to page in a result in new memory takes long with every codec."""
    import torch

    import dcoll as hvd
    from dcoll.collectives.on_communicator import allreduce_sync
    from dcoll.compression.codecs import codec_of
    from dcoll.job.world import communicator

    values = torch.randn(size // 4)
    x = values.clone()
    found: Reductions = {}
    for name in names:
        codec = codec_of(compression_named(name), x, hvd.Average)
        call = functools.partial(allreduce_sync, communicator(), x, hvd.Average, "", codec=codec, in_place=True)
        found[name] = (functools.partial(x.copy_, values), call)
    return size, found


def reductions_of_gpt(names: Sequence[str]) -> tuple[int, Reductions]:
    """The gradients of examples/train_gpt.py's model, by a DistributedOptimizer, in an empty backward."""
    import torch

    import dcoll as hvd

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    from gpt import GPT

    found: Reductions = {}
    for name in names:
        model = GPT(6, 6, 384, 256)
        compression = compression_named(name)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            model.named_parameters(),
            compression=compression() if name == "powersgd" else compression,
        )
        gradients = [torch.randn_like(p) for p in model.parameters()]

        def backward(model: Any = model, gradients: Any = gradients) -> None:
            torch.autograd.backward(list(model.parameters()), gradients)

        found[name] = (optimizer.zero_grad, backward)
    return sum(p.nbytes for p in model.parameters()), found


def job(args: argparse.Namespace) -> None:
    """One rank of a lab's job."""
    import torch

    import dcoll as hvd

    hvd.init()
    torch.set_num_threads(1)
    names = ["none", *args.methods.split(",")]
    samples: list[tuple[str, int, float]] = []
    for text in args.sizes.split(","):
        size, reductions = reductions_of_gpt(names) if text == GRADIENTS else reductions_of(int(text), names)
        for turn in range(args.turns + 1):
            for name, (prepare, reduce) in reductions.items():
                for _ in range(AUTO_TRIES if turn == 0 and name.startswith("auto-") else 0):
                    prepare()
                    reduce()
                prepare()
                hvd.barrier()
                taken = seconds(reduce)
                slowest = float(hvd.allreduce(np.array([taken]), op=hvd.Max)[0])
                if turn > 0:
                    samples.append((name, size, slowest))
    if hvd.rank() == 0:
        args.output.write_text(json.dumps(samples))
    hvd.shutdown()


def measure_lab(args: argparse.Namespace) -> dict[str, Any]:
    sizes = ",".join(text if text == GRADIENTS else str(parse_size(text)) for text in args.sizes.split(","))
    rows = []
    for rate in args.rates.split(","):
        with lab_for("compression", args.hosts, rate) as lab, tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "samples.json"
            command = [*lab.launcher(str(args.slots)), sys.executable, __file__, JOB, str(output), sizes]
            command += [str(args.turns), args.methods]
            # What is kept of a link's speed is of the rate before: the hosts are the same.
            environment = os.environ | {"OMP_NUM_THREADS": "1", "DCOLL_CALIBRATE": "force"}
            subprocess.run(command, env=environment, check=True, timeout=args.timeout)
            samples = json.loads(output.read_text())
        for size in sorted({size for _, size, _ in samples}):
            by_name = {name: [t for n, at, t in samples if n == name and at == size] for name, _, _ in samples}
            medians = {name: statistics.median(times) for name, times in by_name.items()}
            gains = {
                name: statistics.median(p / t for p, t in zip(by_name["none"], by_name[name], strict=True))
                for name in by_name
                if name != "none"
            }
            rows.append({"rate": rate, "bytes": size, "median_s": medians, "times_faster": gains})
            print(f"{rate} {format_size(size)}: {gains}", file=sys.stderr, flush=True)
    return {"hosts": args.hosts, "ranks_per_host": args.slots, "rows": rows}


def markdown(document: dict[str, Any]) -> str:
    rows = document["rows"]
    if document["command"] == "kernels":
        head = f"One core ({document['isa']}), {document['count']:,} float32; medians of {document['turns']} turns."
        lines = [head, "", "| kernel | ms | in copies | moved GB/s | of a copy |", "| --- | --- | --- | --- | --- |"]
        lines += [
            f"| {r['kernel']} | {r['ms']:.1f} | {r['copies']:.2f} | {r['moved_gb_s']:.1f} | {r['of_copy']:.0%} |"
            for r in rows
        ]
        return "\n".join(lines) + "\n"
    head = (
        f"{document['hosts']} hosts x {document['ranks_per_host']} ranks, all-reduce of float32; median ms of "
        f"{document['turns']} turns, in brackets how many times faster than plain."
    )
    names = list(rows[0]["times_faster"])
    lines = [head, "", "| link | bytes | plain | " + " | ".join(names) + " |", "| --- " * (3 + len(names)) + "|"]
    for row in rows:
        cells = [f"{row['median_s'][c] * 1e3:.1f} ({row['times_faster'][c]:.2f})" for c in names]
        plain = f"{row['median_s']['none'] * 1e3:.1f}"
        lines.append(f"| {row['rate']} | {format_size(row['bytes'])} | {plain} | " + " | ".join(cells) + " |")
    lines += ["", *(f"- {name}: {break_even(rows, name)}" for name in names)]
    return "\n".join(lines) + "\n"


def break_even(rows: list[dict[str, Any]], name: str) -> str:
    """Where a method loses. Of auto: where it is more than 5 % slower than the better one of its codec and plain."""
    codec = name.partition("-")[2]
    losses: dict[str, list[str]] = {}
    for row in rows:
        best = max(1.0, row["times_faster"].get(codec, 1.0)) / 1.05 if codec else 1.0
        if row["times_faster"][name] < best:
            losses.setdefault(row["rate"], []).append(format_size(row["bytes"]))
    where = "; ".join(f"{rate} with {', '.join(sizes)}" for rate, sizes in losses.items())
    text = f"more than 5 % slower than the better one of plain and {codec}" if codec else "slower than plain"
    return f"{text} at {where}" if losses else f"nowhere {text}"


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.command == JOB:
        return job(args)
    result = measure_kernels(args) if args.command == "kernels" else measure_lab(args)
    now = datetime.now(UTC).isoformat(timespec="minutes")
    document = {"command": args.command, "date": now, "turns": args.turns} | result
    text = markdown(document)
    print(text, end="")
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
