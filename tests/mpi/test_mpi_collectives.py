"""Every collective between processes: over shared memory, and over MPI alone."""

import checks_collectives
import checks_interpreter_lock
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi

LAYOUTS = [(2, "auto"), (3, "auto"), (4, "auto"), (2, "mpi"), (3, "mpi")]


@pytest.mark.parametrize("check", names_of_checks(checks_collectives))
@pytest.mark.parametrize(("n", "transport"), LAYOUTS, ids=str)
def test_collectives(n: int, transport: str, check: str) -> None:
    expect(run_checks("checks_collectives", n, (("DCOLL_TRANSPORT", transport),)), check)


@pytest.mark.parametrize(("n", "transport"), LAYOUTS, ids=str)
def test_the_job_ends_well(n: int, transport: str) -> None:
    done = run_checks("checks_collectives", n, (("DCOLL_TRANSPORT", transport),))
    assert done.returncode == 0, done.text


@pytest.mark.parametrize("check", names_of_checks(checks_interpreter_lock))
@pytest.mark.parametrize("n", [2], ids=str)
def test_the_interpreter_lock(n: int, check: str) -> None:
    expect(run_checks("checks_interpreter_lock", n), check)
