"""PowerSGD and compressors of the user's that keep something, where gradients are compressed."""

import checks_power_sgd
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi

FORCED = ("DCOLL_COMPRESS_LOCAL", "1")
JOBS = [
    (2, (FORCED,)),
    (2, (FORCED, ("DCOLL_TRANSPORT", "mpi"))),
    (3, (("DCOLL_NODES", "0,1,1"),)),
    (4, (("DCOLL_NODES", "0,0,1,1"),)),
]


@pytest.mark.parametrize("check", names_of_checks(checks_power_sgd))
@pytest.mark.parametrize(("n", "settings"), JOBS, ids=str)
def test_power_sgd(n: int, settings: tuple[tuple[str, str], ...], check: str) -> None:
    expect(run_checks("checks_power_sgd", n, settings), check)
