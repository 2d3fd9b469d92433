"""torch.distributed on the dcoll backend: every collective, groups, and what PyTorch builds on them."""

import importlib
import tomllib
from pathlib import Path
from types import ModuleType

import checks_torch_collectives
import checks_torch_device
import checks_torch_groups
import checks_torch_messages
import checks_torch_methods
import checks_torch_parallel
import checks_torch_uses
import pytest
import torch
import torch.distributed as dist
from mpirun import HERE, TORCHRUN, expect, launch, names_of_checks, run_checks

import dcoll.torch
from dcoll import _C
from dcoll.torch import registration
from dcoll.torch.process_group import BACKENDS_IN_PYTHON

pytestmark = pytest.mark.mpi

UCX = Path(_C.__file__).with_name("libdcoll_ucx.so")
MODULES: dict[ModuleType, list[tuple[int, str]]] = {
    checks_torch_collectives: [
        (2, "auto"),
        (3, "auto"),
        (4, "auto"),
        (2, "mpi"),
        (2, "emulated"),
        (3, "nodes"),
        (3, "torchrun nodes"),
        (1, "torchrun"),
    ],
    checks_torch_methods: [
        (2, "auto"),
        (3, "auto"),
        (2, "torchrun"),
        (2, "emulated"),
        (3, "nodes"),
        (2, "torchrun apart"),
    ],
    checks_torch_groups: [
        (2, "auto"),
        (4, "auto"),
        (3, "mpi"),
        (3, "torchrun nodes"),
        (2, "emulated"),
        (3, "nodes"),
    ],
    checks_torch_messages: [
        (2, "auto"),
        (4, "auto"),
        (3, "mpi"),
        (2, "torchrun"),
        (2, "torchrun apart"),
        (2, "emulated"),
        (3, "emulated mpi"),
    ],
    checks_torch_parallel: [
        (2, "auto"),
        (4, "auto"),
        (2, "torchrun"),
        (2, "emulated"),
        (2, "apart"),
        (2, "torchrun apart"),
    ],
    checks_torch_uses: [(2, "auto"), (4, "auto"), (3, "nodes"), (2, "torchrun")],
    checks_torch_device: [(2, "emulated"), (3, "emulated mpi")],
}
ENVIRONMENTS = {
    "auto": (),
    "torchrun": (),
    "apart": (("DCOLL_NODES", "0,1"),),
    "nodes": (("DCOLL_NODES", "0,0,1"),),
    "mpi": (("DCOLL_TRANSPORT", "mpi"),),
    "emulated": (("DCOLL_DEVICE", "emulated"),),
    "emulated mpi": (("DCOLL_DEVICE", "emulated"), ("DCOLL_TRANSPORT", "mpi")),
}
CASES = [
    pytest.param(module.__name__, n, transport, check, id=f"{n}-{transport}-{check}")
    for module, layouts in MODULES.items()
    for n, transport in layouts
    for check in names_of_checks(module)
]


@pytest.mark.parametrize(("module", "n", "transport", "check"), CASES)
def test_torch(module: str, n: int, transport: str, check: str) -> None:
    if transport in ("torchrun nodes", "torchrun apart") and not UCX.exists():
        pytest.skip("needs ucx: dcoll was built without it")
    launcher, setting = (
        (TORCHRUN, transport.removeprefix("torchrun").strip()) if transport.startswith("torchrun") else ((), transport)
    )
    expect(run_checks(module, n, ENVIRONMENTS[setting or "auto"], launcher), check)


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["mpirun", "torchrun"])
@pytest.mark.parametrize("name", ["ddp", "fsdp", "pipeline"])
def test_examples(name: str, launcher: tuple[str, ...]) -> None:
    script = str(HERE.parents[1] / "examples" / f"{name}.py")
    small = ("--steps", "2", "--layers", "2", "--width", "96", "--block", "32")
    done = launch(2, script, *small, launcher=launcher, preloaded=True)
    assert done.returncode == 0, done.text
    assert "step    2  loss" in done.text


WITH_DETAILS = """
import torch
import torch.distributed as dist
import dcoll.torch

dist.init_process_group("dcoll")
tensor = torch.ones(3)
for group in (None, dist.new_group([0, 1])):
    dist.all_reduce(tensor, group=group)
assert tensor.tolist() == [4.0] * 3
torch._C._distributed_c10d._dump_fr_trace_json()  # the flight recorder, which has all calls from 2.15 on
dist.destroy_process_group()
print("ended")
"""


IN_A_GROUP = """
import torch
import torch.distributed as dist
import dcoll.torch

dist.init_process_group("dcoll")
group = dist.new_group([0, 1, 2])
dist.barrier(group=group)
if dist.get_rank() == 1:
    raise RuntimeError("the data ran out")
dist.all_reduce(torch.ones(3), group=group)
"""


def test_an_exception_is_told_to_who_waits_in_a_group() -> None:
    done = launch(3, "-c", IN_A_GROUP, preloaded=True, DCOLL_TIMEOUT="60")
    assert done.returncode != 0, done.text
    assert done.stderr.count("PeerError: rank 1: RuntimeError: the data ran out") == 2, done.text


def test_distributed_debug_is_detail() -> None:
    """From 2.14 on PyTorch wraps backends then, and the wrapper cannot call one that is written in Python."""
    done = launch(2, "-c", WITH_DETAILS, TORCH_DISTRIBUTED_DEBUG="DETAIL", TORCH_FR_BUFFER_SIZE="100")
    assert done.returncode == 0, done.text
    assert done.stdout.count("ended") == 2


WITH_ANOTHER_FOR_CUDA = """
import sys
import torch
import torch.distributed as dist
import dcoll.torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
dist.init_process_group(sys.argv[1])
tensor = torch.ones(3)
for group in (dist.group.WORLD, dist.new_group([0, 1])):
    assert type(group._get_backend(CPU)).__name__ == "DcollBackend", group._get_backend(CPU)
    assert type(group._get_backend(CUDA)).__name__ == "ProcessGroupGloo", group._get_backend(CUDA)
    dist.all_reduce(tensor, group=group)
    dist.barrier(group)
    both = [None, None]
    dist.all_gather_object(both, dist.get_rank(), group=group)
    assert both == [0, 1]
    if torch.cuda.is_available():
        there = torch.ones(3, device=CUDA)
        dist.all_reduce(there, group=group)
        assert there.tolist() == [2.0] * 3
assert tensor.tolist() == [4.0] * 3
data = torch.ones(2, 4) * (dist.get_rank() + 1)
averaged = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4, bias=False))
averaged(data).sum().backward()
assert averaged.module.weight.grad.tolist() == [[3.0] * 4] * 4
sharded = fully_shard(torch.nn.Linear(4, 4, bias=False), mesh=init_device_mesh("cpu", (2,)))
sharded(data).sum().backward()
assert sharded.weight.grad.full_tensor().tolist() == [[3.0] * 4] * 4
dist.destroy_process_group()
print("ended")
"""


def needs_backends_in_python() -> None:
    if not BACKENDS_IN_PYTHON:
        pytest.skip("needs torch214: PyTorch 2.14 or later, make test-torch")


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["mpirun", "torchrun"])
@pytest.mark.parametrize("name", ["cpu:dcoll,cuda:gloo", "cuda:gloo,cpu:dcoll"])
def test_another_backend_has_the_tensors_of_cuda(name: str, launcher: tuple[str, ...]) -> None:
    """Gloo stands for NCCL, which starts only where each rank has a GPU."""
    needs_backends_in_python()
    done = launch(2, "-c", WITH_ANOTHER_FOR_CUDA, name, launcher=launcher, preloaded=True)
    assert done.returncode == 0, done.text
    assert done.stdout.count("ended") == 2


def test_found_by_its_name(tmp_path: Path) -> None:
    """What a package's metadata say, without an import."""
    needs_backends_in_python()
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    (info := tmp_path / "dcoll-0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dcoll\nVersion: 0\n")
    [(group, entries)] = project["entry-points"].items()
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *(f"{k} = {v}" for k, v in entries.items())]))
    script = tmp_path / "script.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('dcoll')\nprint(dist.get_backend())\n"
                      "dist.destroy_process_group()\n")  # fmt: skip
    done = launch(2, str(script), launcher=TORCHRUN, PYTHONPATH=f"{tmp_path}:{HERE.parents[1]}")
    assert done.returncode == 0, done.text
    assert done.stdout.split() == ["dcoll"] * 2


BELOW_MPIRUN = """
import torch
import torch.distributed as dist
import dcoll.torch

dist.init_process_group("dcoll")
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert tensor.tolist() == [2.0] * 3
dist.destroy_process_group()
print("ended")
"""


def test_torchrun_below_mpirun() -> None:
    """Every worker of torchrun has inherited the place of the one process that mpirun has started."""
    done = launch(2, "-c", BELOW_MPIRUN, launcher=TORCHRUN, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0")
    assert done.returncode == 0, done.text
    assert done.stdout.count("ended") == 2


AGAIN = """
import torch
import torch.distributed as dist
import dcoll.torch
from dcoll.job.lifecycle import GROUPS

for last in ("destroyed", "aborted", "destroyed", "aborted", "destroyed"):
    dist.init_process_group("dcoll")
    assert GROUPS == []  # nothing of the last time
    rank = dist.get_rank()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3
    part = dist.new_group([0])
    if last == "destroyed":
        dist.destroy_process_group()
        continue
    if rank == 0:
        dist.distributed_c10d._abort_process_group()
    else:
        try:
            dist.barrier()
        except dcoll.DcollError as error:
            assert "aborted" in str(error), error
        dist.distributed_c10d._abort_process_group()
print("ended")
"""


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["mpirun", "torchrun"])
def test_the_default_group_is_made_again(launcher: tuple[str, ...]) -> None:
    """In the store that torch has of it, after an end of either kind."""
    done = launch(2, "-c", AGAIN, launcher=launcher, preloaded=True, DCOLL_TIMEOUT="20")
    assert done.returncode == 0, done.text
    assert done.stdout.count("ended") == 2


BOUND = """
import torch
import torch.distributed as dist
import dcoll.torch

dist.init_process_group("dcoll", device_id=torch.device("cpu", 0))
group = dist.new_group([0])
tensor = torch.ones(3)
dist.all_reduce(tensor)
if dist.get_rank() == 0:
    dist.all_reduce(tensor, group=group)
assert tensor.tolist() == [2.0] * 3
dist.destroy_process_group()
print("ended")
"""


def test_a_group_that_is_bound_to_a_device() -> None:
    """torch tells the ranks that are not in a new group to take part in splitting it off."""
    needs_backends_in_python()
    if torch.__version__.startswith("2.14."):
        pytest.skip("PyTorch 2.14 itself refuses a device_id that is not an accelerator's")
    done = launch(2, "-c", BOUND, launcher=TORCHRUN, preloaded=True)
    assert done.returncode == 0, done.text
    assert done.stdout.count("ended") == 2


def test_the_devices_are_those_of_pytorchs_build() -> None:
    """PyTorch asks for a GPU where a backend says that it has the tensors of one (ShardedTensor.gather)."""
    registration.register()
    devices = ["cpu"] if torch.version.cuda is None else ["cpu", "cuda"]
    assert dist.Backend.backend_capability["dcoll"] == devices


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    with pytest.raises(ImportError, match=r"2\.12\.1\+cpu, but needs 2\.13"):
        importlib.reload(dcoll.torch)


WITH_A_TIMEOUT = """
import os
del os.environ["DCOLL_TIMEOUT"]
from datetime import timedelta
import torch.distributed as dist
import dcoll.torch
from dcoll.job.world import WORLD

dist.init_process_group("dcoll", timeout=timedelta(seconds=1234))
assert WORLD.comm.timeout_s == 1234, WORLD.comm.timeout_s
assert "DCOLL_TIMEOUT" not in os.environ
dist.destroy_process_group()  # at once: no rank may still look for the store
print("ended")
"""


IN_GROUPS_TOO = """
import os
del os.environ["DCOLL_TIMEOUT"]
from datetime import timedelta
import torch
import torch.distributed as dist
import dcoll.torch

def timeout_of(group):
    return group._get_backend(torch.device("cpu"))._comm.timeout_s

dcoll.init()
dist.init_process_group("dcoll", timeout=timedelta(hours=2))
assert timeout_of(dist.group.WORLD) == 7200, timeout_of(dist.group.WORLD)
assert timeout_of(dist.new_group([0, 1])) == 7200, timeout_of(dist.new_group([0, 1]))
assert timeout_of(dist.new_group([0, 1], timeout=timedelta(seconds=70))) == 70
dist.destroy_process_group()
print("ended")
"""

AFTER_A_SHORT_ONE = """
import os
del os.environ["DCOLL_TIMEOUT"]
from datetime import timedelta
import torch.distributed as dist
import dcoll.torch
from dcoll.job.world import WORLD

for given, expected in ((timedelta(seconds=30), 30), (None, 1800)):
    dist.init_process_group("dcoll", timeout=given)
    assert WORLD.comm.timeout_s == expected, WORLD.comm.timeout_s
    dist.destroy_process_group()
print("ended")
"""


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["mpirun", "torchrun"])
@pytest.mark.parametrize(
    "script", [WITH_A_TIMEOUT, IN_GROUPS_TOO, AFTER_A_SHORT_ONE], ids=["", "in groups too", "after a short one"]
)
def test_the_timeout_is_the_jobs(script: str, launcher: tuple[str, ...]) -> None:
    done = launch(2, "-c", script, launcher=launcher, preloaded=True)
    assert done.returncode == 0, done.text
    assert done.stdout.count("ended") == 2
