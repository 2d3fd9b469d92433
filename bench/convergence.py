"""Does compression hurt training? The same training by each method, several seeds, and the loss on data held out.

    python bench/convergence.py --json c.json --markdown c.md --plot c.png
    python bench/convergence.py --tasks gpt --methods none,int8 --seeds 2 --json c.json
    python bench/convergence.py --json c.json --resume                # what c.json lacks; methods can be added so

Not under mpirun: this process starts a job for each task, which trains again and again. digits: the convnet of
examples/train_digits.py; gpt: a small GPT of examples/train_gpt.py, AdamW. A seed gives the weights and the order of
the samples, the same for every method; nothing else differs. DCOLL_COMPRESS_LOCAL=1 lets the ranks of one machine
encode for each other as nodes do, buckets of every size.

A method's difference is that of the means, in % of plain's; beside it the standard error, from the differences of the
same seed. "Within plain's spread": by no more than the standard deviation of plain's losses over the seeds. "Within
1 %": not worse by more.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arguments import at_least
from convergence_methods import METHODS, PLAIN
from convergence_plot import plot
from interleaved.engines import Unavailable, by_mpirun
from interleaved.machine import describe_machine
from interleaved.report import table

TASKS = {"digits": "handwritten digits, convnet, SGD with momentum", "gpt": "byte-level GPT, AdamW"}
WITH_ADAMW = "gpt"
JOB = Path(__file__).resolve().with_name("convergence_job.py")
MOST_RANKS = 64  # the digits are few
CLOSE = 0.01  # of plain's loss

Run = dict[str, Any]


def names_of(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(filter(None, text.split(","))))
        unknown = [name for name in names if name not in allowed]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'no name'}: allowed are {', '.join(allowed)}")
        return names

    return parse


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tasks", type=names_of(list(TASKS)), default=list(TASKS), metavar="A,B", help=f"of {', '.join(TASKS)} "
        "(default: all)")  # fmt: skip
    add("--methods", type=names_of(list(METHODS)), default=list(METHODS), metavar="A,B", help="of "
        f"{', '.join(METHODS)} (default: all)")  # fmt: skip
    add("--seeds", type=at_least(1), default=5, metavar="N", help="runs of each method (default 5)")
    add("--steps-digits", type=at_least(1), default=250, metavar="N", help="steps of a run (default 250)")
    add("--steps-gpt", type=at_least(1), default=150, metavar="N", help="steps of a run (default 150)")
    add("--ranks", type=at_least(2), default=4, metavar="N", help="processes of a job (default 4)")
    add("--resume", action="store_true", help="keep the runs in --json's file, which is written after each")
    for name in ("json", "markdown", "plot"):
        add(f"--{name}", type=Path, metavar="FILE", help=f"write the {name} there")
    args = parser.parse_args(argv)
    if args.ranks > MOST_RANKS:
        parser.error(f"--ranks {args.ranks}: allowed is at most {MOST_RANKS}")
    if args.resume and not args.json:
        parser.error("--resume needs --json FILE, which has the runs so far")
    if not any(methods_for(task, args.methods) for task in args.tasks):
        parser.error(f"--methods {','.join(args.methods)}: of --tasks {WITH_ADAMW} alone, which has AdamW")
    return args


def new_document(args: argparse.Namespace) -> dict[str, Any]:
    """What there is before the first run; with --resume the runs of before."""
    settings = {"ranks": args.ranks, "steps": {"digits": args.steps_digits, "gpt": args.steps_gpt}}
    environment = describe_machine() | {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    document = {"environment": environment, "command": " ".join(sys.argv), **settings, "runs": []}
    if args.resume and args.json.exists():
        before = json.loads(args.json.read_text())
        found = {name: before.get(name) for name in settings}
        if found != settings:
            raise SystemExit(
                f"convergence: {args.json} is of {found}, not of {settings}: give the same, or another file"
            )
        document["runs"] = before["runs"]
    return document


def save(document: dict[str, Any], path: Path | None) -> None:
    """An interruption leaves the previous file whole."""
    if path:
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(document, indent=1) + "\n")
        partial.rename(path)


def methods_for(task: str, methods: list[str]) -> list[str]:
    return [name for name in methods if task == WITH_ADAMW or not METHODS[name].needs_adamw]


def missing_runs(args: argparse.Namespace, task: str, runs: list[Run]) -> list[tuple[str, int]]:
    """Seed by seed, so that an interrupted run has about as many of each method."""
    done = {(run["method"], run["seed"]) for run in runs if run["task"] == task}
    wanted = [(method, seed) for seed in range(args.seeds) for method in methods_for(task, args.methods)]
    return [one for one in wanted if one not in done]


def train(args: argparse.Namespace, task: str, missing: list[tuple[str, int]], steps: int) -> Iterator[Run]:
    """The runs of a job, as they end."""
    plan = {"task": task, "steps": steps, "runs": missing}
    launch = by_mpirun([sys.executable, str(JOB), json.dumps(plan)], args.ranks)
    environment = launch.environments[0] | {"DCOLL_COMPRESS_LOCAL": "1"}
    job = subprocess.Popen(launch.commands[0], env=environment, stdout=subprocess.PIPE, text=True)
    assert job.stdout
    try:
        for line in job.stdout:
            if line.startswith("{"):
                yield json.loads(line)
            else:
                print(line, end="", file=sys.stderr)
        if job.wait() != 0:
            raise SystemExit(
                f"convergence: the job of {task} ended with {job.returncode}; --resume goes on from --json"
            )
    finally:
        job.terminate()  # mpirun ends its ranks
        job.wait()


def measure(args: argparse.Namespace, document: dict[str, Any]) -> None:
    for task in args.tasks:
        missing = missing_runs(args, task, document["runs"])
        if not missing:
            continue
        for number, run in enumerate(train(args, task, missing, document["steps"][task])):
            document["runs"].append(run)
            document["summary"] = summarize(document["runs"])
            save(document, args.json)
            print(f"{task} {number + 1} of {len(missing)}: {run['method']}, seed {run['seed']}: loss "
                  f"{run['loss']:.4f}, {run['seconds']:.1f} s", file=sys.stderr, flush=True)  # fmt: skip


def deviation(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def summarize(runs: list[Run]) -> dict[str, list[dict[str, Any]]]:
    """Per task a row for each method; differences over the seeds that the method and plain both have."""
    summary: dict[str, list[dict[str, Any]]] = {}
    for task in TASKS:
        by_method = {name: {r["seed"]: r for r in runs if (r["task"], r["method"]) == (task, name)} for name in METHODS}
        plain = {seed: run["loss"] for seed, run in by_method[PLAIN].items()}
        rows = [summarize_method(name, found, plain) for name, found in by_method.items() if found]
        if rows:
            summary[task] = rows
    return summary


def summarize_method(name: str, runs: dict[int, Run], plain: dict[int, float]) -> dict[str, Any]:
    losses, seconds = [run["loss"] for run in runs.values()], [run["seconds"] for run in runs.values()]
    row: dict[str, Any] = {
        "method": name, "runs": len(runs), "loss": statistics.fmean(losses), "deviation": deviation(losses),
        "least": min(losses), "greatest": max(losses), "seconds": statistics.median(seconds),
        "ranks_agree": all(run["ranks_agree"] for run in runs.values()),
        "options": ", ".join(f"{key} {value}" for key, value in next(iter(runs.values())).get("options", {}).items()),
    }  # fmt: skip
    if all("accuracy" in run for run in runs.values()):
        row["accuracy"] = statistics.fmean(run["accuracy"] for run in runs.values())
    shared = sorted(set(runs) & set(plain))
    if name == PLAIN or not shared:
        return row
    differences = [runs[seed]["loss"] - plain[seed] for seed in shared]
    base, spread = statistics.fmean(plain[seed] for seed in shared), deviation([plain[seed] for seed in shared])
    difference, error = statistics.fmean(differences), deviation(differences)
    row["difference"] = difference / base
    row["standard_error"] = None if error is None else error / math.sqrt(len(shared)) / base
    row["within_spread"] = None if spread is None else abs(difference) <= spread
    row["within_1_percent"] = difference <= CLOSE * base
    return row


def yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def cells(row: dict[str, Any]) -> list[str]:
    def text(name: str, form: str) -> str:
        return "-" if row.get(name) is None else format(row[name], form)

    difference = text("difference", "+.2%")
    if row.get("standard_error") is not None:
        difference += f" ± {row['standard_error']:.2%}"
    return [
        row["method"], str(row["runs"]), text("loss", ".4f"), text("deviation", ".4f"),
        f"{row['least']:.4f} to {row['greatest']:.4f}", difference, yes(row.get("within_spread")),
        yes(row.get("within_1_percent")), text("accuracy", ".2%"), yes(row["ranks_agree"]), text("seconds", ".1f"),
    ]  # fmt: skip


def markdown(document: dict[str, Any]) -> str:
    header = ["method", "seeds", "final loss, mean", "deviation", "least to greatest", "difference from plain",
              "within plain's spread", "within 1 %", "accuracy", "ranks agree", "s per run"]  # fmt: skip
    parts = [
        f"Loss on data held out, {document['ranks']} ranks, every rank encoding as a node does. Deviation: the "
        "standard deviation over the seeds. Difference: of the means, ± its standard error from pairs of the same "
        "seed. Within plain's spread: by no more than plain's deviation. Within 1 %: not worse by more."
    ]
    for task, rows in document["summary"].items():
        parts += [f"{task} ({TASKS[task]}), {document['steps'][task]} steps:", table(header, [cells(r) for r in rows])]
        parts += [f"{r['method']}: {r['options']}." for r in rows if r.get("options")]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    document = new_document(args)
    try:
        measure(args, document)
    except Unavailable as reason:
        raise SystemExit(f"convergence: {reason}") from None
    document["summary"] = summarize(document["runs"])
    save(document, args.json)
    text = markdown(document)
    print(text, end="")
    if args.markdown:
        args.markdown.write_text(text)
    if args.plot:
        plot(document, TASKS, args.plot)
    return 0 if all(run["ranks_agree"] for run in document["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
