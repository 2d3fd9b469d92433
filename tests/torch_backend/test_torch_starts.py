"""How a process group begins where ranks meet in a store, and what begins again."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from mpirun import TIMEOUT_S, TORCHRUN, launch, python_for


def run_ranks(n: int, script: str, *args: str, **env: str) -> list[str]:
    """What n processes have said that nobody but torch knows to be ranks: python -c SCRIPT RANK N ARGS..."""
    ranks = [
        subprocess.Popen(
            [*python_for(str(rank)), "-c", script, str(rank), str(n), *args],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | env,
        )
        for rank in range(n)
    ]  # fmt: skip
    return [f"{rank.communicate(timeout=TIMEOUT_S)[0]}status {rank.returncode}" for rank in ranks]


def expect_ended(told: list[str]) -> None:
    assert all(text.endswith("ended\nstatus 0") for text in told), "\n".join(told)


A_PART_FIRST = """
import sys
import torch.distributed as dist
import dcoll.torch

dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=int(sys.argv[1]), world_size=3)
if dist.get_rank() < 2:
    try:
        dist.new_group([0, 1], backend="dcoll", use_local_synchronization=True)
    except dcoll.DcollError as error:
        assert "with all ranks" in str(error), error
        print("ended")
else:
    print("ended")
"""

BESIDE_GLOO = """
import sys
import torch
import torch.distributed as dist
import dcoll.torch

url = f"file://{sys.argv[3]}"
rank, size = int(sys.argv[1]), 3
dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
whole = dist.new_group(backend="dcoll")
part = dist.new_group([0, 2], backend="dcoll")
tensor = torch.ones(3)
dist.all_reduce(tensor, group=whole)
if rank != 1:
    dist.all_reduce(tensor, group=part)
dist.all_reduce(tensor)
assert tensor.tolist() == [15.0] * 3, tensor
if rank != 1:
    dist.destroy_process_group(whole)  # waits for nobody
    dist.all_reduce(tensor, group=part)
    assert tensor.tolist() == [30.0] * 3, tensor
dist.barrier()
if rank == 1:
    dist.destroy_process_group(whole)
tensor = torch.ones(3)
dist.all_reduce(tensor, group=dist.new_group(backend="dcoll"))
assert tensor.tolist() == [3.0] * 3, tensor
dist.destroy_process_group()
dist.init_process_group("gloo", init_method=url + "-2", rank=(rank + 1) % size, world_size=size)
try:
    dist.new_group(backend="dcoll")
except dcoll.ArgumentError as error:
    assert f"rank {(rank + 1) % size} of 3 of the default group, but rank {rank} of 3" in str(error), error
print("ended")
"""

ABORTED_BESIDE_GLOO = """
import sys
import torch
import torch.distributed as dist
import dcoll.torch

rank, size = int(sys.argv[1]), 3
for again in range(2):
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}{again}", rank=rank, world_size=size)
    for _ in range(2):
        whole = dist.new_group(backend="dcoll")
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=whole)
        assert tensor.tolist() == [3.0] * 3, tensor
        if rank == 0:
            whole.abort()
        try:
            dist.barrier(group=whole)
        except dcoll.DcollError as error:
            assert "aborted" in str(error), error
    dist.destroy_process_group()
print("ended")
"""


IN_ANOTHER_ORDER = """
import sys
import torch
import torch.distributed as dist
import dcoll.torch

rank, size = int(sys.argv[1]), 3
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=size)
for order in ([2, 0, 1], [0, 2]):
    group = dist.new_group(order, backend="dcoll", sort_ranks=False)
    if rank in order:
        gathered = [torch.zeros(1) for _ in order]
        dist.all_gather(gathered, torch.tensor([float(rank)]), group=group)
        assert [one.item() for one in gathered] == order, gathered
        for root in order:
            tensor = torch.tensor([float(rank)])
            dist.broadcast(tensor, root, group=group)
            assert tensor.item() == root, (tensor, root)
dist.destroy_process_group()
print("ended")
"""


@pytest.mark.parametrize(
    "script",
    [BESIDE_GLOO, ABORTED_BESIDE_GLOO, A_PART_FIRST, IN_ANOTHER_ORDER],
    ids=["", "aborted", "a part first", "in another order"],
)
def test_groups_beside_gloo(tmp_path: Path, script: str) -> None:
    expect_ended(run_ranks(3, script, str(tmp_path / "store"), DCOLL_TIMEOUT="20"))


WITH_A_FILE = """
import logging
import sys
import torch
import torch.distributed as dist
import dcoll.torch

logging.basicConfig(level=logging.INFO)
rank, size, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.FileStore(file, size)
for again in range(4):  # the same store, and another one each time
    other = dist.FileStore(f"{file}{again}", size)
    dist.init_process_group("dcoll", store=store if again % 2 else other, rank=rank, world_size=size)
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    assert tensor.item() == size * (size + 1) / 2
    ends = sorted({0, size - 1})
    group = dist.new_group(ends)
    if rank in ends:
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == size * (size + 1) / 2 * len(ends)
    dist.destroy_process_group()
print("ended")
"""


@pytest.mark.parametrize("env", [{}, {"SLURM_STEP_NUM_TASKS": "1"}, {"OMPI_COMM_WORLD_SIZE": "1"}], ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_ranks_meet_in_a_file(tmp_path: Path, env: dict[str, str], size: int) -> None:
    """Without MPI and without a launcher, as torch's own tests start theirs; in a shell of a job of one, too."""
    expect_ended(run_ranks(size, WITH_A_FILE, str(tmp_path / "store"), **env))


@pytest.mark.parametrize("variable", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_ranks_of_a_launcher_whose_mpi_is_not_here_meet_in_a_file(tmp_path: Path, variable: str) -> None:
    """As under srun without PMI, under another MPI's mpirun, and where dcoll was built without MPI."""
    told = run_ranks(3, WITH_A_FILE, str(tmp_path / "store"), **{variable: "3"})
    expect_ended(told)
    assert all("the ranks meet in the store of init_process_group(): " in text for text in told), "\n".join(told)


WITH_AN_ADDRESS = """
import os, socket, sys, time
import torch
import torch.distributed as dist
import dcoll.torch

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
if sys.argv[1] == "0":
    open(sys.argv[3] + ".part", "w").write(str(port))
    os.rename(sys.argv[3] + ".part", sys.argv[3])
while not os.path.exists(sys.argv[3]):
    time.sleep(0.02)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=open(sys.argv[3]).read())
dist.init_process_group("dcoll", rank=int(sys.argv[1]), world_size=int(sys.argv[2]))
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert tensor.item() == 3
dist.destroy_process_group()
print("ended")
"""


def test_rank_and_size_in_the_call_and_the_address_in_the_environment(tmp_path: Path) -> None:
    """As scripts for Slurm do."""
    expect_ended(run_ranks(3, WITH_AN_ADDRESS, str(tmp_path / "port"), SLURM_STEP_NUM_TASKS="3"))


AT_AN_ADDRESS = """
import os
import torch
import torch.distributed as dist
import dcoll.torch

address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
for _ in range(2):
    dist.init_process_group("dcoll")
    assert os.environ["MASTER_ADDR"] == address, os.environ["MASTER_ADDR"]
    assert os.environ["MASTER_PORT"] == port, os.environ["MASTER_PORT"]
    dist.TCPStore(address, int(port), wait_for_workers=False).check([""])
    dist.barrier()  # rank 0's store ends with its group
    dist.destroy_process_group()
print("ended")
"""


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_the_users_address_and_port_stay() -> None:
    """Of mpirun's hosts one may have several names, of which not all are known to the others, and a firewall may leave
    one port open."""
    done = launch(2, "-c", AT_AN_ADDRESS, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    assert done.returncode == 0, done.text
    assert done.stdout.count("ended") == 2


AT_A_PORT_THAT_IS_TAKEN = """
import os
import torch.distributed as dist
import dcoll.torch

port = os.environ["MASTER_PORT"]
try:
    dist.init_process_group("dcoll")
except dcoll.ArgumentError as error:
    assert f"MASTER_PORT={port} (" in str(error) and "1 to 65535" in str(error), error
    del os.environ["MASTER_PORT"]
dist.init_process_group("dcoll")
dist.destroy_process_group()
print("ended")
"""


@pytest.mark.parametrize("port", ["taken", "70000", "none"])
def test_a_port_where_rank_0_cannot_listen(port: str) -> None:
    """All ranks hear of it, and may try again."""
    with socket.create_server(("", 0)) as taken:
        given = str(taken.getsockname()[1]) if port == "taken" else port
        done = launch(2, "-c", AT_A_PORT_THAT_IS_TAKEN, MASTER_PORT=given)
    assert done.returncode == 0, done.text
    assert done.stdout.count("ended") == 2


AFTER_A_FAILURE = """
import os
import sys
import torch
import torch.distributed as dist
import dcoll.torch

rank, size = int(sys.argv[1]), int(sys.argv[2])
store = dist.FileStore(sys.argv[3], size)
os.environ["DCOLL_SLICE_KB"] = str(16 << rank % 2)
try:
    dist.init_process_group("dcoll", store=store, rank=rank, world_size=size)
except dcoll.DcollError as error:
    assert "DCOLL_SLICE_KB" in str(error), error
    del os.environ["DCOLL_SLICE_KB"]
for _ in range(2):
    dist.init_process_group("dcoll", store=store, rank=rank, world_size=size)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size
    dist.destroy_process_group()
print("ended")
"""


def test_again_after_an_init_that_failed_on_all_ranks(tmp_path: Path) -> None:
    """In the same store: the next time in a part of its own, and the time after that in the first one's."""
    expect_ended(run_ranks(3, AFTER_A_FAILURE, str(tmp_path / "store"), DCOLL_TIMEOUT="20"))


DIES_ONCE = """
import os, signal
import torch
import torch.distributed as dist
import dcoll.torch

dist.init_process_group("dcoll")
dist.barrier()
if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert tensor.item() == 2
dist.destroy_process_group()
print("ended")
"""


def test_a_restarted_gang_begins_anew() -> None:
    """The agent's store is that of the first attempt."""
    launcher = (*TORCHRUN[:-1], "--max-restarts", "1", TORCHRUN[-1])
    done = launch(2, "-c", DIES_ONCE, launcher=launcher)
    assert done.returncode == 0, done.text
    assert done.stdout.count("ended") == 2, done.text


WITHOUT_THE_LAST = """
import glob, os, signal, sys, time
import torch
import torch.distributed as dist
import dcoll.torch

rank, size, file, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
store = dist.FileStore(file, size)
dist.init_process_group("dcoll", store=store, rank=rank, world_size=size)
dist.barrier()
if rank == size - 1:
    time.sleep(0.3)  # the others are there by then
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + 30
    while len(glob.glob(file + ".told*")) < size - 1 and time.monotonic() < end:
        time.sleep(0.02)
    os._exit(0)
try:
    dist.new_group(list(range(size)))
except RuntimeError as error:
    print(type(error).__name__, error, flush=True)
    open(f"{file}.told{rank}", "w").close()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("what", "error"),
    [("dies", "PeerError .*rank 2 .*died"), ("sleeps", "TimeoutError .*waiting for rank 2 of 3")],
)
def test_a_member_that_does_not_come_to_a_group(tmp_path: Path, what: str, error: str) -> None:
    told = run_ranks(3, WITHOUT_THE_LAST, str(tmp_path / "store"), what, DCOLL_TIMEOUT="4")
    for text in told[:2]:
        assert re.search(error, text), "\n".join(told)


BY_SPAWN = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing
import dcoll.torch

def run(rank, file):
    dist.init_process_group("dcoll", init_method=f"file://{file}", rank=rank, world_size=2)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(run, (sys.argv[1],), nprocs=2)
    print("ended")
"""


def test_ranks_of_torch_multiprocessing(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(BY_SPAWN)
    command = [sys.executable, str(script), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.stdout, done.returncode) == ("ended\n", 0), done.stderr
