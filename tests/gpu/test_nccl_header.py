"""What dcoll takes for granted of NCCL is what its header says. Needs NCCL's and CUDA's headers, and no GPU."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest


def folder_of(header: str, *places: str) -> str:
    """Where it is, or the test is skipped."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    for folder in (*packages.glob("*/include"), *map(Path, places)):
        if (folder / header).exists():
            return str(folder)
    pytest.skip(f"needs headers: {header}")


def test_nccls_header_says_what_we_take_for_granted() -> None:
    nccl = folder_of("nccl.h", "/usr/include")
    # What cuda_runtime.h includes, and the packages that torch brings leave out.
    cuda = folder_of(
        "crt/host_config.h", "/usr/local/cuda/include", *map(str, Path("/usr/local").glob("cuda-*/include"))
    )
    source = Path(__file__).with_name("nccl_header.cc")
    compiler = shutil.which("g++") or "c++"
    subprocess.run([compiler, "-std=c++20", "-fsyntax-only", f"-I{nccl}", f"-I{cuda}", str(source)], check=True)
