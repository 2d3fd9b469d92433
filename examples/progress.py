"""What a training script shows while it runs: a bar on a terminal, plain lines anywhere else."""

import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.progress


def terminal_width() -> int:
    """Columns of the terminal the user looks at; 0 when the output goes to a file or a pipe.

    Open MPI gives every rank a pseudo-terminal of size 0x0, so isatty() is true even when mpirun's own output is piped.
    What counts is where mpirun (our parent on the first node) writes to.
    """
    try:
        if "OMPI_COMM_WORLD_RANK" not in os.environ:
            return os.get_terminal_size(sys.stdout.fileno()).columns
        terminal = os.open(f"/proc/{os.getppid()}/fd/1", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            return os.get_terminal_size(terminal).columns
        finally:
            os.close(terminal)
    except (OSError, ValueError):
        return 0


class Progress:
    """`with Progress("bar", total) as p: p.advance(text)`. Kinds: auto, bar, lines, off.

    lines prints what milestone() is given; bar keeps one line up to date and prints nothing else.
    """

    REFRESH_S = 0.1

    def __init__(self, kind: str, total: int, done: int = 0) -> None:
        width = terminal_width()
        if kind == "auto":
            kind = "bar" if width else "lines"
        self.kind = kind
        self._bar = _rich_bar(total, done, width or 80) if kind == "bar" else None
        if kind == "bar" and self._bar is None:
            self.kind = "lines"  # rich is not installed
        self._drawn_at = 0.0

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar:
            self._bar.refresh()
            self._bar.stop()

    def advance(self, text: str) -> None:
        """One step is done."""
        if self._bar:
            self._bar.update(self._bar.task_ids[0], advance=1, description=text)
            now = time.monotonic()
            # Drawn here, not by a thread that would compete for the rank's core.
            if now - self._drawn_at > self.REFRESH_S:
                self._drawn_at = now
                self._bar.refresh()

    def milestone(self, text: str) -> None:
        """Something worth a line of its own when there is no bar."""
        if self.kind == "lines":
            print(text, flush=True)


def _rich_bar(total: int, done: int, width: int) -> "rich.progress.Progress | None":
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
        TimeRemainingColumn(),
        console=Console(force_terminal=True, width=width),
        auto_refresh=False,
    )
    bar.add_task("", total=total, completed=done)
    return bar
