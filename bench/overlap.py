"""What communication costs in training: the example GPT alone, with dcoll, with DDP over Gloo, in turns.

    python bench/overlap.py --json overlap.json
    python bench/overlap.py --rounds 40 --memory -- --batch 4        # what follows -- goes to examples/train_gpt.py
    python bench/overlap.py --model eighty --steps 20 -- --batch 4   # 80 parameters, 10.5 MB (bench/models.py)

Not under mpirun: this process starts four jobs, all alive, of which one runs at a time (see bench/peers.py). "none" is
the same training without communication, "barrier" that with a barrier at the end of backward: what ranks that wait for
each other cost, whatever they exchange. A step takes as long as its slowest rank; of "none", too, the slowest rank of
each step counts, which is what training with infinitely fast communication would take. Exposed is what a step takes
longer than that. CPU is what the threads of a rank use in a step, the mean of the ranks. Communication alone is the
time to reduce as many bytes while nothing else runs, measured in the same turn. Hidden is 1 - exposed / communication
alone, per round: the median, and the quartiles, which tell how much of it is noise. It may be below 0, where a step
loses more than communication alone takes (copies into buckets, threads that disturb each other), and above 100 %, where
noise exceeds what is exposed.
"""  # fmt: skip

import argparse
import json
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arguments import at_least
from interleaved.coordinator import Coordinator
from interleaved.engines import Unavailable, by_mpirun, worker_command
from interleaved.machine import cores_for, describe_machine
from interleaved.report import table
from models import MODELS

BACKENDS = ("none", "barrier", "dcoll", "ddp-gloo")
WARM_STEPS = 3  # dcoll orders its buckets after the first step, DDP builds its own again in the second


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="overlap.py", description="What communication costs in training, in turns.",
        epilog="What follows -- goes to examples/train_gpt.py, like -- --batch 4 --layers 3.",
    )  # fmt: skip
    add = parser.add_argument
    add("--model", choices=("gpt", *MODELS), default="gpt", help="the example GPT (default), 80 parameters or "
        "1,000 small ones, of which a row counts as a token")  # fmt: skip
    add("--ranks", type=at_least(1), default=2, metavar="N", help="processes of every job (default 2)")
    add("--rounds", type=at_least(1), default=20, metavar="N", help="turns of every job (default 20)")
    add("--steps", type=at_least(1), default=2, metavar="N", help="steps per turn (default 2)")
    add("--memory", action="store_true", help="measure peak memory too: each job once more, fresh and by itself")
    add("--deadline", type=at_least(1), default=120, metavar="S", help="a job that does not answer for so long is "
        "ended and reported (default 120)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write everything measured there")
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    args.training = argv[split + 1 :]
    return args


def start(coordinator: Coordinator, args: argparse.Namespace, jobs: dict[str, str]) -> None:
    """Start jobs: name -> backend."""
    for name, backend in jobs.items():
        options = {"backend": backend, "model": args.model, "arguments": args.training}
        command = worker_command(
            sys.executable,
            coordinator.socket_path,
            name,
            "training.Training",
            args.ranks,
            cores_for(args.ranks),
            options,
        )
        coordinator.launch(name, args.ranks, by_mpirun(command, args.ranks))
    coordinator.wait_ready(args.deadline)


def turn(coordinator: Coordinator, name: str, args: argparse.Namespace, steps: int) -> dict[str, float] | None:
    """Seconds per step of one turn of a job."""
    answers = coordinator.ask(name, {"do": "steps", "count": steps}, args.deadline)
    reduced = coordinator.ask(name, {"do": "communicate"}, args.deadline)
    if answers is None or reduced is None:
        return None
    return summarize_turn(answers, [answer["seconds"] for answer in reduced])


def summarize_turn(answers: list[dict[str, Any]], reduced: list[float]) -> dict[str, float]:
    steps = zip(*(answer["step_s"] for answer in answers), strict=True)
    count = len(answers[0]["step_s"])
    waited = [answer["waited_s"] / count for answer in answers if answer["waited_s"] is not None]
    return {
        "step_s": statistics.fmean(max(ranks) for ranks in steps),
        "cpu_s": statistics.fmean(answer["cpu_s"] / count for answer in answers),
        "alone_s": max(reduced),
        "waited_s": min(waited, default=0.0),  # the rank that waited least was late: its wait is communication
    }


def summarize(turns: dict[str, list[dict[str, float] | None]], tokens: int) -> dict[str, dict[str, Any]]:
    """Per job: medians over the turns; exposed and hidden from turns of the same round as one of "none"."""
    rows = {}
    for name, of_job in turns.items():
        found = [one for one in of_job if one]
        if not found:
            continue
        row: dict[str, Any] = {
            key: statistics.median(one[key] for one in found) for key in ("step_s", "cpu_s", "alone_s", "waited_s")
        }
        row["tokens_per_second"] = tokens / row["step_s"]
        pairs = [(one, free) for one, free in zip(of_job, turns.get("none", of_job), strict=True) if one and free]
        if name != "none" and "none" in turns and pairs:
            row["exposed_s"] = statistics.median(one["step_s"] - free["step_s"] for one, free in pairs)
            row["exposed_share"] = statistics.median(1 - free["step_s"] / one["step_s"] for one, free in pairs)
            shares = [
                1 - (one["step_s"] - free["step_s"]) / one["alone_s"] for one, free in pairs if one["alone_s"] > 0
            ]
            if shares:
                row["hidden_share"] = statistics.median(shares)
                row["hidden_quartiles"] = quartiles(shares)
        rows[name] = row
    return rows


def quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def hidden_cell(row: dict[str, Any]) -> str:
    if "hidden_share" not in row:
        return "-"
    low, high = row["hidden_quartiles"]
    return f"{row['hidden_share']:.0%} ({low:.0%} to {high:.0%})"


def overlap_table(rows: dict[str, dict[str, Any]]) -> str:
    header = ["job", "step, ms", "CPU, ms", "tokens/s", "exposed, ms", "exposed, % of step", "communication alone, ms",
              "hidden (quartiles)", "waited in backward, ms"]  # fmt: skip
    lines = []
    for name, row in rows.items():
        cells = [name, f"{1e3 * row['step_s']:.1f}", f"{1e3 * row['cpu_s']:.1f}", f"{row['tokens_per_second']:,.0f}"]
        if "exposed_s" in row:
            waited = f"{1e3 * row['waited_s']:.1f}" if name == "dcoll" else "not told"
            cells += [f"{1e3 * row['exposed_s']:.1f}", f"{row['exposed_share']:.1%}", f"{1e3 * row['alone_s']:.1f}",
                      hidden_cell(row), waited]  # fmt: skip
        lines.append(cells + ["-"] * (len(header) - len(cells)))
    return table(header, lines)


def measure_memory(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Each job fresh and by itself, WARM_STEPS steps, then what its ranks used at most."""
    memory, failures = {}, {}
    for backend in BACKENDS:
        with Coordinator() as coordinator:
            start(coordinator, args, {backend: backend})
            coordinator.ask(backend, {"do": "steps", "count": WARM_STEPS}, args.deadline)
            answers = coordinator.ask(backend, {"do": "memory"}, args.deadline)
            coordinator.stop()
            failures |= coordinator.failures
        if answers is not None:
            memory[backend] = {"per_rank": answers, "total_mb": sum(map(counted_once_kb, answers)) / 1024}
    return memory, failures


def counted_once_kb(rank: dict[str, Any]) -> float:
    """The peak resident set, with each page of shared memory counted once over the ranks that have it mapped."""
    return float(rank["peak_rss_kb"] - rank["rss_shmem_kb"] + rank["pss_shmem_kb"])


def memory_table(memory: dict[str, Any]) -> str:
    reference = memory.get("ddp-gloo", {}).get("total_mb")
    lines = []
    for name, found in memory.items():
        ranks = found["per_rank"]
        over = f"{found['total_mb'] / reference - 1:+.1%}" if reference else "-"
        lines.append([name, f"{found['total_mb']:,.0f}", over, f"{sum(r['peak_rss_kb'] for r in ranks) / 1024:,.0f}",
                      f"{sum(r['pss_shmem_kb'] for r in ranks) / 1024:,.0f}"])  # fmt: skip
    return table(["job", "total, MiB", "over DDP", "sum of peak RSS, MiB", "shared, counted once, MiB"], lines)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    turns: dict[str, list[dict[str, float] | None]] = {name: [] for name in BACKENDS}
    try:
        with Coordinator() as coordinator:
            start(coordinator, args, {name: name for name in BACKENDS})
            infos = {name: job.ready[0] for name, job in coordinator.jobs.items()}
            for name in BACKENDS:
                turn(coordinator, name, args, WARM_STEPS)
            for number in range(args.rounds):
                for name in BACKENDS:
                    turns[name].append(turn(coordinator, name, args, args.steps))
                print(f"\rround {number + 1} of {args.rounds}", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            coordinator.stop()
            failures = dict(coordinator.failures)
        if not infos:
            raise SystemExit("overlap: no job started: " + "; ".join(f"{job}: {why}" for job, why in failures.items()))
        memory, more_failures = measure_memory(args) if args.memory else ({}, {})
    except Unavailable as reason:
        raise SystemExit(f"overlap: {reason}") from None
    info = next(iter(infos.values()))
    rows = summarize(turns, info["tokens_per_rank_and_step"] * args.ranks)
    print(
        f"{info['parameters'] / 1e6:.1f} M parameters, {args.ranks} ranks, {args.rounds} turns of {args.steps} steps\n"
    )
    print(overlap_table(rows))
    if memory:
        print(
            f"\nPeak memory of the job after {WARM_STEPS} steps. Total: the ranks' peak resident sets (VmHWM), "
            f"with each page\nof shared memory counted once (Pss of /proc/self/smaps_rollup).\n\n{memory_table(memory)}"
        )
    for name, reason in (failures | more_failures).items():
        print(f"{name}: left out: {reason}")
    if args.json:
        environment = describe_machine() | info | {"date": datetime.now(UTC).isoformat(timespec="seconds")}
        document = {
            "environment": environment, "command": " ".join(sys.argv), "jobs": rows, "turns": turns, "memory": memory,
            "left_out": failures | more_failures,
        }  # fmt: skip
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if failures or more_failures else 0


if __name__ == "__main__":
    sys.exit(main())
