"""Operations by name, join and uneven batches, in one job per transport."""

import checks_names
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi


def environment(transport: str) -> tuple[tuple[str, str], ...]:
    return ("DCOLL_TRANSPORT", transport), ("DCOLL_LOG_LEVEL", "info")


LAYOUTS = [(2, "auto"), (3, "auto"), (4, "auto"), (2, "mpi")]


@pytest.mark.parametrize("check", names_of_checks(checks_names))
@pytest.mark.parametrize(("n", "transport"), LAYOUTS)
def test_names(n: int, transport: str, check: str) -> None:
    expect(run_checks("checks_names", n, environment(transport)), check)


@pytest.mark.parametrize(("n", "transport"), LAYOUTS)
def test_it_is_told_who_ended_early(n: int, transport: str) -> None:
    """By each rank that others outlast, once, however many operations it takes part in after that."""
    told = run_checks("checks_names", n, environment(transport)).stderr
    for rank in range(n - 1):
        assert "[dcoll info rank" in next(line for line in told.splitlines() if f"rank {rank} ended" in line)
        assert told.count(f"] rank {rank} ended after {3 * rank} steps, others go on") == 2, told
    assert f"rank {n - 1} ended" not in told
