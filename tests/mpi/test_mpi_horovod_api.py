"""Groups, gradients and argument forms between processes."""

import checks_horovod_api
import checks_horovod_dtypes
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("check", names_of_checks(checks_horovod_api))
@pytest.mark.parametrize("n", [2, 3, 4])
def test_horovod_api(n: int, check: str) -> None:
    expect(run_checks("checks_horovod_api", n), check)


@pytest.mark.parametrize("check", names_of_checks(checks_horovod_dtypes))
@pytest.mark.parametrize("n", [2, 3])
def test_horovod_api_by_dtype(n: int, check: str) -> None:
    expect(run_checks("checks_horovod_dtypes", n), check)
