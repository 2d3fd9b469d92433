"""Messages between two ranks, between processes: over shared memory, over MPI alone, and on two levels."""

import re

import checks_points
import pytest
from mpirun import expect, launch, names_of_checks, run_checks

pytestmark = pytest.mark.mpi

LAYOUTS = [(2, ()), (3, (("DCOLL_TRANSPORT", "mpi"),)), (4, (("DCOLL_NODES", "0,0,1"),))]


@pytest.mark.parametrize("check", names_of_checks(checks_points))
@pytest.mark.parametrize(("n", "env"), LAYOUTS, ids=str)
def test_points(n: int, env: tuple[tuple[str, str], ...], check: str) -> None:
    expect(run_checks("checks_points", n, env), check)


@pytest.mark.parametrize(("n", "env"), LAYOUTS, ids=str)
def test_the_job_ends_well(n: int, env: tuple[tuple[str, str], ...]) -> None:
    done = run_checks("checks_points", n, env)
    assert done.returncode == 0, done.text


LEFT_OVER = """if True:
    import torch
    import torch.distributed as dist
    import dcoll.torch
    dist.init_process_group("dcoll")
    other = 1 - dist.get_rank()
    never_sent = dist.irecv(torch.empty(4), other, tag=1)
    never_received = dist.isend(torch.empty(1 << 18), other, tag=2)
    if {destroy}:
        dist.destroy_process_group()
    print("done", flush=True)
"""


@pytest.mark.parametrize("destroy", [True, False])
def test_messages_that_nobody_took_are_told_and_no_failure(destroy: bool) -> None:
    """As with Gloo."""
    done = launch(2, "-c", LEFT_OVER.format(destroy=destroy), preloaded=True)
    assert (done.returncode, done.stdout.count("done")) == (0, 2), done.text
    assert len(re.findall(r"warning.* was given up: dcoll.shutdown\(\) came before", done.stderr)) == 2, done.text
