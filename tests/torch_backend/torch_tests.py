"""One rank of a job that runs PyTorch's own tests of its backends: torch_tests.py FOLDER [NAME ... | --but NAME ...]

The tests ship in the wheel, as methods that each rank of a group runs (torch.testing._internal.distributed). They are
run as Gloo's, with dcoll wherever they say "gloo": so those that are for Gloo alone run too.
"""

import json
import os
import sys
import tempfile
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import dcoll as hvd
import dcoll.torch  # registers the backend
from dcoll.job import world

TIMEOUT = timedelta(seconds=8)


def with_dcoll(function: Any) -> Any:
    """A function of torch.distributed for which "gloo" is dcoll."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("backend", "")) == "gloo":
            kwargs["backend"] = "dcoll"
        return function(*(("dcoll" if type(one) is str and one == "gloo" else one) for one in args), **kwargs)

    return call


def disguise() -> None:
    real_backend = dist.get_backend
    for name in ("init_process_group", "new_group"):
        replaced = with_dcoll(getattr(c10d, name))
        for module in (dist, c10d):
            setattr(module, name, replaced)

    def backend(group: Any = None) -> str:
        name = real_backend(group)
        return "gloo" if name == "dcoll" else name

    for module in (dist, c10d):
        module.get_backend = backend  # type: ignore[attr-defined]


def cases(rank: int) -> type:
    from torch.testing._internal.distributed import distributed_test as theirs

    # The profiler's names of Gloo's calls, which dcoll has none of.
    theirs.PROFILING_SUPPORTED_BACKENDS = theirs.CUDA_PROFILING_SUPPORTED_BACKENDS = []
    theirs.SEND_RECV_PROFILING_SUPPORTED_BACKENDS = []
    theirs.Barrier.sync = lambda *_, **__: hvd.barrier()  # theirs counts files of processes

    class Case(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.rank = rank
            self.file_name = os.environ["THEIR_STORE"]

    return Case


def run(case: type, name: str) -> str:
    """What became of a test: "", "skipped: why", or a traceback."""
    try:
        test = case(name)
        dist.init_process_group("dcoll", timeout=TIMEOUT)
        hvd.barrier()
        getattr(test, name)()
        return ""
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as status:
        return f"skipped: it exits with {status.code}"
    except BaseException:
        return traceback.format_exc()


class Meeting:
    """Where the ranks meet between two tests, whatever became of their communicator."""

    def __init__(self) -> None:
        store = dist.TCPStore("localhost", 0, is_master=True) if hvd.rank() == 0 else None
        port = hvd.broadcast_object(store.port if store else 0, 0)
        self.store = store or dist.TCPStore("localhost", port)
        self.count = 0
        self.size, self.rank = hvd.size(), hvd.rank()
        self.hook = sys.excepthook

    def anywhere(self, here: bool) -> bool:
        """Whether it is so on any rank. Waits for all of them."""
        self.count += 1
        keys = [f"{self.count}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], str(int(here)))
        self.store.wait(keys, timedelta(seconds=100))
        return any(self.store.get(key) == b"1" for key in keys)

    def again(self) -> str:
        """Begin anew after whatever a test has left behind. The traceback of an end that failed, or ""."""
        failed = ""
        self.anywhere(False)
        if self.anywhere(not dist.is_initialized()):
            c10d._update_default_pg(None)  # there are ranks that cannot destroy it with the others
            for kept in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks):
                kept.clear()
        else:
            try:
                dist.destroy_process_group()
            except Exception:
                failed = traceback.format_exc()
        c10d._world.group_count = 0  # ranks that skipped a test made fewer groups
        sys.excepthook = self.hook  # each init_process_group() puts another one before it
        comm = world.WORLD.comm
        if self.anywhere(comm is None or comm.failure() != ""):
            try:
                hvd.shutdown()
            except Exception:
                failed = traceback.format_exc()
            self.anywhere(False)
            hvd.init()
        return failed


def main(folder: str, *chosen: str) -> None:
    hvd.init()
    rank = hvd.rank()
    os.environ["BACKEND"], os.environ["WORLD_SIZE"] = "gloo", str(hvd.size())
    os.environ["TEMP_DIR"] = hvd.broadcast_object(tempfile.mkdtemp(), 0)
    os.environ["THEIR_STORE"] = hvd.broadcast_object(tempfile.mktemp(), 0)
    for name in ("barrier", "test_dir", "init_dir"):
        (Path(os.environ["TEMP_DIR"]) / name).mkdir(exist_ok=True)
    disguise()
    meeting = Meeting()
    case = cases(rank)
    results: dict[str, str] = {}
    names = sorted(name for name in dir(case) if name.startswith("test_"))
    if chosen:
        names = [name for name in names if (name in chosen) != (chosen[0] == "--but")]
    for name in names:
        begin = time.monotonic()
        torch.manual_seed(0)
        results[name] = run(case, name)
        (Path(folder) / f"{rank}.json").write_text(json.dumps(results))  # what a rank found survives what comes next
        results[name] = meeting.again() + results[name]
        if rank == 0:
            print(f"{name} {time.monotonic() - begin:.1f} s: {results[name].strip().splitlines()[-1:]}", flush=True)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(results))
    hvd.barrier()  # rank 0 has the store, which the others may still be asking


if __name__ == "__main__":
    main(*sys.argv[1:])
