"""SyncBatchNorm between processes."""

import checks_batch_norm
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("check", names_of_checks(checks_batch_norm))
@pytest.mark.parametrize("n", [2, 3, 4])
def test_batch_norm(n: int, check: str) -> None:
    expect(run_checks("checks_batch_norm", n), check)
