"""Collectives, optimizers and models on the emulated device, whose results come late, and models on one that
torch is made to see beside the CPU."""

from types import ModuleType

import checks_batch_norm
import checks_collectives
import checks_compression
import checks_device
import checks_device_compression
import checks_device_memory
import checks_device_models
import checks_device_pull
import checks_names
import checks_optimizer
import checks_optimizer_options
import checks_optimizer_uneven
import checks_process_sets
import checks_top_k
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = pytest.mark.mpi

EMULATED = (("DCOLL_DEVICE", "emulated"),)
PRETENDED = (("CHECKS_DEVICE", "pretended"), ("DCOLL_COMPRESS_LOCAL", "1"))
ONE_NODE = PRETENDED[:1]  # on which PowerSGD compresses nothing
LAYOUTS = [(3, "auto", "auto"), (3, "auto", "host"), (2, "mpi", "auto")]
# What they ask is otherwise on a device: poll() is not true before the copy back is done, and messages say
# ", on emulated".
OTHERWISE = {
    "check_barrier_and_many_in_flight", "check_mismatch", "check_a_refused_call_fails_alone",
    "check_a_mismatch_by_name",
}  # fmt: skip
OF_THE_CPU_TOO: list[ModuleType] = [
    checks_batch_norm, checks_collectives, checks_names, checks_optimizer, checks_optimizer_options,
    checks_optimizer_uneven, checks_process_sets,
]  # fmt: skip


BOTH = [(module.__name__, check) for module in (checks_device, checks_device_memory)
        for check in names_of_checks(module)]  # fmt: skip


@pytest.mark.parametrize(("module", "check"), BOTH)
@pytest.mark.parametrize(("n", "transport", "engine"), LAYOUTS, ids=str)
def test_device(n: int, transport: str, engine: str, module: str, check: str) -> None:
    env = ("DCOLL_TRANSPORT", transport), ("DCOLL_GPU_ENGINE", engine)
    expect(run_checks(module, n, (*EMULATED, *env)), check)


@pytest.mark.parametrize("check", names_of_checks(checks_device_pull))
@pytest.mark.parametrize(("n", "engine", "way"), [(3, "auto", "device, pull"), (2, "host", "")], ids=str)
def test_pulls(n: int, engine: str, way: str, check: str) -> None:
    env = ("DCOLL_GPU_ENGINE", engine), ("CHECKS_WAY", way)
    expect(run_checks("checks_device_pull", n, (*EMULATED, *env)), check)


@pytest.mark.parametrize("check", names_of_checks(checks_device_models))
@pytest.mark.parametrize(
    ("n", "env"), [(2, EMULATED), (1, PRETENDED), (2, PRETENDED), (3, PRETENDED), (2, ONE_NODE)], ids=str
)
def test_models(n: int, env: tuple[tuple[str, str], ...], check: str) -> None:
    expect(run_checks("checks_device_models", n, env), check)


COMPRESSED = [(module.__name__, check) for module in (checks_compression, checks_top_k)
              for check in names_of_checks(module)]  # fmt: skip


@pytest.mark.parametrize(("module", "check"), COMPRESSED)
def test_compression(module: str, check: str) -> None:
    expect(run_checks(module, 2, (*EMULATED, ("DCOLL_COMPRESS_LOCAL", "1"))), check)


BETWEEN = [
    (2, EMULATED),
    (2, (*EMULATED, ("DCOLL_COMPRESS_LOCAL", "1"))),
    (3, (*EMULATED, ("DCOLL_NODES", "0,0,1"))),
    (4, (*EMULATED, ("DCOLL_NODES", "0,1,2,3"))),
    (2, PRETENDED),
]


@pytest.mark.parametrize("check", names_of_checks(checks_device_compression))
@pytest.mark.parametrize(("n", "env"), BETWEEN, ids=str)
def test_16_bits_between_nodes(n: int, env: tuple[tuple[str, str], ...], check: str) -> None:
    expect(run_checks("checks_device_compression", n, env), check)


@pytest.mark.parametrize(("n", "env"), BETWEEN[:-1], ids=str)
def test_saturation_is_told(n: int, env: tuple[tuple[str, str], ...]) -> None:
    told = "float16 has no room for" in run_checks("checks_device_compression", n, env).stderr
    assert told == (env != EMULATED)


@pytest.mark.parametrize(
    ("module", "check"),
    [
        pytest.param(module.__name__, check, id=f"{module.__name__}-{check}")
        for module in OF_THE_CPU_TOO
        for check in names_of_checks(module)
        if check not in OTHERWISE
    ],
)
def test_of_the_cpu_too(module: str, check: str) -> None:
    n = 3 if module == "checks_process_sets" else 2  # sets of two ranks that are not the whole
    expect(run_checks(module, n, EMULATED), check)
