"""Which ends of a process count as failures (tests/mpi/test_mpi_faults.py: what they do to a job)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dcoll.errors import text_of

BEGIN = """
import os, sys
from dcoll.job import lifecycle

class Told:
    def fail(self, text, status):
        os.write(1, f"{text}, {status}".encode())

lifecycle._notice_exits(Told())

def leave(status):
    sys.exit(status)

"""
CAUGHT = "try:\n    leave(3)\nexcept SystemExit as error:\n    pass"
KEPT = CAUGHT.replace("pass", "kept = error")
CLEANED_UP = "try:\n    leave(3)\nfinally:\n    print(end='', flush=True)"
IN_ANOTHER_ERROR = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    leave(3)"
REPLACED = "try:\n    leave(3)\nexcept SystemExit:\n    os._exit(7)"
IN_ASYNCIO = "import asyncio\nasync def main():\n    leave(3)\nasyncio.run(main())"
IN_ARGPARSE = "import argparse\nargparse.ArgumentParser().parse_args(['--unknown'])"
IN_THREAD = "import threading\nthread = threading.Thread(target=leave, args=(3,))\nthread.start()\nthread.join()"
RAW_THREAD = "import _thread, time\n_thread.start_new_thread(sys.exit, (3,))\ntime.sleep(0.3)"


@pytest.mark.parametrize(
    ("code", "told", "status"),
    [
        ("sys.exit(3)", "SystemExit: 3, 3", 3),
        ("leave('no data')", "SystemExit: no data, 1", 1),
        ("exit(3)", "SystemExit: 3, 3", 3),
        ("leave('no \\udcff')", "SystemExit: no \\udcff, 1", 1),
        ("quit('no data')", "SystemExit: no data, 1", 1),
        (CLEANED_UP, "SystemExit: 3, 3", 3),
        (IN_ANOTHER_ERROR, "SystemExit: 3, 3", 3),
        (IN_ASYNCIO, "SystemExit: 3, 3", 3),
        (IN_ARGPARSE, "SystemExit: 2, 2", 2),
        ("leave(0)", "", 0),
        ("sys.exit()", "", 0),
        ("exit()", "", 0),
        (CAUGHT, "", 0),
        (KEPT, "", 0),
        (REPLACED, "", 7),
        (IN_THREAD, "", 0),
        (RAW_THREAD, "", 0),
    ],
)
def test_exits(code: str, told: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == (told, status), done.stderr


def test_any_error_has_a_text_that_ranks_can_be_told() -> None:
    class Textless(Exception):
        def __str__(self) -> str:
            raise KeyError

    assert text_of(Textless()) == "Textless"
    assert text_of(ValueError(os.fsdecode(b"caf\xe9"))) == "ValueError: caf\\udce9"


CLOSED = """
import os, sys
from pathlib import Path
for number in range(3):
    os.close(number)
import dcoll
dcoll.init()
Path(sys.argv[1]).write_text(" ".join(os.readlink(f"/proc/self/fd/{number}") for number in range(3)))
"""


def test_a_closed_standard_stream_does_not_become_a_socket(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CLOSED, str(tmp_path / "found")], timeout=60, check=True)
    assert (tmp_path / "found").read_text() == "/dev/null /dev/null /dev/null"


NO_THREAD = """
import ctypes
from dcoll import _C, DcollError

libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(64)

def need_stacks_of(size):
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(size))
    assert libc.pthread_setattr_default_np(attributes) == 0

libc.pthread_attr_init(attributes)
need_stacks_of(1 << 46)
for _ in range(2):
    try:
        _C.make_ender()
    except DcollError as error:
        print(error)
need_stacks_of(8 << 20)
_C.make_ender()
print("made", end="", flush=True)
"""


def test_where_there_is_no_thread_to_end_the_job_init_says_so() -> None:
    """A process whose threads need more memory than there is gets EAGAIN, as one that has all it may have."""
    done = subprocess.run([sys.executable, "-c", NO_THREAD], capture_output=True, text=True, timeout=60, check=False)
    first, second, made = done.stdout.split("\n")
    assert first.startswith("The system gives this process no further thread ("), done.stderr
    assert (second, made, done.returncode) == (first, "made", 0), done.stderr
