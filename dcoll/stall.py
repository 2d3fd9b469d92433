"""Where the user's program waits: for the report of a stall (DCOLL_STALL_CHECK_TIME)."""

import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)


def place() -> str:
    """The file, line and function of the innermost frame that is not dcoll's own."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
