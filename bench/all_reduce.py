"""All-reduce latency and bandwidth, in the conventions of nccl-tests.

    mpirun -n 2 --bind-to core python bench/all_reduce.py -b 8 -e 128M -f 2
    mpirun -n 2 --bind-to core python bench/all_reduce.py --peer mpi4py --peer gloo --json result.json

Time is the largest, over the ranks, of the rank's median call. algbw = size / time; busbw = algbw * 2(n-1)/n, the rate
at which the busiest link works, comparable over numbers of ranks. The columns of a row are measured in turns, so that
whatever else the machine does hits them alike.
"""  # fmt: skip

import argparse
import json
import os
import statistics
import sys
import time

import table
import torch
from arguments import DTYPE_BYTES, message_sizes, parse
from engines import PEER_CALLS, Call, Pair, Pool, dcoll_core, dcoll_python, peer_pair
from environment import describe, header, last_level_cache_bytes
from verify import Pattern, max_ranks

import dcoll

ROUNDS = 5  # turns that each column gets per row
BUDGET_S = 0.2  # of each column and row, when -n is 0
MEMORY = {"0": ["plain"], "1": ["mapped"], "both": ["plain", "mapped"]}


def join_job(args: argparse.Namespace) -> None:
    """dcoll.init(), with what the arguments need done before it."""
    if "mpi4py" in args.peer:
        from mpi4py import MPI  # noqa: F401  (it asks MPI for the thread level that sharing MPI with dcoll takes)
    if args.algo:
        os.environ["DCOLL_ALGO"] = args.algo
    try:
        dcoll.init()
    except dcoll.ArgumentError as error:
        raise SystemExit(f"all_reduce: {error}") from None
    limit = max_ranks(args.op, getattr(torch, args.datatype))
    if args.check and dcoll.size() > limit:
        raise SystemExit(
            f"all_reduce: sums in {args.datatype} can be checked exactly for up to {limit} ranks, not "
            f"{dcoll.size()}: pass -c 0 or another -t"
        )


def say(text: str) -> None:
    if dcoll.rank() == 0:
        print(text, flush=True)


class Bench:
    """The buffers and calls of one run; measure() fills one row."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.size = args, dcoll.size()
        dtype = getattr(torch, args.datatype)
        self.pattern = Pattern(dtype, args.op, dcoll.rank(), self.size) if args.check else None
        self.call = dcoll_core(args.op) if args.call == "core" else dcoll_python(args.op)
        self.peers = {name: PEER_CALLS[name](args.op) for name in args.peer}
        memories = set(MEMORY[args.mapped]) | ({"plain"} if self.peers else set())
        cache = last_level_cache_bytes()
        self.pools = {name: Pool(args.maxbytes, cache, dtype, name == "mapped") for name in sorted(memories)}

    def columns(self, memory: str, nbytes: int) -> dict[str, tuple[Call, list[Pair]]]:
        """Everything that is timed for one row: the call and the buffers it goes round."""
        pairs = self.pools[memory].pairs(nbytes)
        columns = {
            "out_of_place": (self.call, pairs),
            "in_place": (self.call, [(target, target) for _, target in pairs]),
        }
        for name, call in self.peers.items():
            columns[name] = (call, [peer_pair(name, target) for _, target in self.pools["plain"].pairs(nbytes)])
        return columns

    def count_wrong(self, memory: str, nbytes: int) -> dict[str, int]:
        """Elements that differ from the exact result on this rank, on the first and the last buffer."""
        wrong = {"out_of_place": 0, "in_place": 0}
        if self.pattern is None:
            return wrong
        pairs = self.pools[memory].pairs(nbytes)
        for source, target in (pairs[0], pairs[-1]):
            self.pattern.fill(source)
            result = self.call(source, target)
            wrong["out_of_place"] += self.pattern.count_wrong_results(result)
            wrong["out_of_place"] += self.pattern.count_changed_inputs(source)
            self.pattern.fill(target)
            self.call(target, target)
            wrong["in_place"] += self.pattern.count_wrong_results(target)
            source.fill_(0)
            target.fill_(0)
        return wrong

    def measure(self, memory: str, nbytes: int) -> table.Row:
        wrong = self.count_wrong(memory, nbytes)
        columns = self.columns(memory, nbytes)
        iters = {name: self.warm_up(call, pairs) for name, (call, pairs) in columns.items()}
        times: dict[str, list[float]] = {name: [] for name in columns}
        for turn in range(ROUNDS):
            for name, (call, pairs) in columns.items():
                share = iters[name] // ROUNDS + (turn < iters[name] % ROUNDS)
                dcoll.barrier()
                times[name] += time_calls(call, pairs, share, first=len(times[name]))
        gathered: list[tuple[dict[str, int], dict[str, list[float]]]] = dcoll.allgather_object((wrong, times))
        count = nbytes // DTYPE_BYTES[self.args.datatype]
        row: table.Row = {"size": nbytes, "count": count, "memory": memory}
        for name in columns:
            row[name] = self.summary(nbytes, [times_of_rank[name] for _, times_of_rank in gathered])
        for name in table.OWN_COLUMNS:
            row[name]["wrong"] = sum(wrong_of_rank[name] for wrong_of_rank, _ in gathered) if self.pattern else None
        for name in self.peers:
            row[name]["ratio"] = row[name]["time_us"] / row["in_place"]["time_us"]
        return row

    def warm_up(self, call: Call, pairs: list[Pair]) -> int:
        """Returns how many calls to time; rank 0 decides, because all ranks must make the same number."""
        calls = max(self.args.warmup_iters, 0 if self.args.iters else 2)
        dcoll.barrier()
        times = time_calls(call, pairs, calls, first=0)
        if self.args.iters:
            return int(self.args.iters)
        fit = BUDGET_S / max(statistics.median(times), 1e-7)
        return int(dcoll.broadcast_object(int(min(max(fit, 20), 2000)), root_rank=0))

    def summary(self, nbytes: int, per_rank: list[list[float]]) -> dict[str, object]:
        medians = [statistics.median(times) for times in per_rank]
        algbw = nbytes / max(medians) / 1e9
        return {
            "time_us": max(medians) * 1e6,
            "algbw": algbw,
            "busbw": algbw * 2 * (self.size - 1) / self.size,
            "iters": len(per_rank[0]),
            "median_us_of_rank": [1e6 * value for value in medians],
            "mean_us_of_rank": [1e6 * statistics.fmean(times) for times in per_rank],
            "min_us_of_rank": [1e6 * min(times) for times in per_rank],
        }


def time_calls(call: Call, pairs: list[Pair], count: int, first: int) -> list[float]:
    """Seconds of each of `count` calls, going round the buffers from where the last turn stopped."""
    clock, times = time.perf_counter, []
    for number in range(first, first + count):
        source, target = pairs[number % len(pairs)]
        start = clock()
        call(source, target)
        times.append(clock() - start)
    return times


def main() -> int:
    args = parse()
    torch.set_num_threads(1)  # a rank is one thread on one core, as in training
    join_job(args)
    environment = describe()
    say(header(environment))
    bench = Bench(args)
    say(table.head(args))
    rows = []
    for nbytes in message_sizes(args):
        for memory in MEMORY[args.mapped]:
            rows.append(bench.measure(memory, nbytes))
            say(table.line(rows[-1], args))
    say(table.footer(rows, args))
    if args.json and dcoll.rank() == 0:
        arguments = {name: value for name, value in vars(args).items() if name != "json"}
        document = {"environment": environment, "arguments": arguments, "rows": rows}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if table.count_wrong(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
