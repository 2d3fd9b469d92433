"""DistributedOptimizer's options on 1 to 4 processes."""

import checks_optimizer_options
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("check", names_of_checks(checks_optimizer_options))
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_options(n: int, check: str) -> None:
    expect(run_checks("checks_optimizer_options", n), check)
