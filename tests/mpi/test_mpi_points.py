"""Messages between two ranks, between processes: over shared memory, over MPI alone, and on two levels."""

import checks_points
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi

LAYOUTS = [(2, ()), (3, (("DCOLL_TRANSPORT", "mpi"),)), (4, (("DCOLL_NODES", "0,0,1"),))]


@pytest.mark.parametrize("check", names_of_checks(checks_points))
@pytest.mark.parametrize(("n", "env"), LAYOUTS, ids=str)
def test_points(n: int, env: tuple[tuple[str, str], ...], check: str) -> None:
    expect(run_checks("checks_points", n, env), check)


@pytest.mark.parametrize(("n", "env"), LAYOUTS, ids=str)
def test_the_job_ends_well(n: int, env: tuple[tuple[str, str], ...]) -> None:
    done = run_checks("checks_points", n, env)
    assert done.returncode == 0, done.text
