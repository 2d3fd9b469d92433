"""Where the user's program is: for the report of a stall (DCOLL_STALL_CHECK_TIME)."""

import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

_HERE = str(Path(__file__).parents[1])
_FRAMEWORKS = ("torch.", "numpy.")
MOST_FRAMES = 8


def stack(thread: int = 0) -> str:
    """The user's own line, and then the innermost frames that are not dcoll's, one per line: "file:line in function".

    thread: its identifier; 0, or one that has ended: the main thread.
    """
    frames = sys._current_frames()
    innermost = frames.get(thread) or frames.get(threading.main_thread().ident or 0)
    if innermost is None:
        return "a program without a main thread"
    theirs = [frame for frame, _ in traceback.walk_stack(innermost) if not frame.f_code.co_filename.startswith(_HERE)]
    own = [frame for frame in theirs if not f"{frame.f_globals.get('__name__')}.".startswith(_FRAMEWORKS)]
    lines = [_describe(frame) for frame in (own[:1] or theirs[:1] or [innermost])]
    lines += [_describe(frame) for frame in theirs[:MOST_FRAMES]]
    return "\n".join(lines)


def _describe(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
