"""The code that nvcc makes of the kernels: memory is read and written 16 bytes at a time. Needs nvcc and no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dcoll import _C

ROOT = Path(__file__).parents[2]
WIDE = r"\.(?:v4\.\w32|v2\.\w64)\b"


def nvcc() -> str:
    """The compiler, looked for as cmake/cuda.cmake does; "" where there is none."""
    if compiler := os.environ.get("CUDACXX"):
        return compiler
    folders = [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    path = os.pathsep.join([*folders, os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    return shutil.which("nvcc", path=path) or ""


def not_wide(ptx: str) -> dict[str, str]:
    """The kernels without a load, or without a store, of 16 bytes, and which of the two. PTX is split per `.entry`."""
    found = {}
    for name, body in re.findall(r"\.entry\s+(\w+)(.*?)(?=\.entry|\Z)", ptx, re.DOTALL):
        lacking = [what for what in ("ld", "st") if not re.search(rf"\b{what}\.global(?:\.\w+)*?{WIDE}", body)]
        if lacking:
            found[name] = " and ".join(lacking)
    return found


def compiled(source: str, tmp_path: Path) -> str:
    """The PTX of a file, or the test is skipped."""
    if not _C.cuda_built or not (compiler := nvcc()):
        pytest.skip("needs nvcc: a build with CUDA, and the compiler that made it")
    ptx = tmp_path / "kernels.ptx"
    options = ["-std=c++20", "-O3", "-DNDEBUG", f"-I{ROOT / 'csrc'}", "-arch=compute_80", "-ptx", "-o", str(ptx)]
    command = [compiler, *options, str(ROOT / "csrc/kernels" / source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return ptx.read_text()


@pytest.mark.parametrize(("source", "kernels"), [("reduce_cuda.cu", 114), ("pack_cuda.cu", 1)])
def test_every_kernel_loads_and_stores_16_bytes(source: str, kernels: int, tmp_path: Path) -> None:
    """ptxas keeps a vector access of PTX whole, so what is wide there is wide on the device."""
    text = compiled(source, tmp_path)
    assert text.count(".entry") == kernels
    assert not_wide(text) == {}


@pytest.mark.parametrize(
    ("source", "narrow"),
    [
        # Encoded forms of 8 and 16 bits are narrower than the floats: 4 and 8 bytes of a thread.
        ("codec_cuda.cu", {"decode": "ld"}),
        # What is beside the passes over memory works on few elements.
        ("topk_cuda.cu", {"list": "st", "refine": "ld and st", "count": "ld and st", "scan": "ld and st",
                          "write": "ld and st"}),
        ("topk_sum_cuda.cu", {"sum": "ld", "starts": "ld and st"}),
    ],
)  # fmt: skip
def test_floats_of_encoders_are_wide_and_nothing_is_fused(source: str, narrow: dict[str, str], tmp_path: Path) -> None:
    text = compiled(source, tmp_path)
    found = {name: lacking for name, lacking in not_wide(text).items()
             if not any(f"{kernel}_kernel" in name and set(lacking.split(" and ")) <= set(allowed.split(" and "))
                        for kernel, allowed in narrow.items())}  # fmt: skip
    assert found == {}
    assert "fma.rn.f32" not in text


def test_the_rule_can_fail() -> None:
    load, store = "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];", "st.global.v2.u64 [%rd2], {%rd3, %rd4};"
    ptx = f"""
.visible .entry both(.param .u64 a) {{ {load} {store} ld.global.f32 %f1, [%rd1]; }}
.visible .entry split(.param .u64 a) {{ {load} st.global.u32 [%rd2], %r1; st.global.v2.u32 [%rd2], {{%r1, %r2}}; }}
.visible .entry neither(.param .u64 a) {{ ld.global.nc.u16 %rs1, [%rd1]; st.shared.v4.f32 [%rd2], {{%f1}}; }}
.visible .entry qualified(.param .u64 a) {{ ld.global.nc.v4.u32 {{}}, [%rd1]; st.global.wb.v4.u32 [%rd2], {{}}; }}
"""
    assert not_wide(ptx) == {"split": "st", "neither": "ld and st"}
