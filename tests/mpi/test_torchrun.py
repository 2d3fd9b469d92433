"""Jobs without MPI, in builds without it too: under torchrun, and by a launcher that only sets torch's variables."""

import re
from pathlib import Path

import checks_collectives
import checks_elastic
import checks_fork
import checks_names
import checks_optimizer
import checks_process_sets
import pytest
from mpirun import HERE, PLAIN, TORCHRUN, Finished, expect, launch, names_of_checks, run_checks

from dcoll import _C

LIMIT_S = 60.0
UCX = Path(_C.__file__).with_name("libdcoll_ucx.so")
MODULES = [checks_collectives, checks_optimizer, checks_process_sets, checks_names, checks_elastic, checks_fork]
CHECKS = [(module.__name__, check) for module in MODULES for check in names_of_checks(module)]
JOBS = [(module.__name__, 2) for module in MODULES] + [("checks_collectives", 4), ("checks_optimizer", 4)]


@pytest.mark.parametrize(("module", "n", "check"), [
    (module, n, check) for module, n in JOBS for name, check in CHECKS if name == module
])  # fmt: skip
def test_checks(module: str, n: int, check: str) -> None:
    expect(run_checks(module, n, launcher=TORCHRUN), check)


@pytest.mark.parametrize(("module", "n"), JOBS)
def test_the_job_ends_well(module: str, n: int) -> None:
    done = run_checks(module, n, launcher=TORCHRUN)
    assert done.returncode == 0, done.text


@pytest.mark.parametrize("n", [2, 4])
def test_the_example_trains(n: int, tmp_path: Path) -> None:
    script = str(HERE.parents[1] / "examples" / "train_digits.py")
    done = launch(
        n, script, "--epochs", "1", "--json", str(tmp_path / "result.json"), launcher=TORCHRUN, preloaded=True
    )
    assert done.returncode == 0, done.text
    assert done.stdout.count("epoch 1/1") == 1, done.text


def fault(kind: str, launcher: tuple[str, ...], n: int = 3, **env: str) -> Finished:
    settings = {"DCOLL_TIMEOUT": "300"} | env
    preloaded = kind != "exits_alone"  # which is about how Python itself ends
    return launch(n, str(HERE / "fault.py"), kind, timeout=LIMIT_S, launcher=launcher, preloaded=preloaded, **settings)


def expect_words(done: Finished, error: str, text: str, *ranks: int) -> None:
    for rank in ranks:
        pattern = rf"^\[{rank}\] {error} after [0-9.]+ s: .*{re.escape(text)}"
        assert re.search(pattern, done.stdout, re.MULTILINE), f"rank {rank}: {done.text}"


@pytest.mark.parametrize("kind", ["killed", "killed_while_it_is_read"])
def test_a_killed_rank_is_named_by_the_others(kind: str, tmp_path: Path) -> None:
    done = fault(kind, PLAIN, FAULT_FOLDER=str(tmp_path))
    expect_words(done, "PeerError", "rank 1", 0, 2)
    for rank in (0, 2):
        assert f"[{rank}] again: True" in done.stdout, done.text


def test_torchrun_ends_the_job_of_a_killed_rank(tmp_path: Path) -> None:
    done = fault("killed", TORCHRUN, FAULT_FOLDER=str(tmp_path))
    assert done.returncode != 0, done.text
    assert "Signal 9 (SIGKILL)" in done.stderr, done.text


@pytest.mark.parametrize("launcher", [TORCHRUN, PLAIN], ids=["torchrun", "plain"])
def test_an_uncaught_exception_is_told_everywhere(launcher: tuple[str, ...]) -> None:
    done = fault("exception", launcher)
    assert done.returncode != 0, done.text
    assert done.stderr.count("PeerError: rank 1: RuntimeError: the data ran out") == 2, done.text


@pytest.mark.parametrize(("kind", "text"), [
    ("exits_alone", "exitcode  : 3"), ("thread_hangs", "RuntimeError: the data ran out"),
    ("exit_hangs", "shutdown made no progress for 5 s, waiting for rank 1 of 3"),
    ("end_hangs", "rank 1 still ran 5 s after its program's end"),
])  # fmt: skip
def test_a_rank_that_ends_or_hangs_ends_the_job(kind: str, text: str) -> None:
    done = fault(kind, TORCHRUN, DCOLL_TIMEOUT="5" if kind.endswith("_hangs") else "300")
    assert done.returncode != 0, done.text
    assert text in done.stderr, done.text


@pytest.mark.parametrize("nodes", ["", "0,1,1"])
def test_a_rank_that_computes_longer_is_waited_for(nodes: str) -> None:
    done = fault("works_on", TORCHRUN, DCOLL_NODES=nodes)
    assert done.returncode == 0, done.text
    assert done.stderr.count("it goes on waiting for rank 1, still computing") >= 2, done.text


def test_a_failure_that_all_ranks_caught_ends_with_0(tmp_path: Path) -> None:
    env = {"DCOLL_STALL_CHECK_TIME": "1", "DCOLL_STALL_SHUTDOWN_TIME": "2", "FAULT_FOLDER": str(tmp_path)}
    for kind in ("stall_caught", "init_fails"):
        done = fault(kind, TORCHRUN, **env)
        assert done.stdout.count("caught") == 3, done.text
        assert done.returncode == 0, done.text


def late(kind: str, n: int, folder: Path, survivors: int, **env: str) -> Finished:
    settings = {"FAULT_FOLDER": str(folder), "FAULT_SURVIVORS": str(survivors), "DCOLL_TIMEOUT": "3"} | env
    return launch(n, str(HERE / "late.py"), kind, timeout=LIMIT_S, launcher=PLAIN, preloaded=True, **settings)


NOT_AGAIN = "rank 1 has not called dcoll.init() (again), or has ended, or hangs"


@pytest.mark.parametrize("kind", ["never", "again"])
def test_a_rank_that_does_not_come_is_named_by_all(tmp_path: Path, kind: str) -> None:
    done = late(kind, 3, tmp_path, 2, DCOLL_STALL_CHECK_TIME="1")
    assert done.returncode != 0, done.text
    expect_words(done, "TimeoutError", f"dcoll.init(): {NOT_AGAIN}, within 3 s (DCOLL_TIMEOUT).", 0, 2)
    assert f"dcoll.init() has waited 1 s: {NOT_AGAIN}." in done.stderr, done.text


def test_a_rank_that_comes_late_is_waited_for_again(tmp_path: Path) -> None:
    done = late("late", 3, tmp_path, 0)
    assert done.returncode == 0, done.text
    assert done.stdout.count("works") == 3, done.text
    assert f"[0] dcoll.init(): {NOT_AGAIN}" in done.stdout, done.text


@pytest.mark.parametrize("kind", ["dies_in_it", "again_dead"])
def test_a_rank_that_dies_is_named_at_once(tmp_path: Path, kind: str) -> None:
    """Long before the deadline: the job would not end in time."""
    survivors = (0,) if kind == "dies_in_it" else (0, 2)
    done = late(kind, 3, tmp_path, len(survivors), DCOLL_TIMEOUT="200")
    expect_words(done, "PeerError", "dcoll.init(): rank 1 died: its process has ended.", *survivors)


@pytest.mark.parametrize("kind", ["interrupted", "again_interrupted"])
def test_ctrl_c_is_heard(tmp_path: Path, kind: str) -> None:
    done = late(kind, 2, tmp_path, 1, DCOLL_TIMEOUT="200")
    assert done.returncode != 0, done.text
    expect_words(done, "KeyboardInterrupt", "", 0)


def test_without_the_store_the_ranks_say_whose_it_is(tmp_path: Path) -> None:
    """Rank 0 never comes."""
    done = late("first_never", 2, tmp_path, 1, DCOLL_STALL_CHECK_TIME="1")
    expect_words(
        done, "TimeoutError", "dcoll.init(): rank 0, in dcoll.init(), has not opened the store at 127.0.0.1:", 1
    )
    assert "dcoll.init() has waited 1 s: rank 0" in done.stderr, done.text


def test_a_restarted_gang_begins_anew() -> None:
    """A rank dies in the first attempt; the second has the same store."""
    options = ("--max-restarts", "1")
    launcher = (*TORCHRUN[:-1], *options, TORCHRUN[-1])
    done = launch(2, str(HERE / "late.py"), "dies_once", timeout=LIMIT_S, launcher=launcher)
    assert done.returncode == 0, done.text
    assert done.stdout.count("works") == 2, done.text


@pytest.mark.skipif(UCX.exists(), reason="needs a build without UCX")
def test_what_shares_no_memory_says_what_is_missing(tmp_path: Path) -> None:
    done = late("work_at_once", 2, tmp_path, 2, DCOLL_NODES="0,1")
    expect_words(done, "TransportError", "Between them dcoll needs UCX, but dcoll was built without it", 0, 1)


def needs_ucx() -> None:
    if not UCX.exists():
        pytest.skip("needs ucx: dcoll was built without it")


@pytest.mark.parametrize(("module", "check"), [
    (name, check) for name, check in CHECKS if name in ("checks_collectives", "checks_process_sets", "checks_elastic")
])  # fmt: skip
@pytest.mark.parametrize("nodes", ["0,1", "0,0,1"])
def test_checks_between_nodes(module: str, nodes: str, check: str) -> None:
    needs_ucx()
    expect(run_checks(module, len(nodes.split(",")), (("DCOLL_NODES", nodes),), launcher=TORCHRUN), check)


@pytest.mark.parametrize("nodes", ["0,1,2", "0,0,1", "0,1,1"])
def test_a_killed_rank_is_named_between_nodes(nodes: str, tmp_path: Path) -> None:
    needs_ucx()
    done = fault("killed", PLAIN, FAULT_FOLDER=str(tmp_path), DCOLL_NODES=nodes)
    expect_words(done, "PeerError", "rank 1", 0, 2)
    for rank in (0, 2):
        assert f"[{rank}] again: True" in done.stdout, done.text


def test_an_uncaught_exception_is_told_between_nodes() -> None:
    needs_ucx()
    done = fault("exception", TORCHRUN, DCOLL_NODES="0,1,2")
    assert done.stderr.count("PeerError: rank 1: RuntimeError: the data ran out") == 2, done.text
