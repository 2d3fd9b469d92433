"""What travels between nodes is compressed: over pretended nodes, MPI alone, and one node where it is forced."""

import checks_auto_compression
import checks_compression
import checks_top_k
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi

FORCED = ("DCOLL_COMPRESS_LOCAL", "1")  # Toy's buckets are small
JOBS = [
    (2, (FORCED,)),
    (2, (FORCED, ("DCOLL_TRANSPORT", "mpi"))),
    (3, (FORCED, ("DCOLL_NODES", "0,1,1"))),
    (4, (FORCED, ("DCOLL_NODES", "0,0,1,1"))),
]


@pytest.mark.parametrize("check", names_of_checks(checks_compression))
@pytest.mark.parametrize(("n", "settings"), JOBS, ids=str)
def test_compression(n: int, settings: tuple[tuple[str, str], ...], check: str) -> None:
    expect(run_checks("checks_compression", n, settings), check)


@pytest.mark.parametrize("check", names_of_checks(checks_top_k))
@pytest.mark.parametrize(("n", "settings"), JOBS, ids=str)
def test_top_k(n: int, settings: tuple[tuple[str, str], ...], check: str) -> None:
    expect(run_checks("checks_top_k", n, settings), check)


UNFORCED = [
    (2, (("DCOLL_NODES", "0,1"),)),
    (4, (("DCOLL_NODES", "0,0,1,1"),)),
    (3, (("DCOLL_NODES", "0,1,2"), ("DCOLL_CALIBRATE", "off"))),
]


@pytest.mark.parametrize("check", names_of_checks(checks_auto_compression))
@pytest.mark.parametrize(("n", "settings"), [*JOBS[1:], *UNFORCED], ids=str)
def test_auto(n: int, settings: tuple[tuple[str, str], ...], check: str) -> None:
    expect(run_checks("checks_auto_compression", n, settings), check)
