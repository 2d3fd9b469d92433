"""torchrun on several hosts, without MPI: ranks meet in the store and send over UCX."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import checks_hosts
import checks_torch_messages
import netlab
import pytest
from mpirun import HERE, expect, launch, names_of_checks, run_checks

from dcoll import _C

Hosts = Callable[[int], netlab.Lab]
UCX = Path(_C.__file__).with_name("libdcoll_ucx.so")

CASES = [
    pytest.param(module, check, id=f"{module.__name__}-{check}")
    for module in (checks_hosts, checks_torch_messages)
    for check in names_of_checks(module)
    if check != "check_congestion_control"  # which would find the connection to torch's store too
]


def agents(lab: netlab.Lab) -> tuple[str, ...]:
    """The launcher."""
    if not UCX.exists():
        pytest.skip("needs ucx: dcoll was built without it")
    return (sys.executable, str(Path(__file__).parent / "agents.py"), lab.name)


@pytest.mark.parametrize(("module", "check"), CASES)
def test_torchrun_on_two_hosts(hosts: Hosts, module: ModuleType, check: str) -> None:
    """Two ranks on each, which share memory. The first module uses dcoll's calls, the second PyTorch's over dcoll."""
    launcher = agents(hosts(2))
    environment = (("RANKS_PER_HOST", "2"), ("DCOLL_CALIBRATE", "off"), ("DCOLL_TCP_CONGESTION", "reno"))
    expect(run_checks(module.__name__, 4, environment, launcher), check)


def test_a_killed_rank_of_another_host_is_named_at_once(hosts: Hosts, tmp_path: Path) -> None:
    """Long before DCOLL_TIMEOUT, by its lifeline or by UCX. Its agent ends with it, the others when their ranks do."""
    script, settings = str(HERE / "fault.py"), {"DCOLL_TIMEOUT": "300", "FAULT_FOLDER": str(tmp_path)}
    done = launch(3, script, "killed", timeout=150, launcher=agents(hosts(3)), **settings)
    for rank in (0, 2):
        said = rf"\[{rank}\] PeerError after [0-9.]+ s: .*rank 1 died: its (process|connection) ended"
        assert re.search(said, done.stdout), done.text
