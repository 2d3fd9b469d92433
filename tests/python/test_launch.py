"""Who started this process, and does its MPI fit: decided before anything can hang."""

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from dcoll import ArgumentError, DcollError
from dcoll.job import mpi_startup, store_startup
from dcoll.job.find_launcher import Launcher, find_launcher

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"}
FOR_TORCH = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "size", "name"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1"}, 4, "Open MPI"),
        ({"PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}, 3, "MPICH"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "8"}, 2, "Open MPI"),
        ({"SLURM_STEP_NUM_TASKS": "8", "PMIX_RANK": "0"}, 8, "srun"),
        ({"PMIX_RANK": "0"}, None, "PMIx"),
        ({"MPI_LOCALNRANKS": "2"}, None, "MPICH"),
        (TORCHRUN, 2, "torchrun"),
        (TORCHRUN | {"SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"}, 2, "torchrun"),
        (TORCHRUN | {"OMPI_COMM_WORLD_SIZE": "4"}, 4, "Open MPI"),
        (FOR_TORCH, 3, "a launcher for torch.distributed"),
        (FOR_TORCH | {"SLURM_STEP_NUM_TASKS": "3"}, 3, "a launcher for torch.distributed"),
        (FOR_TORCH | {"SLURM_STEP_NUM_TASKS": "8", "PMIX_RANK": "0"}, 8, "srun"),
    ],
)
def test_launchers(env: dict[str, str], size: int | None, name: str) -> None:
    found = find_launcher(env)
    assert found is not None
    assert found.size == size
    assert name in str(found)
    assert found.through_store == ("torch" in name)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"RANK": "first"}, "RANK='first' is no number"),
        ({"RANK": "3"}, "RANK=3, WORLD_SIZE=3"),
        ({"MASTER_PORT": ""}, "MASTER_PORT='' is no number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR=''"),
    ],
)
def test_what_torchs_variables_may_not_be(wrong: dict[str, str], text: str) -> None:
    launcher = find_launcher(FOR_TORCH)
    assert launcher is not None
    with pytest.raises(ArgumentError, match=re.escape(text)):
        store_startup.open_store(launcher, FOR_TORCH | wrong)


@pytest.mark.parametrize("env", [{}, {"WORLD_SIZE": "2"}, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}])
def test_no_launcher(env: dict[str, str]) -> None:
    assert find_launcher(env) is None


class FakeMpi:
    """What the core would report of an MPI library."""

    rank = 0
    library_version = "Open MPI v5.0.11, package: a"
    library_path = "/somewhere/libmpi.so.40"
    thread_level = 3

    def __init__(self, size: int = 1) -> None:
        self.size = size


@pytest.mark.parametrize(
    ("launcher", "remedy"),
    [
        (Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE=4", 4), "mpirun that belongs to"),
        (Launcher("horovodrun", "HOROVOD_SIZE=4", 4), "mpirun -n 4 python"),
        (Launcher("Slurm's srun", "SLURM_STEP_NUM_TASKS=4", 4), "--mpi=pmix"),
    ],
)
def test_several_jobs_of_one_rank_are_refused(launcher: Launcher, remedy: str) -> None:
    with pytest.raises(DcollError) as caught:
        mpi_startup.check_launcher(FakeMpi(1), launcher)  # type: ignore[arg-type]
    message = str(caught.value)
    for part in (str(launcher), "sees 1", "Open MPI v5.0.11", "/somewhere/libmpi.so.40", remedy):
        assert part in message
    mpi_startup.check_launcher(FakeMpi(4), launcher)  # type: ignore[arg-type]


def mpi4py_module(version: str, initialized: bool) -> types.ModuleType:
    module = types.ModuleType("mpi4py.MPI")
    module.__file__ = "/elsewhere/MPI.so"
    module.Get_library_version = lambda: version + "\nmore\0"  # type: ignore[attr-defined]
    module.Is_initialized = lambda: initialized  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("version", "initialized"),
    [("MPICH Version: 4.2", True), ("Open MPI v5.0.11, package: a", False)],
    ids=["another library", "another copy"],
)
def test_another_mpi_in_mpi4py_is_refused(version: str, initialized: bool) -> None:
    with pytest.raises(DcollError) as caught:
        mpi_startup.check_mpi4py(FakeMpi(), mpi4py_module(version, initialized))  # type: ignore[arg-type]
    message = str(caught.value)
    for part in ("Open MPI v5.0.11", "/somewhere/libmpi.so.40", version, "pip install", "mpi4py"):
        assert part in message


def test_the_same_mpi_in_mpi4py_is_fine() -> None:
    mpi_startup.check_mpi4py(FakeMpi(), mpi4py_module("Open MPI v5.0.11, package: a", True))  # type: ignore[arg-type]
    mpi_startup.check_mpi4py(FakeMpi(), None)  # type: ignore[arg-type]


def test_a_job_without_the_plugin_is_refused(tmp_path: Path) -> None:
    launcher = Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE=2", 2)
    with pytest.raises(DcollError, match=r"built without MPI.*mpicc"):
        mpi_startup.load_mpi(launcher, tmp_path / "libdcoll_mpi.so")


def test_a_plugin_that_does_not_load_is_told(tmp_path: Path) -> None:
    launcher = Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE=2", 2)
    broken = tmp_path / "libdcoll_mpi.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(DcollError, match=r"could not be loaded.*LD_LIBRARY_PATH"):
        mpi_startup.load_mpi(launcher, broken)


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that no launcher started."""
    import os

    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_COMM", "PMI", "SLURM", "HOROVOD"))}
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, timeout=60, check=False
    )


def test_alone_it_is_a_job_of_one_and_touches_no_mpi() -> None:
    done = python(
        "import sys, dcoll as hvd\n"
        "assert 'torch' not in sys.modules\n"
        "try: hvd.rank()\n"
        "except ValueError as e: assert 'dcoll.init()' in str(e)\n"
        "else: raise SystemExit('rank() before init()')\n"
        "for _ in range(2):\n"
        "    hvd.init(); hvd.init()\n"
        "    assert hvd.is_initialized()\n"
        "    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)\n"
        "    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1) and hvd.is_homogeneous()\n"
        "    assert hvd.mpi_enabled() is False\n"
        "    import numpy\n"
        "    assert hvd.allreduce(numpy.ones(3)).sum() == 3\n"
        "    hvd.shutdown(); hvd.shutdown()\n"
        "    assert not hvd.is_initialized()\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libmpi' not in maps and 'libdcoll_mpi' not in maps and 'mpi4py' not in sys.modules\n"
        "print('fine')\n"
    )
    assert done.stdout == "fine\n", done.stderr
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    done = python("from dcoll import *\nimport dcoll\nassert callable(DistributedOptimizer) and dcoll.__version__")
    assert done.returncode == 0, done.stderr


def test_launched_without_mpi_it_never_becomes_jobs_of_one() -> None:
    done = python(
        "import pathlib, dcoll, dcoll.job.mpi_startup as mpi_startup\n"
        "mpi_startup.load_mpi.__defaults__ = (pathlib.Path('missing.so'),)\n"
        "dcoll.init()\n",
        OMPI_COMM_WORLD_SIZE="2",
    )
    assert done.returncode == 1
    assert "dcoll._C.DcollError" in done.stderr or "DcollError" in done.stderr
    assert "built without MPI" in done.stderr
