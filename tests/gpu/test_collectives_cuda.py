"""The checks of tests/mpi for tensors of a device on a GPU, which the ranks share."""

from __future__ import annotations

import checks_device
import checks_device_compression
import checks_device_memory
import checks_device_models
import checks_device_pull
import checks_nccl
import checks_nccl_compression
import checks_torch_device
import presence
import pytest
from mpirun import expect, names_of_checks, run_checks

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]
presence.skip_module()

CUDA = (("CHECKS_DEVICE", "cuda"), ("DCOLL_COMPRESS_LOCAL", "1"))


BOTH = [(module.__name__, check) for module in (checks_device, checks_device_memory)
        for check in names_of_checks(module)]  # fmt: skip


@pytest.mark.parametrize(("module", "check"), BOTH)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("engine", ["auto", "host"])
def test_device(engine: str, n: int, module: str, check: str) -> None:
    presence.require()
    expect(run_checks(module, n, (("DCOLL_GPU_ENGINE", engine),)), check)


@pytest.mark.parametrize("check", names_of_checks(checks_device_compression))
@pytest.mark.parametrize(("n", "env"), [(1, ()), (2, ()), (3, (("DCOLL_NODES", "0,0,1"),))], ids=str)
def test_16_bits_between_nodes(n: int, env: tuple[tuple[str, str], ...], check: str) -> None:
    presence.require()
    expect(run_checks("checks_device_compression", n, env), check)


@pytest.mark.parametrize("check", names_of_checks(checks_nccl))
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("engine", ["auto", "nccl"])
def test_nccl(engine: str, n: int, check: str) -> None:
    presence.require(n)
    expect(run_checks("checks_nccl", n, (("DCOLL_GPU_ENGINE", engine), ("CHECKS_GPU", "own"))), check)


@pytest.mark.parametrize("check", names_of_checks(checks_device_pull))
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("engine", "way"), [("dcoll", "device, pull"), ("host", "")])
def test_pulls(engine: str, way: str, n: int, check: str) -> None:
    presence.require()
    expect(run_checks("checks_device_pull", n, (("DCOLL_GPU_ENGINE", engine), ("CHECKS_WAY", way))), check)


@pytest.mark.parametrize("check", names_of_checks(checks_device_pull))
@pytest.mark.parametrize("n", [2, 3])
def test_pulls_by_nccl(n: int, check: str) -> None:
    presence.require(n)
    env = ("DCOLL_GPU_ENGINE", "nccl"), ("CHECKS_GPU", "own"), ("CHECKS_WAY", "NCCL")
    expect(run_checks("checks_device_pull", n, env), check)


@pytest.mark.parametrize("check", names_of_checks(checks_nccl_compression))
@pytest.mark.parametrize("env", [(), (("DCOLL_COMPRESS_LOCAL", "1"),)], ids=str)
def test_16_bits_by_nccl(env: tuple[tuple[str, str], ...], check: str) -> None:
    presence.require(2)
    expect(run_checks("checks_nccl_compression", 2, (("CHECKS_GPU", "own"), *env)), check)


@pytest.mark.parametrize("check", names_of_checks(checks_device_models))
@pytest.mark.parametrize("n", [1, 2, 3])
def test_models(n: int, check: str) -> None:
    presence.require()
    expect(run_checks("checks_device_models", n, CUDA), check)


@pytest.mark.parametrize("check", names_of_checks(checks_torch_device))
@pytest.mark.parametrize("n", [1, 2, 3])
def test_torch(n: int, check: str) -> None:
    presence.require()
    expect(run_checks("checks_torch_device", n), check)
