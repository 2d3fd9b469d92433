"""dcoll.elastic between processes."""

import checks_elastic
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("check", names_of_checks(checks_elastic))
@pytest.mark.parametrize(("n", "transport"), [(2, "auto"), (3, "auto"), (4, "auto"), (2, "mpi")], ids=str)
def test_elastic(n: int, transport: str, check: str) -> None:
    expect(run_checks("checks_elastic", n, (("DCOLL_TRANSPORT", transport),)), check)
