"""DistributedOptimizer on ranks that do not do the same, 1 to 3 processes."""

import checks_optimizer_uneven
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("check", names_of_checks(checks_optimizer_uneven))
@pytest.mark.parametrize("n", [1, 2, 3])
def test_uneven(n: int, check: str) -> None:
    expect(run_checks("checks_optimizer_uneven", n), check)
