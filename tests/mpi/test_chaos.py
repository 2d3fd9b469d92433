"""A dozen cells of the fault matrix, and three that are new each time; `make chaos` runs minutes of it."""

import functools
import os
import random
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from mpirun import find_launcher

sys.path.insert(0, str(Path(__file__).parent.parent / "chaos"))

import cells
from cells import Cell, draw, run

pytestmark = pytest.mark.mpi

FIXED = [
    Cell("KILL", "before_init", "shm"),
    Cell("exit", "in_init", "mpi"),
    Cell("KILL", "small", "mpi"),
    Cell("SEGV", "small", "two_levels"),
    Cell("TERM", "large", "shm"),
    Cell("KILL", "large", "two_levels"),
    Cell("STOP", "large", "mpi"),
    Cell("INT", "backward", "shm"),
    Cell("exit", "process_set", "two_levels"),
    Cell("TERM", "named", "mpi"),
    Cell("KILL", "elastic", "shm"),
    Cell("SEGV", "elastic", "two_levels", 0.45),  # of the kind that `make chaos` found a wrong name in
    Cell("STOP", "shutdown", "shm"),
]
SEED = int(os.environ["TESTS_SEED"])
DICE = random.Random(SEED)
MOVING = [draw(DICE) for _ in range(3)]


@functools.cache
def jobs() -> dict[Cell, Future[str]]:
    """All cells, several at once: they mostly wait."""
    pool = ThreadPoolExecutor(3)
    return {cell: pool.submit(run, cell) for cell in (*FIXED, *MOVING)}


@pytest.mark.parametrize("cell", FIXED, ids=str)
def test_a_fault_is_noticed_and_named(cell: Cell) -> None:
    find_launcher()
    problem = jobs()[cell].result()
    assert not problem, problem


@pytest.mark.parametrize("number", range(len(MOVING)))
def test_a_fault_drawn_anew(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    find_launcher()
    with capsys.disabled():
        print(f"[chaos: {MOVING[number]}, seed {SEED}]", end=" ", flush=True)
    problem = jobs()[MOVING[number]].result()
    assert not problem, f"seed {SEED}: {problem}"


@pytest.mark.parametrize(("first", "runs"), [("", 1), ("KILL-small: rank 0 hung", 1), (cells.NOT_STRUCK + "rank 0", 2)])
def test_a_job_that_fails_before_its_fault_is_started_again(
    first: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([first, "again"])
    monkeypatch.setattr(cells, "_run", lambda _: next(found))
    assert run(FIXED[0]) == (first if runs == 1 else "again")
