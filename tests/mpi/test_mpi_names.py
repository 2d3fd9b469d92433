"""Operations by name, join and uneven batches, in one job per transport."""

import checks_names
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("check", names_of_checks(checks_names))
@pytest.mark.parametrize(("n", "transport"), [(3, "auto"), (2, "mpi")])
def test_names(n: int, transport: str, check: str) -> None:
    expect(run_checks("checks_names", n, (("DCOLL_TRANSPORT", transport),)), check)
