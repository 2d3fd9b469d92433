"""Process sets between processes, over shared memory and over MPI alone."""

import checks_process_sets
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi

LAYOUTS = [(2, "auto"), (3, "auto"), (4, "auto"), (3, "mpi")]


@pytest.mark.parametrize("check", names_of_checks(checks_process_sets))
@pytest.mark.parametrize(("n", "transport"), LAYOUTS, ids=str)
def test_process_sets(n: int, transport: str, check: str) -> None:
    expect(run_checks("checks_process_sets", n, (("DCOLL_TRANSPORT", transport),)), check)


@pytest.mark.parametrize(("n", "transport"), LAYOUTS, ids=str)
def test_the_job_ends_well(n: int, transport: str) -> None:
    done = run_checks("checks_process_sets", n, (("DCOLL_TRANSPORT", transport),))
    assert done.returncode == 0, done.text
