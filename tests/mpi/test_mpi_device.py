"""Collectives and the optimizer on tensors of the emulated device, whose results come late."""

import checks_collectives
import checks_device
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi

EMULATED = (("DCOLL_DEVICE", "emulated"),)
LAYOUTS = [(3, "auto"), (2, "mpi")]
# What they ask is otherwise on a device: poll() is not true before the copy back is done, messages say ", on emulated",
# and a group is one operation for each tensor.
OTHERWISE = {"check_barrier_and_many_in_flight", "check_mismatch", "check_a_refused_call_fails_alone"}


@pytest.mark.parametrize("check", names_of_checks(checks_device))
@pytest.mark.parametrize(("n", "transport"), LAYOUTS, ids=str)
def test_device(n: int, transport: str, check: str) -> None:
    expect(run_checks("checks_device", n, (*EMULATED, ("DCOLL_TRANSPORT", transport))), check)


@pytest.mark.parametrize("check", [one for one in names_of_checks(checks_collectives) if one not in OTHERWISE])
def test_collectives(check: str) -> None:
    expect(run_checks("checks_collectives", 2, EMULATED), check)
