"""torch.distributed on the dcoll backend: every collective, groups, and what PyTorch builds on them."""

from types import ModuleType

import checks_torch_collectives
import checks_torch_groups
import checks_torch_parallel
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi

MODULES: dict[ModuleType, list[tuple[int, str]]] = {
    checks_torch_collectives: [(2, "auto"), (3, "auto"), (4, "auto"), (2, "mpi")],
    checks_torch_groups: [(2, "auto"), (4, "auto"), (3, "mpi")],
    checks_torch_parallel: [(2, "auto"), (4, "auto")],
}
CASES = [
    pytest.param(module.__name__, n, transport, check, id=f"{n}-{transport}-{check}")
    for module, layouts in MODULES.items()
    for n, transport in layouts
    for check in names_of_checks(module)
]


@pytest.mark.parametrize(("module", "n", "transport", "check"), CASES)
def test_torch(module: str, n: int, transport: str, check: str) -> None:
    expect(run_checks(module, n, (("DCOLL_TRANSPORT", transport),)), check)
