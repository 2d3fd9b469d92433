"""start_timeline, stop_timeline: what the collectives of this job spend their time on, as a file for Perfetto."""

import os

from dcoll import _C
from dcoll.job.world import communicator


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin a timeline (Chrome trace) of all operations, in `file_path`; open it in https://ui.perfetto.dev.

    file_path: rank 0 alone writes it. With {rank} in it every rank writes a file of its own, and
    `python -m dcoll timeline all.json trace.*.json` makes one of them. The file before, if any, is ended.
    mark_cycles: draw a line where each backward pass brings its first gradient. (Horovod marks the cycles of its
    background thread; there are none here.)
    """
    _C.start_timeline(communicator(), os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """Write what is left of the timeline and close its file. Does nothing when there is none."""
    _C.stop_timeline(communicator())
