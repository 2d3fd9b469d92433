"""Starting processes with mpirun or without: one launch runs a whole module of checks, because a launch costs seconds.

A module of checks has functions `check_*()`, run in order on every rank with dcoll initialised. Each becomes a test;
when it fails, the test shows the traceback of every rank on which it did.
"""

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from dcoll.job.mpi_startup import PLUGIN
from dcoll.runner import command_lines
from dcoll.runner.hosts import UsageError

HERE = Path(__file__).parent
MODULES = ("mpi", "net", "python", "torch_backend")  # where jobs find the tests' own modules
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node")
PLAIN = (sys.executable, str(HERE / "plain_ranks.py"), "-n")
"""What stands for mpirun where there is none: torch's launcher, and one that only starts ranks."""
OURS = ("DCOLL_", "CHECKS_", "FAULT_", "HOROVOD_")
"""How settings begin that only dcoll and its tests read: not while torch is imported."""
SKIPPED = "skipped: "
SEED = os.environ.get("TESTS_SEED", "0")  # the same on all ranks
TIMEOUT_S = float(os.environ.get("TESTS_JOB_SECONDS", "300"))  # what hangs says so long before: DCOLL_TIMEOUT

ONE_AT_A_TIME = threading.Lock()  # tests/chaos starts jobs on several threads


@dataclass(frozen=True)
class Finished:
    """What a job left behind."""

    returncode: int
    stdout: str
    stderr: str
    # Per rank: check -> "", SKIPPED and why, or its traceback. A check that did not run is not in it.
    results: tuple[dict[str, str], ...]

    @property
    def text(self) -> str:
        return f"exit status {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


@functools.cache
def launcher_or_reason() -> command_lines.Mpirun | str:
    """What dcollrun uses, or why these tests cannot run."""
    if not PLUGIN.exists():
        return "dcoll was built without MPI"
    try:
        return command_lines.find_mpirun()
    except UsageError as error:
        return str(error)


def find_launcher() -> command_lines.Mpirun:
    """Without one the test is skipped; `make test` sets TESTS_NEED=mpi unless it is told to build without MPI."""
    found = launcher_or_reason()
    if isinstance(found, str):
        pytest.skip(f"needs mpi: {found}")
    return found


def find_mpirun() -> str:
    return find_launcher().path


def is_open_mpi() -> bool:
    return find_launcher().kind == "openmpi"


@functools.cache
def servers() -> Path:
    """The folder of the sockets of preloaded.py."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def server(name: str) -> subprocess.Popen[bytes]:
    """Ends with this process: its standard input does."""
    command = [sys.executable, str(HERE / "preloaded.py"), "serve", str(servers() / name)]
    return subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )


def python_for(*names: str) -> tuple[str, ...]:
    """The python of the process of this name, or of the ranks of these: one that has torch, unless a sanitizer is
    loaded before it."""
    if "LD_PRELOAD" in os.environ:
        return (sys.executable,)
    with ONE_AT_A_TIME:
        begun = {servers() / name: server(name) for name in names}
    deadline = time.monotonic() + TIMEOUT_S
    while missing := [path for path in begun if not path.exists()]:  # ranks of a job begin at once
        assert begun[missing[0]].poll() is None, f"the server {missing[0]} has ended"
        assert time.monotonic() < deadline, f"the server {missing[0]} has not imported torch in {TIMEOUT_S:.0f} s"
        time.sleep(0.01)
    socket = servers() / (names[0] if len(names) == 1 else "%")
    return (sys.executable, "-IS", str(HERE / "preloaded.py"), str(socket))


def environment(**env: str) -> dict[str, str]:
    """Of a job, and of the servers of its preloaded ranks, which read some of it while they import torch."""
    return os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*(str(HERE.parent / d) for d in MODULES), os.environ.get("PYTHONPATH", "")]),
        **env,
    }


def still_run(pid: int) -> str:
    """This process and those that it began, a line each: whether a job is only slow, or waits, and for what."""
    lines = []
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        tick = os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(words[19]) / tick
        threads = [
            f"{(task / 'comm').read_text().strip()} {(task / 'wchan').read_text()}"
            for task in Path(f"/proc/{pid}/task").iterdir()
        ]
        used = (int(words[11]) + int(words[12])) / tick
        lines.append(f"{pid} {words[0]} runs for {age:.1f} s, used {used:.1f} s: {command}[{', '.join(threads)}]")
        children = "".join(task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:  # it has ended
        return "\n".join(lines)
    return "\n".join([*lines, *map(still_run, map(int, children.split()))])


def launch(
    n: int,
    *command: str,
    timeout: float = TIMEOUT_S,
    options: tuple[str, ...] = (),
    launcher: tuple[str, ...] = (),
    preloaded: bool = False,
    **env: str,
) -> Finished:
    """Run `python command...` on n ranks and wait; a job that does not end in time is killed and fails the test.
    launcher: what stands for mpirun, where ranks are not just on this machine. preloaded: ranks have torch when they
    begin, and end without taking the interpreter apart."""
    mpirun = ()
    if not launcher:
        mpirun = (find_mpirun(), *(("--oversubscribe", "--bind-to", "none") if is_open_mpi() else ()))
    number = () if launcher and launcher[-1] in (TORCHRUN[-1], PLAIN[-1]) else ("-n",)
    # What settings of others a job asks for may be read before it begins.
    ours = launcher[:-1] in ((), TORCHRUN[:-1], PLAIN[:-1]) and all(name.startswith(OURS) for name in env)
    python = python_for(*map(str, range(n))) if preloaded and ours else (sys.executable,)
    if launcher[:3] == TORCHRUN[:3]:
        launcher = (*python_for("torchrun"), *launcher[1:])
    job = [*(launcher or mpirun), *options, *number, str(n), *python, *command]
    process = subprocess.Popen(
        job, env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        ran = still_run(process.pid)
        process.terminate()  # mpirun ends its ranks, kill would leave them
        try:
            stdout, stderr = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
        pytest.fail(f"{' '.join(job)} still ran after {timeout} s\n{ran}\n--- stdout\n{stdout}\n--- stderr\n{stderr}")
    return Finished(process.returncode, stdout, stderr, ())


@functools.cache
def run_checks(module: str, n: int, env: tuple[tuple[str, str], ...] = (), launcher: tuple[str, ...] = ()) -> Finished:
    """Run all checks of a module on n ranks, once per test session, also where the job hangs."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            command = [str(HERE / "run_checks.py"), module, folder]
            done = launch(n, *command, launcher=launcher, preloaded=True, **dict(env))
        except pytest.fail.Exception as hung:
            done = Finished(-1, "", str(hung), ())
        files = [Path(folder) / f"{rank}.json" for rank in range(n)]
        results = tuple(json.loads(file.read_text()) if file.exists() else {} for file in files)
    return Finished(done.returncode, done.stdout, done.stderr, results)


def names_of_checks(module: ModuleType) -> list[str]:
    """The checks of a module, in the order in which they stand."""
    return [name for name, value in vars(module).items() if name.startswith("check_") and callable(value)]


def expect(done: Finished, check: str) -> None:
    """Fail unless the check passed on every rank, or was skipped on some."""
    not_run = [rank for rank, result in enumerate(done.results) if check not in result]
    told = {rank: result[check] for rank, result in enumerate(done.results) if result.get(check)}
    failed = [f"--- rank {rank}\n{text}" for rank, text in told.items() if not text.startswith(SKIPPED)]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)
    if not_run:
        pytest.fail(f"{check} did not run on ranks {not_run}: {done.text}", pytrace=False)
    texts = [text for result in done.results for text in result.values()]
    if done.returncode != 0 and all(text == "" or text.startswith(SKIPPED) for text in texts):
        pytest.fail(f"what ran passed, but the job did not end well: {done.text}", pytrace=False)
    if told:
        pytest.skip(next(iter(told.values())).removeprefix(SKIPPED))
