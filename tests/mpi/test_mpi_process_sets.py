"""Process sets between processes, over shared memory and over MPI alone."""

import checks_process_sets
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi

ENCODED = (("DCOLL_TRANSPORT", "mpi"), ("DCOLL_COMPRESS_LOCAL", "1"))
"""What is compressed is encoded, though the sets are of one node."""
LAYOUTS = [
    pytest.param(2, (("DCOLL_TRANSPORT", "auto"),), id="2-auto"),
    pytest.param(3, (("DCOLL_TRANSPORT", "auto"),), id="3-auto"),
    pytest.param(4, (("DCOLL_TRANSPORT", "auto"),), id="4-auto"),
    pytest.param(3, (("DCOLL_TRANSPORT", "mpi"),), id="3-mpi"),
    pytest.param(3, ENCODED, id="3-encoded"),
]


@pytest.mark.parametrize("check", names_of_checks(checks_process_sets))
@pytest.mark.parametrize(("n", "env"), LAYOUTS)
def test_process_sets(n: int, env: tuple[tuple[str, str], ...], check: str) -> None:
    expect(run_checks("checks_process_sets", n, env), check)


@pytest.mark.parametrize(("n", "env"), LAYOUTS)
def test_the_job_ends_well(n: int, env: tuple[tuple[str, str], ...]) -> None:
    done = run_checks("checks_process_sets", n, env)
    assert done.returncode == 0, done.text
