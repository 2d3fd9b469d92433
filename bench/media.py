"""All-reduce between hosts over MPI and over UCX, in jobs that take turns in a lab of network namespaces (root).

    python bench/media.py --hosts 2 --rate 1gbit --json r.json

A job over MPI is started by mpirun, one over UCX by the variables of torch.distributed alone, a rank on each host. Of
every job the median call counts, of the jobs of a medium the median; the ranks' slowest.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import netlab
from arguments import above_zero, add_sizes, at_least, check_sizes, format_size, message_sizes
from lab import lab_for

PORT = 29577


def rank_main(output: str, sizes: list[int], turn_ms: float) -> None:
    """One rank: the median seconds of a call, by size."""
    import numpy as np

    import dcoll as hvd
    from dcoll.job import world

    hvd.init()
    buffer = np.zeros(max(sizes) // 4 + 1, np.float32)
    hvd.allreduce_(buffer[: 1 << 16], op=hvd.Sum)  # measures the links
    found = {}
    for size in sizes:
        part, taken = buffer[: max(1, size // 4)], []
        hvd.allreduce_(part, op=hvd.Sum)
        hvd.barrier()
        begin = time.perf_counter()
        calls = 3
        while len(taken) < calls:
            before = time.perf_counter()
            hvd.allreduce_(part, op=hvd.Sum)
            taken.append(time.perf_counter() - before)
            if len(taken) == 3:
                each = hvd.allreduce(np.array([(time.perf_counter() - begin) / 3]), op=hvd.Max)[0]
                calls = max(3, min(500, int(1e-3 * turn_ms / each)))
        found[size] = max(hvd.allgather_object(median(taken)))
    part = buffer[:1000]
    part[:] = hvd.rank()
    assert hvd.allreduce(part, op=hvd.Sum)[0] == sum(range(hvd.size()))
    if hvd.rank() == 0:
        transports = set(world.communicator().transports) - {"self"}
        Path(output).write_text(json.dumps({"seconds": found, "transports": sorted(transports)}))


def job(lab: netlab.Lab, medium: str, command: list[str], hosts: int, timeout: float) -> None:
    """To its end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DCOLL_CALIBRATE": "force"}
    if medium == "mpi":
        subprocess.run([*lab.launcher("1"), *command], env=environment, check=True, timeout=timeout)
        return
    environment |= {"WORLD_SIZE": str(hosts), "MASTER_ADDR": lab.address(0), "MASTER_PORT": str(PORT)}
    environment |= {"UCX_NET_DEVICES": "eth0"}
    ranks = [subprocess.Popen(lab.enter(i, command), env=environment | {"RANK": str(i)}) for i in range(hosts)]
    try:
        if any([rank.wait(timeout) for rank in ranks]):
            raise SystemExit("a rank failed")
    finally:
        for rank in ranks:
            rank.kill()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=at_least(2), default=2)
    parser.add_argument("--rate", default="1gbit", help="of each host's link")
    add_sizes(parser, 4, 64 << 20, 4)
    parser.add_argument("--rounds", type=at_least(1), default=3, help="jobs of each medium")
    parser.add_argument("--turn-ms", type=above_zero, default=100.0, help="how long a size is measured in a job")
    parser.add_argument("--timeout", type=above_zero, default=300.0, help="of a job, in seconds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    check_sizes(parser, args, allows_empty=False)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    sizes = message_sizes(args)
    seconds: dict[str, dict[int, list[float]]] = {medium: {size: [] for size in sizes} for medium in ("mpi", "ucx")}
    with lab_for("media", args.hosts, args.rate) as lab, tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for medium, by_size in seconds.items():
                output = Path(folder) / "result.json"
                command = [sys.executable, __file__, "rank", str(output), json.dumps(sizes), str(args.turn_ms)]
                job(lab, medium, command, args.hosts, args.timeout)
                result = json.loads(output.read_text())
                assert result["transports"] == [medium], result
                for size in sizes:
                    by_size[size].append(result["seconds"][str(size)])
    print(f"{args.hosts} hosts, {args.rate}, float32 sum, microseconds\n\n| size | MPI | UCX | MPI / UCX |")
    print("| --- | ---: | ---: | ---: |")
    for size in sizes:
        mpi, ucx = (1e6 * median(seconds[medium][size]) for medium in ("mpi", "ucx"))
        print(f"| {format_size(size)} | {mpi:,.0f} | {ucx:,.0f} | {mpi / ucx:.2f} |")
    if args.json:
        args.json.write_text(json.dumps({"hosts": args.hosts, "rate": args.rate, "seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(sys.argv[2], json.loads(sys.argv[3]), float(sys.argv[4]))
    else:
        main()
