"""What users are told when some ranks do not come: one line for the whole job, with what the missing rank does."""

import re
from pathlib import Path

import pytest
from mpirun import HERE, launch

pytestmark = pytest.mark.mpi

SCRIPT = str(HERE / "stalls.py")
CHECK_TIME_S = "0.3"


def log_of(tmp_path: Path, *kinds: str, **env: str) -> str:
    log = tmp_path / "stderr"
    done = launch(3, SCRIPT, *kinds, STALL_LOG=str(log), DCOLL_STALL_CHECK_TIME=CHECK_TIME_S, **env)
    text = log.read_text() if log.exists() else ""
    assert done.returncode == 0 or "ends" in kinds, done.text + text  # which ends with an error
    return text


def reports(log: str) -> dict[str, list[str]]:
    """By kind: the lines that say that something stalls."""
    found: dict[str, list[str]] = {}
    for line in log.splitlines():
        if line.startswith("== "):
            found[line[3:]] = []
        elif " stalls for " in line:
            found[list(found)[-1]].append(line)
    return found


def here(function: str) -> str:
    return rf"\S*stalls\.py:\d+ in {function}"


def check(kind: str, begin: str, rest: str, told: dict[str, list[str]]) -> None:
    """Exactly one line tells of the operation that begins so, and goes on like that."""
    lines = [line for line in told[kind] if re.search(rf"\] {begin}", line)]
    assert len(lines) == 1, told
    assert re.search(rf"\] {begin}{rest}$".replace("KIND", kind), lines[0]), lines[0]


SECONDS = r" stalls for \d+ s\. Missing: rank 2\. "
FINISHED = r"Rank 2 (finished [^,]+|has finished no operation[^,]*), "
LOADS = rf"now at {here('loads_data')} < {here('KIND')} < {here('<module>')}\. "
WAITING = rf"Waiting: ranks 0, 1 at {here('KIND')}\."
USUAL = SECONDS + FINISHED + LOADS + WAITING

ORDERED = (
    r"allreduce 'loss' \(sum of 5 float64\)",
    SECONDS + r"Rank 2 finished broadcast 'weights' \(24 bytes of float64 from rank 0\), " + LOADS + WAITING,
)
BY_NAME = (r"allreduce 'a' \(average of 5 float32\) \(and 2 more by name: 'b' 'c'\)", USUAL)


def test_one_line_says_what_the_missing_rank_does(tmp_path: Path) -> None:
    kinds = ["ordered", "by_name", "barrier", "join", "process_set"]
    kinds += ["after_join", "elsewhere", "holds_lock", "stopped", "leaves_early"]
    told = reports(log_of(tmp_path, *kinds, DCOLL_LOG_LEVEL="debug"))
    check("ordered", *ORDERED, told)
    check("by_name", *BY_NAME, told)
    of_four = r"Rank 2 finished allreduce \(sum of 4 float32\), "
    check("barrier", "barrier", SECONDS + of_four + LOADS + WAITING, told)
    check("join", "join", USUAL, told)
    check("after_join", r"allreduce 'after' \(sum of 5 float64\)", USUAL, told)
    only_rank_0 = rf"Waiting: rank 0 at {here('KIND')}\."
    check("process_set", r"allreduce 'of the set' [^:]*", SECONDS + FINISHED + LOADS + only_rank_0, told)
    waits = rf"Rank 2 waits in barrier for \d+ s, now at {here('KIND')} < .*"
    check("elsewhere", r"allreduce 'first' [^:]*", SECONDS + waits + WAITING, told)
    check("holds_lock", "barrier", SECONDS + FINISHED + r"now busy without releasing Python's lock .*", told)
    silent = r"No answer from rank 2: stopped, ended or out of reach, after broadcast 'weights' .*"
    check("stopped", "barrier", SECONDS + silent, told)
    check("leaves_early", "shutdown", ".*", told)
    assert "[dcoll debug " in "".join(told["leaves_early"]), told


def test_between_nodes(tmp_path: Path) -> None:
    told = reports(log_of(tmp_path, "ordered", "by_name", DCOLL_NODES="0,0,1"))
    check("ordered", *ORDERED, told)
    check("by_name", *BY_NAME, told)


@pytest.mark.parametrize("env", [{"DCOLL_TRANSPORT": "mpi"}, {"DCOLL_NODES": "0,0,1"}], ids=str)
def test_where_no_thread_may_listen_each_rank_says_whom_it_waits_for(tmp_path: Path, env: dict[str, str]) -> None:
    """A script's own MPI_THREAD_SERIALIZED: the missing rank cannot be asked, and the job goes on all the same."""
    pytest.importorskip("mpi4py", reason="needs mpi4py: it is not installed")
    log = log_of(tmp_path, "not_asked", STALL_THREADS="serialized", DCOLL_LOG_HIDE_TIME="1", **env)
    assert " stalls for " not in log
    waits = re.findall(
        r"\[dcoll warning rank (\d)\] allreduce (.*?) made no progress for \d+ s, waiting for (.*?)\.\n", log
    )
    ordered, by_name = "'loss' (sum of 5 float64)", "'late' (average of 2 float32)"
    assert [(rank, what) for rank, what, _ in sorted(waits)] == [
        ("0", by_name), ("0", ordered), ("1", by_name), ("1", ordered),
    ], log  # fmt: skip
    whom = {(rank, what): whom for rank, what, whom in waits}
    # Of names rank 0 keeps the list: it alone knows whose is missing.
    assert whom.pop(("1", by_name)) == "rank 0 of 3, which keeps the list of names", log
    assert set(whom.values()) == {"rank 2 of 3"}, log


ENDS = [{}, {"DCOLL_TRANSPORT": "mpi"}, {"DCOLL_TRANSPORT": "mpi", "STALL_THREADS": "serialized"}]


@pytest.mark.parametrize("env", ENDS, ids=str)
def test_the_end_is_told_to_all_in_the_same_words(tmp_path: Path, env: dict[str, str]) -> None:
    # The last rank comes when the others have given up. It must not finish the operation alone.
    if "STALL_THREADS" in env:
        pytest.importorskip("mpi4py", reason="needs mpi4py: it is not installed")
    log = log_of(tmp_path, "ends", DCOLL_STALL_SHUTDOWN_TIME="1", **env)
    told = {rank: re.findall(rf"<{rank}> step 0: (.*)", log) for rank in range(3)}
    assert all(len(lines) == 1 for lines in told.values()), log
    assert told[0] == told[1] == told[2], log
    # Whose driver does not get a core in time hears the watchdog's words.
    verb = "made no progress for" if "STALL_THREADS" in env else "(stalls|made no progress) for"
    assert re.match(rf"allreduce 'loss 0' .* {verb} .* DCOLL_STALL_SHUTDOWN_TIME .*ends the job", told[0][0]), told
