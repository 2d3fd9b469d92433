"""A rank that ends, or leaves a group, while others wait for it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mpirun import TIMEOUT_S, TORCHRUN, launch
from test_torch_backend import UCX
from test_torch_starts import run_ranks

WAITING = """
import sys
import time
import torch
import torch.distributed as dist
import dcoll.torch

def wait_for_1(what, group=None):
    if what == "recv":
        dist.recv(torch.ones(3), 1, group)
    elif what == "recv from any rank":
        dist.recv(torch.ones(3), None, group)
    elif what == "send":
        dist.send(torch.ones(1 << 18), 1, group)
    elif what == "new_group":
        dist.new_group([0, 1])
    else:
        dist.all_reduce(torch.ones(3), group=group)

"""

RAISES = (
    WAITING
    + """
rank, size, file, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("dcoll", store=dist.FileStore(file, size), rank=rank, world_size=size)
group = dist.new_group([0, 1])  # whose end must not keep rank 1 from saying so
dist.barrier(group=group)
try:
    if rank == 1:
        raise ValueError("the data ran out")
    wait_for_1(what)
except dcoll.DcollError as error:
    print(type(error).__name__, error)
finally:
    dist.destroy_process_group()
print("ended")
"""
)


@pytest.mark.parametrize("nodes", ["0,0", "0,1"], ids=["one node", "ucx"])
@pytest.mark.parametrize("what", ["recv", "recv from any rank", "send", "new_group", "all_reduce"])
def test_a_rank_that_raises_and_destroys_the_group_in_finally(tmp_path: Path, what: str, nodes: str) -> None:
    if nodes == "0,1" and not UCX.exists():
        pytest.skip("needs ucx: dcoll was built without it")
    told = run_ranks(2, RAISES, str(tmp_path / "store"), what, DCOLL_TIMEOUT="40", DCOLL_NODES=nodes)
    assert re.search(r"MismatchError .*rank 1 called shutdown.*ValueError: the data ran out", told[0]), told[0]
    assert told[0].endswith("ended\nstatus 0"), told[0]
    assert re.search(r"ValueError: the data ran out\n(.*\n)*status 1$", told[1]), told[1]


LEAVES_A_GROUP = (
    WAITING
    + """
dist.init_process_group("dcoll")
rank, size = dist.get_rank(), dist.get_world_size()
for what in ("recv", "send", "all_reduce"):
    group = dist.new_group(list(range(size)))
    dist.barrier(group=group)
    if rank == 1:
        dist.destroy_process_group(group)
    else:
        try:
            wait_for_1(what, group)
            raise AssertionError("rank 1 is not there")
        except dcoll.MismatchError as error:
            assert "rank 1 called shutdown" in str(error), error
        dist.destroy_process_group(group)
    dist.barrier()
dist.destroy_process_group()
print("ended")
"""
)


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["mpirun", "torchrun"])
@pytest.mark.parametrize("nodes", ["0,0,0", "0,0,1", "0,1,2"])
def test_a_rank_that_leaves_a_group(launcher: tuple[str, ...], nodes: str) -> None:
    if launcher and nodes != "0,0,0" and not UCX.exists():
        pytest.skip("needs ucx: dcoll was built without it")
    done = launch(3, "-c", LEAVES_A_GROUP, launcher=launcher, preloaded=True, DCOLL_TIMEOUT="40", DCOLL_NODES=nodes)
    assert done.returncode == 0, done.text
    assert done.stdout.count("ended") == 3, done.text


BY_MULTIPROCESSING = """
import multiprocessing
import sys
import time
import torch
import torch.distributed as dist
import dcoll.torch

def run(rank, file, what):
    dist.init_process_group("dcoll", store=dist.FileStore(file, 3), rank=rank, world_size=3)
    dist.barrier()
    if what == "ends":
        for _ in range(20 if rank > 0 else 0):
            time.sleep(0.1)
            dist.send(torch.ones(3), 3 - rank)
            dist.recv(torch.ones(3), 3 - rank)
    elif rank == 1:
        try:
            raise ValueError("the data ran out")
        except ValueError:
            if what == "exits":
                sys.exit(3)  # as torch.multiprocessing does
            raise
    else:
        try:
            dist.barrier()
        except dcoll.PeerError as error:
            print(error, flush=True)
            sys.exit(4)
    print("ended", flush=True)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    ranks = [context.Process(target=run, args=(rank, *sys.argv[2:])) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    print("statuses", *[rank.exitcode for rank in ranks])
"""


@pytest.mark.parametrize(
    ("method", "what"),
    [("fork", "ends"), ("fork", "raises"), ("fork", "exits"), ("spawn", "exits"), ("forkserver", "raises")],
)
def test_ranks_of_multiprocessing_that_destroy_nothing(tmp_path: Path, method: str, what: str) -> None:
    (script := tmp_path / "script.py").write_text(BY_MULTIPROCESSING)
    done = subprocess.run(
        [sys.executable, str(script), method, str(tmp_path / "store"), what],
        env=os.environ | {"DCOLL_TIMEOUT": "60"}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    text = f"{done.stdout}\n--- stderr\n{done.stderr}"
    if what == "ends":
        assert done.stdout.count("ended") == 3, text
        assert "statuses 0 0 0" in done.stdout, text
        assert "died" not in done.stderr, text
    else:
        assert done.stdout.count("rank 1: ValueError: the data ran out") == 2, text
        assert f"statuses 4 {3 if what == 'exits' else 1} 4" in done.stdout, text
        assert ("ValueError: the data ran out" in done.stderr) == (what == "raises"), text


ENDS_SLOWLY = """
import atexit
import os
import sys
import time
atexit.register(lambda: (time.sleep(4), print("ended", flush=True)))
import torch.distributed as dist
import dcoll.torch

rank, size, file, destroys = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "destroys"
dist.init_process_group("dcoll", store=dist.FileStore(file, size), rank=rank, world_size=size)
dist.barrier()
if destroys:
    dist.destroy_process_group()
os.environ["DCOLL_TIMEOUT"] = "1"
"""


@pytest.mark.parametrize("what", ["destroys", "leaves it"])
def test_a_slow_exit_handler(tmp_path: Path, what: str) -> None:
    told = run_ranks(2, ENDS_SLOWLY, str(tmp_path / "store"), what)
    for text in told:
        assert text.endswith("ended\nstatus 0" if what == "destroys" else "(DCOLL_TIMEOUT).\nstatus 1"), text
