"""All-reduce between hosts: every algorithm of dcoll, Open MPI and Gloo in turns, beside the model's prediction and the
bound; or another collective, as chosen, beside the peers and the bound. Runs in a lab of network namespaces
(bench/netlab), so root is needed, and one machine is enough.

    python bench/network.py --hosts 4 --slots 1 --rate 1gbit --json r.json --markdown r.md --plot r.png

Bytes are those of a rank's larger buffer. The bound is what a node must send at the least, for an all-reduce 2(p-1)/p
of the buffer for p nodes, at the link's rate, Ethernet, IP and TCP headers included. Chosen is judged by the fastest
candidate, predicted by the chosen algorithm's measured time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import netlab
from arguments import above_zero, add_sizes, at_least, check_sizes, format_size, message_sizes
from lab import lab_for

HERE = Path(__file__).resolve().parent
HEADERS = 1514 / 1448  # on the wire per payload of a full frame
PORT = 29555
# What a node must send or receive at the least, of a rank's larger buffer, by the numbers of nodes and ranks per node.
CROSSING: dict[str, Callable[[int, int], float]] = {
    "all_reduce": lambda nodes, _: 2 * (nodes - 1) / nodes,
    "all_gather": lambda nodes, _: (nodes - 1) / nodes,
    "reduce_scatter": lambda nodes, _: (nodes - 1) / nodes,
    "broadcast": lambda nodes, _: 1.0,
    "all_to_all": lambda nodes, per_node: per_node * (nodes - 1) / nodes,
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collective", choices=CROSSING, default="all_reduce")
    parser.add_argument("--hosts", type=at_least(2), default=4)
    parser.add_argument("--slots", type=at_least(1), default=1, help="ranks per host")
    parser.add_argument("--rate", default="1gbit", help="of each host's link")
    add_sizes(parser, 4, 64 << 20, 4)
    parser.add_argument(
        "--rounds", type=at_least(1), default=5, help="turns of each column; up to 256 KiB thrice as many"
    )
    parser.add_argument("--turn-ms", type=above_zero, default=20.0, help="how long a turn lasts, at least one call")
    parser.add_argument("--columns", default="", help="only these, separated by commas: 'dcoll auto,dcoll ring,Gloo'")
    parser.add_argument("--timeout", type=at_least(1), default=900, help="seconds for the whole job")
    for kind in ("json", "markdown", "plot"):
        parser.add_argument(f"--{kind}", type=Path)
    args = parser.parse_args(argv)
    check_sizes(parser, args, allows_empty=False)
    return args


def run_job(args: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 wrote."""
    with lab_for("network", args.hosts, args.rate) as lab, tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        sizes = ",".join(map(str, message_sizes(args)))
        job = [
            *lab.launcher(str(args.slots)), sys.executable, str(HERE / "network_job.py"),
            str(output), sizes, str(args.rounds), str(args.turn_ms), lab.address(0), str(PORT),
            args.columns, args.collective,
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DCOLL_CALIBRATE": "force"}
        subprocess.run(job, env=environment, check=True, timeout=args.timeout)
        result: dict[str, Any] = json.loads(output.read_text())
    return result


def summarize(result: dict[str, Any], rate: str, collective: str) -> dict[str, Any]:
    """Medians in seconds per size and column, the bound, and how good choice and prediction were."""
    share = CROSSING[collective](result["nodes"], result["ranks_per_node"])
    per_byte = share * 8 * HEADERS / netlab.bits_per_second(rate)
    rows: list[dict[str, Any]] = []
    for size in sorted({size for _, size, _ in result["samples_s"]}):
        medians = {name: statistics.median(times) for name, at, times in result["samples_s"] if at == size}
        rows.append({"bytes": size, "median_s": medians, "bound_s": size * per_byte})
        if not result["predicted_s"]:
            continue
        own = {n.removeprefix("dcoll "): t for n, t in medians.items() if n.startswith("dcoll ")}
        predicted = result["predicted_s"][str(size)]
        chosen = next(iter(predicted))
        best = min((name for name in own if name != "auto"), key=own.__getitem__, default="auto")
        rows[-1] |= {
            "chosen": chosen, "best": best, "auto_over_best": own["auto"] / own[best],
            "predicted_s": predicted[chosen], "predicted_over_measured": predicted[chosen] / own["auto"],
        }  # fmt: skip
    if not result["predicted_s"]:
        return {"rows": rows}
    return {
        "rows": rows,
        "chosen_within_10_percent": sum(row["auto_over_best"] <= 1.10 for row in rows),
        "large_rows": sum(row["bytes"] >= 64 << 10 for row in rows),
        "predicted_within_20_percent": sum(
            abs(row["predicted_over_measured"] - 1) <= 0.20 for row in rows if row["bytes"] >= 64 << 10
        ),
    }


def markdown(document: dict[str, Any]) -> str:
    rows, result, summary = document["summary"]["rows"], document["result"], document["summary"]
    judged = "chosen" in rows[0]
    columns = [name for name in rows[0]["median_s"] if name != "dcoll auto"]
    more = ["chosen", "time over best", "predicted over measured"] if judged else ["bound over dcoll"]
    what = "float32 sum in place" if judged else "float32"
    lines = [
        f"{document['collective']}: {result['nodes']} hosts x {result['ranks_per_node']} ranks, links of "
        f"{document['rate']}, {what}; median ms of {document['rounds']} turns, up to 256 KiB of "
        f"{3 * document['rounds']}; {document['date']}; "
        f"constants {result['constants_source']}.",
        "",
        "| size | dcoll | bound | " + " | ".join(columns + more) + " |",
        "| --- |" + " ---: |" * (len(columns) + 2) + (" --- | ---: | ---: |" if judged else " ---: |"),
    ]
    for row in rows:
        times = [row["median_s"]["dcoll auto"], row["bound_s"], *(row["median_s"][name] for name in columns)]
        cells = [f"{1e3 * seconds:.3g}" for seconds in times]
        if judged:
            cells += [row["chosen"], f"{row['auto_over_best']:.2f}", f"{row['predicted_over_measured']:.2f}"]
        else:
            cells.append(f"{row['bound_s'] / row['median_s']['dcoll auto']:.2f}")
        lines.append(f"| {format_size(row['bytes'])} | " + " | ".join(cells) + " |")
    if judged:
        lines += [
            "",
            f"Chosen within 10 % of the fastest candidate: {summary['chosen_within_10_percent']} of {len(rows)} sizes. "
            f"Predicted within 20 % of measured, from 64 KiB: {summary['predicted_within_20_percent']} of "
            f"{summary['large_rows']}.",
        ]
    return "\n".join([*lines, ""])


def plot(document: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = document["summary"]["rows"]
    sizes = [row["bytes"] for row in rows]
    figure, axes = plt.subplots(figsize=(9, 6))
    for name in rows[0]["median_s"]:
        heavy = name in ("dcoll auto", "Open MPI", "Gloo")
        times = [1e3 * row["median_s"][name] for row in rows]
        axes.loglog(
            sizes, times, label=name, linewidth=2 if heavy else 0.8, marker="o" if heavy else None, markersize=4
        )
    if "predicted_s" in rows[0]:
        axes.loglog(sizes, [1e3 * row["predicted_s"] for row in rows], "k--", label="predicted", linewidth=1.2)
    axes.loglog(sizes, [1e3 * row["bound_s"] for row in rows], "k:", label="bound", linewidth=1.2)
    axes.set_ylim(bottom=0.5e3 * min(min(row["median_s"].values()) for row in rows))
    axes.set_xlabel("bytes")
    axes.set_ylabel("ms")
    result = document["result"]
    axes.set_title(
        f"{document['collective']}, {result['nodes']} hosts x {result['ranks_per_node']} ranks, {document['rate']}"
    )
    axes.grid(which="major", alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    result = run_job(args)
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "collective": args.collective, "rate": args.rate,
        "rounds": args.rounds, "cores": len(os.sched_getaffinity(0)), "result": result,
        "summary": summarize(result, args.rate, args.collective),
    }  # fmt: skip
    text = markdown(document)
    print(text)
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(text)
    if args.plot:
        plot(document, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
