"""What users are told when some ranks do not come: one line for the whole job, with what the missing rank does."""

import re

import pytest
from mpirun import HERE, Finished, launch

pytestmark = pytest.mark.mpi

SCRIPT = str(HERE / "stalls.py")


def stalls(n: int, *kinds: str, **env: str) -> Finished:
    done = launch(n, SCRIPT, *kinds, DCOLL_STALL_CHECK_TIME="0.5", **env)
    assert done.returncode == 0, done.text
    return done


def reports(done: Finished) -> dict[str, list[str]]:
    """By kind: the lines that say that something stalls."""
    found: dict[str, list[str]] = {}
    for line in done.stderr.splitlines():
        if line.startswith("== "):
            found[line[3:]] = []
        elif " stalls for " in line:
            found[list(found)[-1]].append(line)
    return found


def here(function: str) -> str:
    return rf"\S*stalls\.py:\d+ in {function}"


LAST = rf"now at {here('loads_data')} < {here('KIND')} < {here('<module>')}\. "
WAITING = rf"Waiting: ranks 0, 1 at {here('KIND')}\."
FINISHED = r"Rank 2 (finished .+ \d+ s ago|has finished no operation yet), "

TEXTS = {
    "ordered": r"allreduce 'loss' \(sum of 5 float64\) stalls for \d+ s\. Missing: rank 2\. "
    r"Rank 2 finished broadcast 'weights' \(24 bytes of float64 from rank 0\) \d+ s ago, " + LAST + WAITING,
    "by_name": r"allreduce 'a' \(average of 5 float32\) \(and 2 more by name: 'b' 'c'\) stalls for \d+ s\. "
    "Missing: rank 2. " + FINISHED + LAST + WAITING,
    "barrier": r"barrier stalls for \d+ s\. Missing: rank 2\. " + FINISHED + LAST + WAITING,
    "join": r"join stalls for \d+ s\. Missing: rank 2\. " + FINISHED + LAST + WAITING,
    "backward": r"allreduce 'bucket 0' .* stalls for \d+ s\. Missing: rank 2\. " + FINISHED + LAST + WAITING,
}


@pytest.mark.parametrize("env", [{}, {"DCOLL_NODES": "0,0,1"}, {"DCOLL_TRANSPORT": "mpi"}], ids=str)
def test_one_line_says_what_the_missing_rank_does(env: dict[str, str]) -> None:
    kinds = list(TEXTS) if not env else ["ordered", "by_name"]
    told = reports(stalls(3, *kinds, **env))
    for kind in kinds:
        assert len(told[kind]) == 1, told
        assert re.search(TEXTS[kind].replace("KIND", kind) + "$", told[kind][0]), told[kind][0]


def test_ranks_that_are_elsewhere() -> None:
    told = reports(stalls(3, "process_set", "elsewhere", STALL_REPORT_S="3"))
    of_set = [line for line in told["process_set"] if "] allreduce 'of the set'" in line]
    assert len(of_set) == 1, told
    assert "Missing: rank 2. " in of_set[0]
    assert re.search(rf"Waiting: rank 0 at {here('process_set')}\.$", of_set[0]), of_set[0]
    assert any(
        re.search(rf"Missing: rank 2\. Rank 2 waits in barrier for \d+ s, now at {here('elsewhere')} < ", line)
        for line in told["elsewhere"]
    ), told


def test_ranks_that_cannot_say_where_they_are() -> None:
    told = reports(stalls(3, "holds_lock", "stopped"))
    assert len(told["holds_lock"]) == len(told["stopped"]) == 1, told
    assert re.search(FINISHED + "now busy without releasing Python's lock", told["holds_lock"][0]), told
    assert re.search(
        r"Rank 2 does not answer: its process is stopped .*; it finished broadcast 'weights' .* \d+ s ago",
        told["stopped"][0],
    ), told


@pytest.mark.parametrize("env", [{}, {"DCOLL_TRANSPORT": "mpi"}], ids=str)
def test_the_end_is_told_to_all_in_the_same_words(env: dict[str, str]) -> None:
    # The last rank comes when the others have given up. It must not finish the operation alone.
    done = launch(
        3, SCRIPT, "ends", DCOLL_STALL_CHECK_TIME="0.5", DCOLL_STALL_SHUTDOWN_TIME="1", STALL_REPORT_S="6", **env
    )
    told = {rank: re.findall(rf"<{rank}> step 0: (.*)", done.stdout) for rank in range(3)}
    assert all(len(lines) == 1 for lines in told.values()), done.text
    assert told[0] == told[1] == told[2], done.text
    assert re.match(r"allreduce 'loss 0' .* stalls for .* DCOLL_STALL_SHUTDOWN_TIME .*ends the job", told[0][0]), told
