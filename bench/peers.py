"""dcoll and its peers, all-reduce in turns: times, paired ratios, a plot.

    python bench/peers.py --ranks 2 --markdown peers.md --plot peers.png      # everything that is installed
    python bench/peers.py --engines dcoll,mpi4py -b 4 -e 1M --rounds 50

Not under mpirun: this process starts each engine as a job of its own, ranks pinned to the same cores, and lets one job
at a time run for about 50 ms while all others sleep. A round gives every engine a turn at every size. So whatever the
machine does in a second (frequency, neighbours, a hypervisor that moves the cores) hits all engines alike, and ratios
are taken between turns of the same round. Every engine's result is checked once per size, exactly.
"""  # fmt: skip

import argparse
import json
import math
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arguments import add_sizes, at_least, check_sizes, message_sizes, parse_dtype
from interleaved import report
from interleaved.coordinator import Coordinator
from interleaved.engines import ENGINES, Engine, Setup, Unavailable
from interleaved.machine import cores_for, describe_machine

ROOT = Path(__file__).resolve().parents[1]
MAX_CALLS = 5000  # per turn
BATCH_S = 20e-6  # what is shorter is timed several calls at once: a clock around each costs a small one a third
SETTLE_SHARE = 0.25  # of a turn goes to calls before the timed ones: caches refill after the other engines' turns


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="peers.py", description="dcoll and its peers, all-reduce in turns.")
    add = parser.add_argument
    add("--ranks", type=at_least(1), default=2, metavar="N", help="processes of every engine (default 2)")
    add_sizes(parser, 4, 64 << 20, 4)
    add("-t", "--dtype", type=parse_dtype, default="float32", dest="datatype", help="element type (default float32)")
    add("--engines", default=",".join(ENGINES), metavar="A,B", help=f"of {', '.join(ENGINES)} (default: all)")
    add("--rounds", type=at_least(1), default=15, metavar="N", help="turns per engine and size (default 15)")
    add("--seconds", type=at_least(1), default=0, metavar="S", help="begin no further round after so long (default: no "
        "limit)")  # fmt: skip
    add("--turn-ms", type=at_least(1), default=50, metavar="MS", help="how long a turn should be (default 50)")
    add("--rotate", action="store_true", help="go round buffers that exceed the caches, as bench/all_reduce.py does, "
        "instead of using the same one again and again")  # fmt: skip
    add("--deadline", type=at_least(1), default=60, metavar="S", help="an engine that does not answer for so long is "
        "ended and reported (default 60)")  # fmt: skip
    add("--venvs", type=Path, default=ROOT / "build" / "peers", metavar="DIR", help="the peers' virtual environments, "
        "from `make bench-peers` (default build/peers)")  # fmt: skip
    for name in ("json", "markdown", "plot"):
        add(f"--{name}", type=Path, metavar="FILE", help=f"write the {name} there")
    args = parser.parse_args(argv)
    args.engines = list(dict.fromkeys(filter(None, args.engines.split(","))))
    unknown = [name for name in args.engines if name not in ENGINES]
    if unknown or not args.engines:
        parser.error(f"--engines has {', '.join(unknown) or 'no name'}: allowed are {', '.join(ENGINES)}")
    check_sizes(parser, args, allows_empty=False)
    return args


class Run:
    """The samples of one run, as they come in."""

    def __init__(self, args: argparse.Namespace, coordinator: Coordinator) -> None:
        self.args, self.coordinator, self.sizes = args, coordinator, message_sizes(args)
        self.columns: dict[str, tuple[Engine, str]] = {}
        self.samples: report.Samples = {}
        self.wrong: dict[str, dict[int, int]] = {}
        self.call_s: dict[tuple[str, int], float] = {}

    def start(self, setup: Setup) -> None:
        """Start every engine that is here; why one is not goes to the coordinator's failures."""
        for name in self.args.engines:
            engine = ENGINES[name]
            if setup.dtype not in engine.dtypes:
                self.coordinator.failures[name] = f"no {setup.dtype}: it has {', '.join(engine.dtypes)}"
                continue
            try:
                self.coordinator.launch(name, setup.ranks, engine.launch(engine, setup))
            except Unavailable as reason:
                self.coordinator.failures[name] = str(reason)
        self.coordinator.wait_ready(self.args.deadline)
        for name in self.coordinator.jobs:
            self.columns |= {column: (ENGINES[name], variant) for column, variant in ENGINES[name].columns.items()}
        self.samples = {size: {column: [] for column in self.columns} for size in self.sizes}

    def check(self) -> None:
        """Every column's result at every size, then a few calls to learn how long one takes."""
        for size in self.sizes:
            for column, (engine, variant) in self.columns.items():
                request = {"do": "check", "variant": variant, "bytes": size}
                answers = self.coordinator.ask(engine.name, request, self.args.deadline)
                wrong = sum(answer["wrong"] for answer in answers or [])
                if wrong:
                    self.wrong.setdefault(column, {})[size] = wrong
                for calls in (2, 10):
                    if self.call_s.get((column, size), 0.0) < 1e-3:
                        self.turn(column, size, 1, calls)

    def turn(self, column: str, size: int, warm: int, calls: int) -> float | None:
        engine, variant = self.columns[column]
        call_s = max(self.call_s.get((column, size), BATCH_S), 1e-7)
        batch = min(max(math.ceil(BATCH_S / call_s), 1), calls)
        request = {"do": "turn", "variant": variant, "bytes": size, "warm": warm, "calls": calls, "batch": batch}
        answers = self.coordinator.ask(engine.name, request, self.args.deadline)
        if answers is None:
            return None
        seconds: float = max(answer["median_s"] for answer in answers)
        self.call_s[column, size] = seconds
        return seconds

    def measure(self) -> int:
        """Rounds of turns; returns how many there were."""
        begin = time.monotonic()
        for number in range(self.args.rounds):
            if number and self.args.seconds and time.monotonic() - begin > self.args.seconds:
                print(file=sys.stderr)
                return number
            for size in self.sizes:
                for column in self.columns:
                    fit = 1e-3 * self.args.turn_ms / max(self.call_s.get((column, size), 1.0), 1e-7)
                    warm = min(max(math.ceil(SETTLE_SHARE * fit), 1), MAX_CALLS)
                    calls = min(max(round((1 - SETTLE_SHARE) * fit), 1), MAX_CALLS)
                    self.samples[size][column].append(self.turn(column, size, warm, calls))
            print(f"\rround {number + 1} of {self.args.rounds}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return self.args.rounds

    def kind(self, column: str) -> str:
        engine, _ = self.columns[column]
        return "own" if engine.name == "dcoll" else "peer" if engine.is_peer else "limit"

    def label(self, column: str, infos: dict[str, dict[str, Any]]) -> str:
        name = self.columns[column][0].name
        if self.kind(column) != "peer":
            return column
        return str(infos[name]["label"]) if name in infos else column


def document(
    run: Run, setup: Setup, rounds: int, infos: dict[str, dict[str, Any]], last: dict[str, Any]
) -> dict[str, Any]:
    """Everything about the run, as plain data."""
    names = {kind: [c for c in run.columns if run.kind(c) == kind] for kind in ("own", "peer")}
    idle = {name: max(a["idle_cpu_s"] / max(a["idle_wall_s"], 1e-9) for a in answers) for name, answers in last.items()}
    environment = infos.get("dcoll", {}).get("environment", {}) | describe_machine()
    environment["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    environment["command"] = " ".join(sys.argv)
    return {
        "environment": environment,
        "arguments": {
            "ranks": setup.ranks, "cpus": list(setup.cpus), "dtype": setup.dtype, "rounds": rounds,
            "turn_s": 1e-3 * run.args.turn_ms, "rotate": run.args.rotate, "engines": run.args.engines,
        },
        "columns": {
            column: {"engine": engine.name, "kind": run.kind(column), "label": run.label(column, infos),
                     "what": engine.title}
            for column, (engine, _) in run.columns.items()
        },
        "rows": report.summarize(run.samples, names["own"], names["peer"]),
        "left_out": run.coordinator.failures,
        "wrong": run.wrong,
        "idle_cpu_share": idle,
        "samples_s": run.samples,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    cache = describe_machine()["last_level_cache_bytes"] if args.rotate else 0
    with Coordinator() as coordinator:
        setup = Setup(args.ranks, cores_for(args.ranks), args.datatype, args.maxbytes, cache, coordinator.socket_path,
                      args.venvs.resolve(), ROOT / "build" / "bench")  # fmt: skip
        run = Run(args, coordinator)
        run.start(setup)
        infos = {name: job.ready[0] for name, job in coordinator.jobs.items()}
        for name, reason in coordinator.failures.items():
            print(f"{name}: left out: {reason}", file=sys.stderr)
        if not run.columns:
            raise SystemExit("peers: no engine is left to measure")
        run.check()
        rounds = run.measure()
        result = document(run, setup, rounds, infos, coordinator.stop())
    text = report.markdown(result)
    print(text, end="")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(text)
    if args.plot:
        from interleaved.plot import plot

        plot(result, args.plot)
    return 1 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
