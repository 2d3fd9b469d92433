"""Every collective between hosts: one rank on each, and two on each, which share memory inside."""

from collections.abc import Callable

import checks_hosts
import netlab
import pytest
from mpirun import Finished, expect, names_of_checks, run_checks

Hosts = Callable[[int], netlab.Lab]
pytestmark = pytest.mark.mpi

LAYOUTS = [(2, 2), (4, 1)]


def job(hosts: Hosts, count: int, per_host: int) -> Finished:
    launcher = tuple(hosts(count).launcher(str(per_host)))
    environment = (
        ("RANKS_PER_HOST", str(per_host)),
        ("DCOLL_CALIBRATE", "off"),
        ("DCOLL_TCP_CONGESTION", "reno"),  # what every program may choose
    )
    return run_checks("checks_hosts", count * per_host, environment, launcher)


@pytest.mark.parametrize("check", names_of_checks(checks_hosts))
@pytest.mark.parametrize(("count", "per_host"), LAYOUTS, ids=str)
def test_between_hosts(hosts: Hosts, count: int, per_host: int, check: str) -> None:
    expect(job(hosts, count, per_host), check)


@pytest.mark.parametrize(("count", "per_host"), LAYOUTS, ids=str)
def test_the_job_ends_well(hosts: Hosts, count: int, per_host: int) -> None:
    done = job(hosts, count, per_host)
    assert done.returncode == 0, done.text
