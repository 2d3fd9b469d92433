"""dcoll.elastic between processes."""

import checks_elastic
import checks_elastic_compression
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("check", names_of_checks(checks_elastic))
@pytest.mark.parametrize(("n", "transport"), [(2, "auto"), (3, "auto"), (4, "auto"), (2, "mpi")], ids=str)
def test_elastic(n: int, transport: str, check: str) -> None:
    expect(run_checks("checks_elastic", n, (("DCOLL_TRANSPORT", transport),)), check)


COMPRESSED = [(2, (("DCOLL_COMPRESS_LOCAL", "1"),)), (3, (("DCOLL_COMPRESS_LOCAL", "1"), ("DCOLL_NODES", "0,1,2")))]


@pytest.mark.parametrize("check", names_of_checks(checks_elastic_compression))
@pytest.mark.parametrize(("n", "env"), COMPRESSED, ids=str)
def test_what_compression_has_lost(n: int, env: tuple[tuple[str, str], ...], check: str) -> None:
    expect(run_checks("checks_elastic_compression", n, env), check)
