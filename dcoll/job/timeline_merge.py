"""`python -m dcoll timeline all.json trace.0.json trace.1.json`: one timeline of those of several ranks."""

import json
import statistics
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Key = tuple[int, int, str]  # of an operation: communicator, number, name


def merge(paths: list[Path]) -> list[Event]:
    """The events of all files, the clocks of nodes brought together."""
    files = [_read(path) for path in paths]
    by_node: dict[int, list[dict[Key, tuple[float, float]]]] = {}
    for events in files:
        by_node.setdefault(_node(events), []).append(agreements(events))
    nodes = sorted(by_node)
    merged: list[Event] = []
    shifts = {node: shift(by_node[nodes[0]], by_node[node]) if node != nodes[0] else 0.0 for node in nodes}
    for events in files:
        by = shifts[_node(events)]
        merged += [event | {"ts": round(event["ts"] + by, 3)} if "ts" in event and by else event for event in events]
    return merged


def _read(path: Path) -> list[Event]:
    try:
        events = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"dcoll timeline: {path} cannot be read: {error}") from None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise SystemExit(f"dcoll timeline: {path} is no timeline of dcoll")
    return events


def _node(events: list[Event]) -> int:
    return next((int(event["args"]["node"]) for event in events if event.get("name") == "timeline begins"), 0)


def agreements(events: list[Event]) -> dict[Key, tuple[float, float]]:
    """Of each operation: when this rank entered it, and when it knew that every rank had."""
    found: dict[Key, tuple[float, float]] = {}
    key: Key | None = None
    for event in events:
        args = event.get("args", {})
        if event.get("cat") == "operation":
            key = args["communicator"], args["number"], args["name"]
        elif event.get("cat") == "negotiation" and key is not None:
            found[key] = event["ts"], event["ts"] + event["dur"]
    return found


def shift(reference: list[dict[Key, tuple[float, float]]], other: list[dict[Key, tuple[float, float]]]) -> float:
    """What to add to the other node's times.

    No rank knows that all have entered before the last has: every operation bounds the difference of the clocks from
    both sides, by the latency of its agreement at best. Clocks drift, so bounds that cross are averaged.
    """
    shared = [(mine[key], theirs[key]) for mine in reference for theirs in other for key in mine.keys() & theirs.keys()]
    lows = [entered - all_had for (entered, _), (_, all_had) in shared]
    highs = [all_had - entered for (_, all_had), (entered, _) in shared]
    if not lows:
        return 0.0
    low, high = max(lows), min(highs)
    if low <= high:
        return min(max(0.0, low), high)  # as the clocks say, where that is possible
    return statistics.median((a + b) / 2 for a, b in zip(lows, highs, strict=True))


def write(output: Path, paths: list[Path]) -> None:
    """The merged timeline, an event a line."""
    output.write_text("[\n" + ",\n".join(json.dumps(event) for event in merge(paths)) + "\n]\n")
