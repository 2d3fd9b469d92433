"""DistributedOptimizer on 1 to 4 processes."""

import checks_optimizer
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi

RANKS = [1, 2, 3, 4]


@pytest.mark.parametrize("check", names_of_checks(checks_optimizer))
@pytest.mark.parametrize("n", RANKS)
def test_optimizer(n: int, check: str) -> None:
    expect(run_checks("checks_optimizer", n), check)


@pytest.mark.parametrize("n", RANKS)
def test_the_job_ends_well(n: int) -> None:
    done = run_checks("checks_optimizer", n)
    assert done.returncode == 0, done.text
