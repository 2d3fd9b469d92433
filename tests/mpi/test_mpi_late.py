"""A job that cannot begin says who is missing and ends, or goes on when they come: nothing waits for ever."""

import re
import subprocess
import time
from pathlib import Path

import pytest
from mpirun import HERE, Finished, is_open_mpi, launch

pytestmark = pytest.mark.mpi

LIMIT_S = 60.0
NOT_BEGUN = "rank 1 has not called dcoll.init(), or has ended"
NOT_AGAIN = "rank 1 has not called dcoll.init() (again), or has ended, or hangs"


def late(kind: str, n: int, folder: Path, survivors: int, *options: str, **env: str) -> Finished:
    """Ends in time by itself, or the test fails."""
    settings = {"FAULT_FOLDER": str(folder), "FAULT_SURVIVORS": str(survivors), "DCOLL_TIMEOUT": "3"} | env
    return launch(n, str(HERE / "late.py"), kind, timeout=LIMIT_S, options=options, **settings)


def continuous() -> tuple[str, ...]:
    if not is_open_mpi():
        pytest.skip("--continuous is an option of Open MPI's mpirun")
    return ("--continuous",)


def expect_words(done: Finished, error: str, text: str, *ranks: int) -> None:
    for rank in ranks:
        pattern = rf"^\[{rank}\] {error} after [0-9.]+ s: .*{re.escape(text)}"
        assert re.search(pattern, done.stdout, re.MULTILINE), f"rank {rank}: {done.text}"


def test_a_rank_that_never_comes_is_named_by_all(tmp_path: Path) -> None:
    done = late("never", 3, tmp_path, 2, DCOLL_STALL_CHECK_TIME="1")
    assert done.returncode != 0, done.text
    expect_words(done, "TimeoutError", f"dcoll.init(): {NOT_BEGUN}, within 3 s (DCOLL_TIMEOUT).", 0, 2)
    assert done.stderr.count(f"dcoll.init() has waited 1 s: {NOT_BEGUN}.") == 1, done.text


def test_a_rank_that_comes_late_is_waited_for_again(tmp_path: Path) -> None:
    done = late("late", 3, tmp_path, 0)
    assert done.returncode == 0, done.text
    assert done.stdout.count("works") == 3, done.text
    assert f"[0] dcoll.init(): {NOT_BEGUN}" in done.stdout, done.text


def test_a_job_that_gave_up_beginning_ends_as_its_ranks_do(tmp_path: Path) -> None:
    """With Open MPI too, whose launcher takes a process that is still inside MPI's start-up for failed."""
    done = late("both_give_up", 3, tmp_path, 2)
    expect_words(done, "TimeoutError", f"dcoll.init(): {NOT_BEGUN}, within 3 s (DCOLL_TIMEOUT).", 0, 2)
    assert re.search(r"^\[1\] \w+Error after ", done.stdout, re.MULTILINE), done.text
    assert done.returncode == 0, done.text


@pytest.mark.parametrize("how", [{"STATUS": "0"}, {"STATUS": "3"}, {}], ids=["ends", "fails", "killed"])
def test_a_rank_that_ended_before_is_named_at_once(tmp_path: Path, how: dict[str, str]) -> None:
    """Long before the deadline: Open MPI's launcher is asked, whose own exit status is 0 now and then."""
    done = late("ends_before", 3, tmp_path, 2, *continuous(), DCOLL_TIMEOUT="200", **how)
    expect_words(done, "PeerError", "dcoll.init(): rank 1 died: its process has ended.", 0, 2)


@pytest.mark.parametrize("kind", ["dies_in_it", "again_dead"])
def test_a_rank_that_dies_is_named_at_once(tmp_path: Path, kind: str) -> None:
    """Long before the deadline: the job would not end in time."""
    survivors = (0,) if kind == "dies_in_it" else (0, 2)
    done = late(kind, 3, tmp_path, len(survivors), *continuous(), "--timeout", "50", DCOLL_TIMEOUT="200")
    expect_words(done, "PeerError", "dcoll.init(): rank 1 died: its process has ended.", *survivors)


def test_a_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    done = late("stops_in_it", 3, tmp_path, 1)
    assert done.returncode != 0, done.text
    expect_words(done, "TimeoutError", "rank 2 has not called dcoll.init(), or has ended, rank 1 (pid ", 0)
    assert ") is stopped, within 3 s" in done.stdout, done.text


def stops_in(function: str, folder: Path, who: int, then: str, **env: str) -> Finished:
    """Rank `who` of three, each its own node but the last two, is stopped by its first call of this function of C."""
    source, library = folder / "stops.c", folder / "libstops.so"
    source.write_text(f"#include <signal.h>\nint {function}() {{ raise(SIGSTOP); return 16; }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    (folder / "ended").mkdir()
    # Longer than MPI's own start-up takes on a busy machine, in which no rank is to be late.
    env = {"LIBRARY": str(library), "WHO": str(who), "THEN": then, "DCOLL_NODES": "0,1,1", "DCOLL_TIMEOUT": "8"} | env
    return late("stops_where_told", 3, folder / "ended", 2, **env)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_stops_while_memory_is_shared_is_named(tmp_path: Path, who: int) -> None:
    """By those of its node, which wait for its memory, and by the others, which wait for its word."""
    done = stops_in("recvmsg", tmp_path, who, "", DCOLL_NODES="0")
    assert done.returncode != 0, done.text
    expect_words(done, "TimeoutError", f"dcoll.init(): rank {who} does not answer, within 8 s", *{0, 1, 2} - {who})


DOES_NOT_RETURN = "MPI_Comm_split_type does not return: a rank ended or hangs in it"


@pytest.mark.parametrize(
    ("then", "error", "text"),
    [
        ("", "TimeoutError", f"dcoll.init(): {DOES_NOT_RETURN}, within 8 s (DCOLL_TIMEOUT)."),
        (
            "again",
            "(TransportError|PeerError)",  # whoever comes to it first says so to the others
            "MPI_Comm_split_type of an earlier start-up has not come back, so this process cannot join",
        ),
        ("interrupt", "KeyboardInterrupt", ""),
    ],
)
def test_a_rank_that_stops_in_a_call_of_mpi(tmp_path: Path, then: str, error: str, text: str) -> None:
    done = stops_in("MPI_Comm_split_type", tmp_path, 1, then, DCOLL_TIMEOUT="200" if then == "interrupt" else "8")
    assert done.returncode != 0, done.text
    expect_words(done, error, text, 0, 2)


@pytest.mark.parametrize("kind", ["interrupted", "again_interrupted"])
def test_ctrl_c_is_heard(tmp_path: Path, kind: str) -> None:
    done = late(kind, 2, tmp_path, 1, DCOLL_TIMEOUT="200")
    assert done.returncode != 0, done.text
    expect_words(done, "KeyboardInterrupt", "", 0)


@pytest.mark.parametrize("nodes", ["0", "0,1"])
def test_a_rank_that_does_not_begin_again_is_named_by_all(tmp_path: Path, nodes: str) -> None:
    done = late("again", 3, tmp_path, 2, DCOLL_NODES=nodes)
    assert done.returncode != 0, done.text
    expect_words(done, "TimeoutError", f"dcoll.init(): {NOT_AGAIN}, within 3 s (DCOLL_TIMEOUT).", 0, 2)


def test_elastic_ends_on_a_rank_that_hangs_for_good(tmp_path: Path) -> None:
    done = late("elastic", 3, tmp_path, 2, HANG="600")
    assert done.returncode != 0, done.text
    assert "dcoll.elastic: going back to the last commit after: " in done.stderr, done.text
    expect_words(done, "TimeoutError", NOT_AGAIN, 0, 2)


def test_elastic_recovers_from_a_rank_that_hung(tmp_path: Path) -> None:
    done = late("elastic", 3, tmp_path, 0, HANG="8", DCOLL_TIMEOUT="6")
    assert done.stdout.count("works") == 3, done.text
    assert "dcoll.elastic: going back to the last commit after: " in done.stderr, done.text


def test_a_rank_without_room_for_its_peers_is_named_at_once(tmp_path: Path) -> None:
    done = late("no_room", 3, tmp_path, 0, ROOM_MB="1536", DCOLL_ARENA_MB="1024", DCOLL_TIMEOUT="200")
    assert done.returncode == 0, done.text
    assert done.stdout.count("works") == 3, done.text
    cause = "rank 1: no address space for the shared memory of all local ranks, "
    warning = f"node 0: its ranks cannot share memory, using messages between them, which is slower. Cause: {cause}"
    assert done.stderr.count(warning) == 1, done.text
    assert "ulimit -v" in done.stderr, done.text


def test_a_rank_without_room_for_itself_is_named_at_once(tmp_path: Path) -> None:
    done = late("no_room", 3, tmp_path, 2, ROOM_MB="900", DCOLL_ARENA_MB="1024", DCOLL_TIMEOUT="200")
    assert done.returncode != 0, done.text
    expect_words(done, "PeerError", "rank 1 left dcoll.init(): cannot map ", 0, 2)
    assert "ulimit -v" in done.stdout, done.text


def test_a_rank_that_may_open_no_more_files_is_named_at_once(tmp_path: Path) -> None:
    begun = time.monotonic()
    done = late("no_files", 4, tmp_path, 0, ROOM="8", DCOLL_TIMEOUT="200")
    assert done.returncode == 0, done.text
    assert done.stdout.count("works") == 8, done.text
    cause = "rank 1: the shared memory of 4 local ranks needs 17 more open files, and there is room for "
    warning = f"node 0: its ranks cannot share memory, using messages between them, which is slower. Cause: {cause}"
    assert done.stderr.count(warning) == 1, done.text
    assert "ulimit -n" in done.stderr, done.text
    assert time.monotonic() - begun < 60, done.text  # for so long ranks look for one that is not there


def test_a_rank_that_is_given_no_thread_is_named_at_once(tmp_path: Path) -> None:
    """Where each node has messages of its own, MPI is called from a thread: the others must not wait in it."""
    done = late("no_thread", 3, tmp_path, 3, DCOLL_NODES="0,1", DCOLL_TIMEOUT="200")
    assert done.returncode != 0, done.text
    text = "The system gives this process no further thread"
    expect_words(done, "DcollError", f"dcoll.init(): {text}", 1)
    expect_words(done, "PeerError", f"rank 1 left dcoll.init(): dcoll.init(): {text}", 0, 2)
