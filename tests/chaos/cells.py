"""The fault matrix: what hits which of 4 ranks, in which phase, over which transport; and what must come of it.

No rank hangs, no result is wrong, and every survivor names the rank. A rank that was only stopped for a second changes
nothing at all.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "mpi"))

from mpirun import find_mpirun, is_open_mpi, python_for  # noqa: E402

FAULTS = ("KILL", "SEGV", "exit", "STOP", "INT", "TERM")
PHASES = (
    *("before_init", "in_init", "small", "large", "backward", "process_set", "named", "elastic"),
    "shutdown",
)
TRANSPORTS = {"shm": {}, "mpi": {"DCOLL_TRANSPORT": "mpi"}, "two_levels": {"DCOLL_NODES": "0,0,1,1"}}
RANKS = 4
TIMEOUT_S = 20
"""DCOLL_TIMEOUT: what nothing else notices ends then."""
LIMIT_S = 120.0
"""By then every survivor has said how it ended, however busy the machine is."""


@dataclass(frozen=True)
class Cell:
    fault: str
    phase: str
    transport: str
    delay_s: float = 0.3
    victim: int = 1

    def __str__(self) -> str:
        return f"{self.fault}-{self.phase}-{self.transport}-{self.victim}-{self.delay_s:.3f}"


def draw(dice: random.Random) -> Cell:
    where = dice.choice(FAULTS), dice.choice(PHASES), dice.choice(list(TRANSPORTS))
    return Cell(*where, dice.uniform(0.0, 0.6), dice.randrange(RANKS))


NOT_STARTED = "The PMIx server's listener thread failed to start"
"""What mpirun says, once in some hundred jobs, when it has started none of the ranks."""
NOT_STRUCK = "before the fault: "
"""Of a job that went wrong by itself: on a busy machine MPI's start-up may take longer than DCOLL_TIMEOUT."""


def run(cell: Cell) -> str:
    """What is wrong with how the job ended; empty: nothing. A job that went wrong before its fault is started again."""
    found = _run(cell)
    return _run(cell) if NOT_STARTED in found or found.startswith(NOT_STRUCK) else found


def _run(cell: Cell) -> str:
    options = ["--oversubscribe", "--bind-to", "none", "--continuous"] if is_open_mpi() else ["-disable-auto-cleanup"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "DCOLL_TIMEOUT": str(TIMEOUT_S)} | TRANSPORTS[cell.transport]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Only the ranks of a backward need torch, to import which takes longer than all else.
        python = python_for(*map(str, range(RANKS))) if cell.phase == "backward" else (sys.executable,)
        rank = [*python, str(HERE / "rank.py"), cell.phase, cell.fault, str(cell.delay_s), name, str(cell.victim)]
        with open(folder / "output", "w+") as output:
            job = subprocess.Popen(
                [find_mpirun(), *options, "-n", str(RANKS), *rank],
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            expected = [rank for rank in range(RANKS) if rank != cell.victim or cell.fault == "STOP"]
            status = _wait(job, [folder / f"{rank}.json" for rank in expected])
            output.seek(0)
            words = output.read()[-3000:]
        problems = [_problem(cell, rank, folder / f"{rank}.json") for rank in expected]
        if cell.fault == "STOP":
            problems.append(f"exit status {status}" if status != 0 else "")
        found = "; ".join(problem for problem in problems if problem)
        struck = "" if (folder / "struck").exists() else NOT_STRUCK
        return f"{struck}{cell}: {found}\n{words}" if found else ""


def _wait(job: subprocess.Popen[bytes], told: list[Path]) -> int | None:
    """The exit status. mpirun --continuous itself may go on for ever once its ranks are gone: then None."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and job.poll() is None and not all(file.exists() for file in told):
        time.sleep(0.05)
    try:
        return job.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGTERM)  # mpirun, which ends its ranks
        try:
            job.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        return None


def _problem(cell: Cell, rank: int, file: Path) -> str:
    if not file.exists():
        return f"rank {rank} hung or was ended before it could tell"
    told = json.loads(file.read_text())
    may_be_fine = cell.fault == "STOP" or cell.phase == "shutdown"
    if told["how"] == "fine":
        return "" if may_be_fine else f"rank {rank} noticed nothing"
    if told["how"] == "wrong" or cell.fault == "STOP":
        return f"rank {rank}: {told['text']}"
    return "" if names(told["text"], cell.victim) else f"rank {rank} does not name rank {cell.victim}: {told['text']}"


def names(text: str, victim: int) -> bool:
    """Whether that is the rank at which it says to look: the first one, but for those that tell of others, as in
    "rank 0: rank 1 (pid 7) died"; or the one of several that could not make its call."""
    told_of = re.findall(r"\branks? (\d+)\b(?!:| left dcoll\.init\(\):)", text)
    first = (told_of or re.findall(r"\brank (\d+)\b", text) or [""])[0]
    return first == str(victim) or f"rank {victim} could not" in text
