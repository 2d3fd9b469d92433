"""A lab of network namespaces for as long as a benchmark between hosts needs it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import NoReturn

import netlab


@contextlib.contextmanager
def lab_for(program: str, hosts: int, rate: str) -> Iterator[netlab.Lab]:
    """Where there can be none, or its job takes too long: a sentence and the status of what could not be measured."""
    try:
        lab = netlab.up(f"{program}-{os.getpid()}", hosts, rate)
        try:
            yield lab
        finally:
            netlab.down(lab.name)
    except netlab.LabError as reason:
        say(program, str(reason))
    except subprocess.TimeoutExpired as late:
        say(program, f"the job did not end within {round(late.timeout, 1):g} s: --timeout gives it longer")


def say(program: str, reason: str) -> NoReturn:
    print(f"{program}: {reason}", file=sys.stderr)
    raise SystemExit(netlab.CANNOT) from None
