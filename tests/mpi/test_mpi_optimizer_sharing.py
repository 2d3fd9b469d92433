"""Several DistributedOptimizers with the same parameters, on 1 to 3 processes."""

import checks_optimizer_sharing
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("check", names_of_checks(checks_optimizer_sharing))
@pytest.mark.parametrize("n", [1, 2, 3])
def test_optimizers_that_share_parameters(n: int, check: str) -> None:
    expect(run_checks("checks_optimizer_sharing", n), check)
