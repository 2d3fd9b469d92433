"""What dcoll takes for granted of CUDA and of NCCL is what their headers say. Needs the headers, and no GPU."""

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def folder_of(header: str, *places: str) -> str:
    """Where it is, or the test is skipped."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    for folder in (*packages.glob("*/include"), *map(Path, places)):
        if (folder / header).exists():
            return str(folder)
    pytest.skip(f"needs headers: {header}")


def cudas() -> str:
    """With what cuda_runtime.h includes, and the packages that torch brings leave out."""
    installed = (str(folder) for folder in Path("/usr/local").glob("cuda-*/include"))
    return folder_of("crt/host_config.h", "/usr/local/cuda/include", *installed)


def compile_with(source: str, *folders: str) -> None:
    compiler = shutil.which("g++") or "c++"
    include = [f"-I{folder}" for folder in folders]
    subprocess.run([compiler, "-std=c++20", "-fsyntax-only", *include, str(HERE / source)], check=True)


def test_nccls_header_says_what_we_take_for_granted() -> None:
    compile_with("nccl_header.cc", folder_of("nccl.h", "/usr/include"), cudas())


def test_cudas_header_says_what_we_take_for_granted() -> None:
    toolkit = cudas()
    compile_with("cuda_header.cc", toolkit, folder_of("cuda.h", toolkit))


@pytest.mark.parametrize(
    ("source", "library"), [("cuda", "cuda"), ("virtual_memory", "cuda"), ("nccl", "nccl")], ids=["cuda", "vmm", "nccl"]
)
def test_all_that_is_looked_up_is_checked(source: str, library: str) -> None:
    uses = (HERE.parents[1] / f"csrc/device/{source}.cc").read_text()
    checked = (HERE / f"{library}_header.cc").read_text()
    names = re.findall(r'= find\("(\w+)"\)', uses)
    assert len(names) > 10
    assert [name for name in names if f"decltype({name})" not in checked] == []
