"""Forked processes of a rank, on one node and between nodes, where its sockets are theirs too."""

import checks_fork
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("check", names_of_checks(checks_fork))
@pytest.mark.parametrize(("n", "nodes"), [(2, ""), (3, "0,1,1")], ids=str)
def test_forked_processes(n: int, nodes: str, check: str) -> None:
    expect(run_checks("checks_fork", n, (("DCOLL_NODES", nodes),)), check)
