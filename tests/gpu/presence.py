"""Whether the tests that need a GPU can run here, and whether it is an error if they cannot."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch

from dcoll import _C


def missing() -> str:
    """Why they cannot run; "" where they can."""
    if not _C.cuda.available():
        return f"dcoll finds no CUDA device: {_C.cuda.unavailable_reason()}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return ""


def expected() -> str:
    """What says that there is a GPU to test on; "" where nothing does."""
    if os.environ.get("DCOLL_REQUIRE_GPU") == "1":
        return "DCOLL_REQUIRE_GPU=1 is set"
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    gpus = [line for line in found.stdout.splitlines() if line.startswith("GPU ")]
    return f"nvidia-smi lists {gpus[0]}" if gpus else ""


def skip_module() -> None:
    """Skip the module that calls this where nobody expects a GPU."""
    if (why := missing()) and not expected():
        pytest.skip(f"needs gpu: {why}", allow_module_level=True)


def require(number: int = 1) -> None:
    """Fail where a GPU is expected that dcoll or torch does not see; skip where there are not so many."""
    if why := missing():
        pytest.fail(f"{expected()}, but {why}. To leave these tests out: pytest -m 'not gpu'", pytrace=False)
    if (found := torch.cuda.device_count()) < number:
        pytest.skip(f"needs gpus: {number}, and there is {found}")
