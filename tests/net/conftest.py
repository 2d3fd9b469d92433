"""Several hosts for tests: a lab of network namespaces (bench/netlab), or a skip with the reason why there is none."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path += [str(ROOT / "bench"), str(ROOT / "tests" / "mpi"), str(ROOT / "tests" / "torch_backend")]

import netlab  # noqa: E402

Hosts = Callable[[int], netlab.Lab]


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """hosts(4): a lab of 4 hosts with links of 10 Gbit/s, made once. Its launcher(SLOTS) is for mpirun.launch."""
    try:
        netlab.check()
    except netlab.CannotError as reason:
        pytest.skip(f"needs root: no lab of several hosts here: {reason}")
    labs: dict[int, netlab.Lab] = {}

    def of(count: int) -> netlab.Lab:
        if count not in labs:
            labs[count] = netlab.up(f"test-{os.getpid()}-{count}", count, "10gbit")
        return labs[count]

    yield of
    for lab in labs.values():
        netlab.down(lab.name)
