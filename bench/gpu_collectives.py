"""What collectives of CUDA tensors cost, next to the copies between GPU and host that they are made of.

    mpirun -n 2 python bench/gpu_collectives.py --json bench/results/gpu-h200-collectives-2.json

Ranks share the GPUs there are. In this run are measured too: the rate of copies from pinned memory to the GPU and back
by one rank, and of a copy within the GPU. "in place" is an all-reduce of memory of dcoll.empty(), and beside it stands
its share of what the copy's rate allows: on a GPU that p ranks share each byte is read and written p times. The other
collectives are of such memory too; their bytes are those of an allgather's result, else of the operand. "staged" is
what a script does where CUDA tensors are not taken: a copy to pinned memory, dcoll's all-reduce there, a copy back.
"apart": gradients of 200 tensors, one call for each, beside "grouped" as one. Median over the turns of the time of the
slowest rank, each kind in its turn. With DCOLL_GPU_ENGINE=host all go through host memory.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arguments import at_least, parse_size

import dcoll
from dcoll import _C

Call = Callable[[], object]
SIZES = [4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20]
TENSORS, TENSOR_FLOATS = 200, 16 << 10  # of the gradients


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-b", "--size", nargs="+", type=parse_size, default=SIZES, help="bytes; K, M, G")
    parser.add_argument("--turns", type=at_least(1), default=7, help="of each kind (default 7)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there (rank 0)")
    options = parser.parse_args(argv)
    if min(options.size) < 4:
        parser.error(f"-b {min(options.size)} is less than one float32: allowed is at least 4")
    return options


def seconds(call: Call, calls: int) -> float:
    """Of a call, of the slowest rank, until the GPU is done."""
    dcoll.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    own = (time.perf_counter() - begin) / calls
    return float(dcoll.allreduce(np.array([own]), op=dcoll.Max)[0])


def measure(kinds: dict[str, Call], turns: int) -> dict[str, float]:
    """Median microseconds."""
    repeats = {name: max(1, min(500, round(0.02 / seconds(call, 3)))) for name, call in kinds.items()}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(turns):
        for name, call in kinds.items():
            times[name].append(seconds(call, repeats[name]))
    return {name: statistics.median(found) * 1e6 for name, found in times.items()}


def of_size(nbytes: int) -> dict[str, Call]:
    count = max(1, nbytes // 4)
    tensor = torch.ones(count, device="cuda")
    shared = dcoll.empty(count, device="cuda").fill_(1)
    ranks = dcoll.size()
    even = dcoll.empty(max(1, count // ranks) * ranks, device="cuda").fill_(1)
    pinned = torch.ones(count).pin_memory()

    def staged() -> None:
        pinned.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        dcoll.allreduce_(pinned, op=dcoll.Average)
        tensor.copy_(pinned, non_blocking=True)

    return {
        "allreduce_": lambda: dcoll.allreduce_(tensor, op=dcoll.Average),
        "in place": lambda: dcoll.allreduce_(shared, op=dcoll.Average),
        "staged": staged,
        "broadcast_": lambda: dcoll.broadcast_(shared, 0),
        "allgather": lambda: dcoll.allgather(even[: len(even) // ranks]),
        "alltoall": lambda: dcoll.alltoall(even),
        "reducescatter": lambda: dcoll.reducescatter(even, op=dcoll.Average),
    }


def of_gradients() -> dict[str, Call]:
    tensors = [torch.ones(TENSOR_FLOATS, device="cuda") for _ in range(TENSORS)]

    def apart() -> None:
        handles = [dcoll.allreduce_async_(one, op=dcoll.Average, name=f"{i}") for i, one in enumerate(tensors)]
        for handle in handles:
            dcoll.synchronize(handle)

    return {"apart": apart, "grouped": lambda: dcoll.grouped_allreduce_(tensors, op=dcoll.Average)}


def copies(nbytes: int = 256 << 20) -> dict[str, float]:
    """GB/s of this rank alone; of a copy within the GPU bytes read and written."""
    on_gpu, other, pinned = (torch.ones(nbytes // 4, device="cuda") for _ in range(3))
    host = pinned.cpu().pin_memory()
    kinds = {
        "to the host": (lambda: host.copy_(on_gpu, non_blocking=True), nbytes),
        "to the GPU": (lambda: on_gpu.copy_(host, non_blocking=True), nbytes),
        "within the GPU": (lambda: other.copy_(on_gpu), 2 * nbytes),
    }
    rates = {}
    for name, (call, moved) in kinds.items():
        times = []
        for _ in range(7):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        rates[name] = moved / statistics.median(times) / 1e9
    return rates


def main() -> None:
    options = parse()
    dcoll.init()
    torch.cuda.set_device(dcoll.local_rank() % torch.cuda.device_count())
    rates: dict[str, float] = {}
    if dcoll.rank() == 0:
        rates = copies()
    dcoll.barrier()
    found: list[dict[str, Any]] = []
    for nbytes in options.size:
        times = measure(of_size(nbytes), options.turns)
        found += [{"what": name, "bytes": nbytes, "us": us} for name, us in times.items()]
    gradients = measure(of_gradients(), options.turns)
    found += [{"what": name, "bytes": TENSORS * TENSOR_FLOATS * 4, "us": us} for name, us in gradients.items()]
    if dcoll.rank() != 0:
        return
    device = _C.cuda.device_name(torch.cuda.current_device())
    print(f"# {device}, {dcoll.size()} ranks on {torch.cuda.device_count()} GPU(s); GB/s of one rank's copies: "
          + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items()))  # fmt: skip
    print(f"{'what':<13} {'bytes':>10} {'us':>10} {'GB/s':>7} {'share':>6}")
    most = rates["within the GPU"] / (2 * dcoll.size())
    for row in found:
        rate = row["bytes"] / row["us"] / 1e3
        bound = row["what"] == "in place" and dcoll.size() > 1 and torch.cuda.device_count() == 1
        share = f"{rate / most:>6.2f}" if bound else ""
        print(f"{row['what']:<13} {row['bytes']:>10} {row['us']:>10.1f} {rate:>7.2f} {share}")
    if options.json:
        environment = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "device": device, "ranks": dcoll.size(),
            "gpus": torch.cuda.device_count(), "torch": torch.__version__, "cuda_of_torch": torch.version.cuda,
            "dcoll": dcoll.__version__, "engine": os.environ.get("DCOLL_GPU_ENGINE", "auto"),
        }  # fmt: skip
        document = {"environment": environment, "copies_gb_per_s": rates, "rows": found}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
