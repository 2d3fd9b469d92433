"""torchrun on several hosts, without MPI: ranks meet in the store and send over UCX."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import checks_hosts
import checks_torch_messages
import netlab
import pytest
from mpirun import expect, names_of_checks, run_checks

from dcoll import _C

Hosts = Callable[[int], netlab.Lab]
UCX = Path(_C.__file__).with_name("libdcoll_ucx.so")

CASES = [
    pytest.param(module, check, id=f"{module.__name__}-{check}")
    for module in (checks_hosts, checks_torch_messages)
    for check in names_of_checks(module)
    if check != "check_congestion_control"  # which would find the connection to torch's store too
]


@pytest.mark.parametrize(("module", "check"), CASES)
def test_torchrun_on_two_hosts(hosts: Hosts, module: ModuleType, check: str) -> None:
    """Two ranks on each, which share memory. The first module uses dcoll's calls, the second PyTorch's over dcoll."""
    if not UCX.exists():
        pytest.skip("needs ucx: dcoll was built without it")
    launcher = (sys.executable, str(Path(__file__).parent / "agents.py"), hosts(2).name)
    environment = (("RANKS_PER_HOST", "2"), ("DCOLL_CALIBRATE", "off"), ("DCOLL_TCP_CONGESTION", "reno"))
    expect(run_checks(module.__name__, 4, environment, launcher), check)
