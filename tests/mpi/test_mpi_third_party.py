"""Packages that were written for Horovod, as they are published, with dcoll in its place.

`make test-third-party` installs those that the package index has, and runs this file. The others are in repositories
only: the K-FAC preconditioner (github.com/gpauloski/kfac_pytorch, a version with Horovod) and GRACE
(github.com/sands-lab/grace): a checkout of each on PYTHONPATH. What is not installed is skipped.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from mpirun import HERE, launch

pytestmark = pytest.mark.mpi

# Which packages must be there, the one first that uses Horovod.
PACKAGES: dict[str, tuple[str, ...]] = {
    "ignite": ("ignite",),
    "lightning": ("pytorch_lightning",),
    "open_clip": ("open_clip_train", "open_clip", "pandas", "timm", "webdataset"),
    "kfac": ("kfac",),
    "factors": (),
    "grace": ("grace_dl",),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4}


def uses_horovod(package: str) -> bool:
    """Versions without, and other packages of the same name, do not count."""
    found = importlib.util.find_spec(package)
    folders = [Path(folder) for folder in (found.submodule_search_locations or [])] if found else []
    return any("horovod.torch" in file.read_text() for folder in folders for file in folder.rglob("*.py"))


@pytest.mark.parametrize("name", PACKAGES)
def test_two_ranks_train_as_one(name: str, horovod: Path) -> None:
    packages = PACKAGES[name]
    if packages and not uses_horovod(packages[0]):
        pytest.skip(f"needs {name}: a package {packages[0]} that uses Horovod (how: {Path(__file__).name})")
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {name}: {', '.join(missing)} (how: {Path(__file__).name})")
    for ranks in (1, 2):
        done = launch(ranks, str(HERE / "third_party.py"), name, str(horovod), preloaded=True)
        assert done.returncode == 0, done.text
    whole, first, second = (torch.load(horovod / f"{job}.pt") for job in ("0-of-1", "0-of-2", "1-of-2"))
    assert len(first) > 0
    for expected, got, other in zip(whole, first, second, strict=True):
        near = {"rtol": TOLERANCE[got.dtype], "atol": TOLERANCE[got.dtype]}
        if name == "kfac":
            torch.testing.assert_close(got, other, **near)
        else:
            assert torch.equal(got, other)
            torch.testing.assert_close(got, expected, **near)


def test_all_of_horovods_modules_are_dcolls(horovod: Path) -> None:
    """None of them is loaded twice."""
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import horovod.torch as hvd
import horovod.common.exceptions, horovod.common.process_sets, horovod.common.util, horovod.torch.elastic.sampler
import horovod.torch.mpi_ops
from horovod import run
from horovod.common.elastic import ObjectState
from horovod.torch.elastic.state import TorchState
from horovod.torch.optimizer import DistributedOptimizer
import dcoll
assert hvd is dcoll and run is dcoll.run and DistributedOptimizer is dcoll.DistributedOptimizer
assert TorchState is dcoll.elastic.TorchState and ObjectState is dcoll.elastic.ObjectState
names = {name for name, module in sys.modules.items() if getattr(module, "__name__", name).startswith("horovod")}
assert names == {"horovod"}, names
"""
    done = launch(1, "-c", program, str(horovod))
    assert done.returncode == 0, done.text
