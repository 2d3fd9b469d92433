"""What the doctor found."""

import textwrap
from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad it is."""

    FINE = "ok"
    NOTE = "note"  # works, but less well than it could
    BROKEN = "BROKEN"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. advice: what to do, when it is not fine."""

    level: Level
    what: str
    found: str
    advice: str = ""


def fine(what: str, found: str) -> Finding:
    return Finding(Level.FINE, what, found)


def note(what: str, found: str, advice: str) -> Finding:
    return Finding(Level.NOTE, what, found, advice)


def broken(what: str, found: str, advice: str) -> Finding:
    return Finding(Level.BROKEN, what, found, advice)


def report(findings: list[Finding]) -> str:
    """A line for each, the advice below it, and a verdict."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level.value:>6}  {finding.what}: {finding.found}")
        if finding.advice:
            lines += textwrap.wrap(
                finding.advice, 112, initial_indent=" " * 8 + "-> ", subsequent_indent=" " * 11,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
    count = sum(finding.level is Level.BROKEN for finding in findings)
    notes = sum(finding.level is Level.NOTE for finding in findings)
    verdict = f"{count} broken" if count else "dcoll can work here"
    lines.append(f"\n{verdict}, {notes} note{'s' * (notes != 1)}.")
    return "\n".join(lines)
