"""Settings of all Python tests."""

import os
import sys
from pathlib import Path

import pytest

# tests/mpi compares with the same reference as tests/python.
sys.path.append(str(Path(__file__).parent / "python"))
sys.path.append(str(Path(__file__).parent / "mpi"))
# Ranks outnumber cores on most machines that run the tests: torch's own threads would only fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A test that would wait for ever fails, and says which ranks were waited for.
os.environ.setdefault("DCOLL_TIMEOUT", "20")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that start mpirun themselves are skipped where there is none, like those that do so through mpirun.py."""
    if item.get_closest_marker("mpi"):
        import mpirun

        mpirun.find_launcher()
