"""Packages built on torch.distributed train over the backend. `make test-third-party` installs them and runs this."""

import importlib.util
from pathlib import Path

import pytest
import torch
from mpirun import HERE, TORCHRUN, launch

pytestmark = pytest.mark.mpi

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.parametrize("package", ["accelerate", "lightning", "deepspeed"])
def test_two_ranks_train_as_one(package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: make test-third-party installs it")
    script = str(HERE.parent / "torch_backend" / "torch_third_party.py")
    for ranks in (1, 2):
        done = launch(ranks, script, package, str(tmp_path), launcher=TORCHRUN, DS_ACCELERATOR="cpu")
        assert done.returncode == 0, done.text
    whole, first, second = (torch.load(tmp_path / f"{job}.pt") for job in ("0-of-1", "0-of-2", "1-of-2"))
    assert len(first) > 0
    for expected, got, other in zip(whole, first, second, strict=True):
        assert torch.equal(got, other)
        torch.testing.assert_close(got, expected, rtol=TOLERANCE[got.dtype], atol=TOLERANCE[got.dtype])
