"""What a job does when a rank fails: it ends in seconds, and every rank says why."""

import functools
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mpirun import HERE, Finished, is_open_mpi, launch

pytestmark = pytest.mark.mpi

LIMIT_S = 120.0
"""Far below DCOLL_TIMEOUT, which these jobs must not run into, and generous to a busy machine: three ranks that import
torch, beside other tests, have taken 20 s to begin."""


def fault(kind: str, n: int, *options: str, **env: str) -> Finished:
    return launch(n, str(HERE / "fault.py"), kind, timeout=LIMIT_S, options=options, DCOLL_TIMEOUT="300", **env)


@pytest.mark.parametrize(
    ("kind", "text", "transport"),
    [
        ("exception", "rank 1: RuntimeError: the data ran out", "auto"),
        ("exception", "rank 1: RuntimeError: the data ran out", "mpi"),
        ("exception_without_text", "rank 1: Textless\n", "auto"),
        ("exception_in_training", "rank 0: KeyError: 'no such batch'", "auto"),
        ("exception_before_anything", "rank 1: FileNotFoundError: data.bin", "auto"),
        ("exception_before_anything", "rank 1: FileNotFoundError: data.bin", "mpi"),
    ],
)
def test_an_uncaught_exception_ends_the_job_and_is_told_everywhere(kind: str, text: str, transport: str) -> None:
    n = 3
    done = fault(kind, n, DCOLL_TRANSPORT=transport)
    assert done.returncode != 0
    assert done.stderr.count("Traceback (most recent call last)") >= n, done.text
    assert done.stderr.count(f"PeerError: {text}") == n - 1, done.text


@pytest.mark.parametrize(
    ("kind", "env"),
    [
        ("killed", {}),
        ("killed_while_it_is_read", {}),
        ("killed", {"DCOLL_TRANSPORT": "mpi"}),
        ("killed", {"DCOLL_NODES": "0,0,1"}),
        ("killed", {"DCOLL_NODES": "0,1,1"}),
        # However long ranks look for what they wait for before they sleep, they notice.
        ("killed", {"DCOLL_SPIN_US": "1000000000"}),
        ("killed", {"DCOLL_SPIN_US": "1000000000", "DCOLL_TRANSPORT": "mpi"}),
    ],
)
def test_a_killed_rank_is_named_by_the_others(kind: str, env: dict[str, str], tmp_path: Path) -> None:
    # PRRTE ends the whole job when a rank dies by a signal, unless told to go on.
    options = ("--continuous",) if is_open_mpi() else ("-disable-auto-cleanup",)
    done = fault(kind, 3, *options, FAULT_FOLDER=str(tmp_path), **env)
    for rank in (0, 2):
        assert re.search(rf"^\[{rank}\] PeerError after .*rank 1\b", done.stdout, re.MULTILINE), done.text
        assert f"[{rank}] again: True" in done.stdout, done.text


@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_ranks_that_were_frozen_together_go_on(transport: str) -> None:
    done = fault("frozen", 3, DCOLL_TRANSPORT=transport)
    assert done.returncode == 0, done.text
    assert done.stdout.count("works") == 3, done.text


# kind: what the job says, and its exit status. Others than Open MPI's mpirun may return another one.
EXITS: dict[str, tuple[str, int]] = {
    "exits": ("PeerError: rank 1: SystemExit: 3", 3),
    "exits_alone": ("", 3),
    "exits_from_a_thread": ("", 0),
    "ends_early": ("rank 1 called shutdown (or the program there ended)", 1),
    "thread_hangs": ("RuntimeError: the data ran out", 1),
    "exit_hangs": ("shutdown made no progress for 5 s, waiting for rank 1 of 3", 1),
    "works_on": ("it goes on waiting for rank 1, still computing", 0),
    "works_on_after_shutdown": ("its program ended; it goes on waiting for rank 1, still computing", 0),
    "shutdown_hangs": ("It waited for other ranks, whose programs have not ended.", 1),
    "end_hangs": ("rank 1 still ran 5 s after its program's end", 1),
}


@functools.cache
def exits() -> dict[str, Finished | str]:
    """The jobs of EXITS, several at once: they mostly wait. A text: why there is no end to tell of."""

    def job(kind: str) -> Finished | str:
        limit = "5" if kind.endswith("_hangs") else "300"
        try:
            return launch(3, str(HERE / "fault.py"), kind, timeout=LIMIT_S, DCOLL_TIMEOUT=limit)
        except pytest.fail.Exception as hung:
            return str(hung)

    with ThreadPoolExecutor(3) as pool:
        return dict(zip(EXITS, pool.map(job, EXITS), strict=True))


@pytest.mark.parametrize("kind", EXITS)
def test_a_rank_that_ends_or_hangs_at_its_end_ends_the_job(kind: str) -> None:
    done, (text, status) = exits()[kind], EXITS[kind]
    assert isinstance(done, Finished), done
    assert text in done.stderr, done.text
    assert ("still ran" in done.stderr) == (kind in ("end_hangs", "shutdown_hangs")), done.text
    assert done.returncode == status or (done.returncode != 0 != status and not is_open_mpi()), done.text


@pytest.mark.parametrize("kind", ["exception", "exits_alone", "thread_hangs"])
def test_a_failed_rank_ends_the_job_within_two_seconds(kind: str, tmp_path: Path) -> None:
    """From the exception to the end of mpirun, in the median job: a busy machine needs longer now and then."""
    failed, seconds = tmp_path / "time", []
    for enough in (3, 5, 9):  # more are run only where the machine may have been busy
        while len(seconds) < enough:
            done = fault(kind, 3, FAULT_TIME=str(failed))
            seconds.append(time.time() - float(failed.read_text()))
            assert done.returncode != 0, done.text
        if statistics.median(seconds) < 2.0:
            return
    pytest.fail(f"the median of {sorted(seconds)} s is not below 2 s")


def test_a_failure_that_was_caught_does_not_hang_at_exit() -> None:
    done = fault("caught", 2)
    assert "caught" in done.stdout, done.text
    assert "rank 1: ValueError: bad" in done.stdout, done.text
    assert done.returncode == 0, done.text


@pytest.mark.parametrize("kind", ["stall_caught", "init_fails"])
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_a_failure_that_all_ranks_caught_ends_with_0(kind: str, transport: str, tmp_path: Path) -> None:
    env = {"DCOLL_TRANSPORT": transport, "DCOLL_STALL_CHECK_TIME": "1", "DCOLL_STALL_SHUTDOWN_TIME": "2"}
    done = fault(kind, 3, FAULT_FOLDER=str(tmp_path), **env)
    assert done.stdout.count("caught") == 3, done.text
    assert "still ran" not in done.stderr, done.text
    assert done.returncode == 0, done.text


def test_a_closed_stdout_keeps_nobody_from_the_end() -> None:
    done = fault("stdout_is_closed", 2)
    assert (done.returncode, done.stderr) == (0, ""), done.text


def test_the_interpreters_own_end_takes_as_long_as_it_takes() -> None:
    done = launch(2, str(HERE / "fault.py"), "slow_teardown", timeout=LIMIT_S, DCOLL_TIMEOUT="2")
    assert done.stdout.count("gone") == 2, done.text
    assert done.returncode == 0, done.text


def test_ending_with_a_collective_under_way() -> None:
    done = fault("leaves_handles", 2)
    assert done.returncode == 0, done.text
    assert done.stdout.count("done") == 2
