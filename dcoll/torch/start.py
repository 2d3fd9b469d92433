"""`init_process_group("dcoll")` under mpirun, where nobody has set what env:// asks for."""

import importlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from dcoll.errors import ArgumentError
from dcoll.job.find_launcher import STORE_VARIABLES, find_launcher
from dcoll.job.objects import broadcast_object
from dcoll.job.world import WORLD, init
from dcoll.torch.groups import join

_filled_in: dict[str, str] = {}
"""What was set here. Another init_process_group() gets another store: the last one may not have ended everywhere."""


def fill_in(environ: Any, timeout: timedelta) -> Any:
    """Set what is missing of the variables that env:// and torch's users read. Collective over the job, which is joined
    where nobody has. Returns the store on rank 0, which listens before the others hear of its port."""
    join(timeout, init)
    comm = WORLD.comm
    assert comm is not None
    store, told = None, ("", 0, "")
    if comm.rank == 0:
        here = "localhost" if comm.num_nodes == 1 else socket.gethostname()
        address = here if _is_missing("MASTER_ADDR", environ) else environ["MASTER_ADDR"]
        chosen = "0" if _is_missing("MASTER_PORT", environ) else environ["MASTER_PORT"]
        try:
            if int(chosen) >> 16:
                raise ValueError("not a number of 16 bits")
            store = TCPStore("localhost", int(chosen), comm.size, is_master=True, wait_for_workers=False)
            told = address, store.port, ""
        except (ValueError, RuntimeError) as error:
            told = "", 0, f"rank 0 cannot listen at MASTER_PORT={chosen} ({str(error).splitlines()[0]})"
    address, port, problem = broadcast_object(comm, told, 0, "init_process_group")
    if problem:
        raise ArgumentError(
            f"init_process_group: {problem}. Allowed is a port that is free there, from 1 to 65535; or leave it unset: "
            "then one is found"
        )
    for name, value in (
        ("RANK", comm.rank),
        ("WORLD_SIZE", comm.size),
        ("LOCAL_RANK", comm.local_rank),
        ("LOCAL_WORLD_SIZE", comm.local_size),
        ("MASTER_ADDR", address),
        ("MASTER_PORT", port),
    ):
        if environ.get(name) != str(value):
            environ[name] = _filled_in[name] = str(value)
    return store


def _is_missing(name: str, environ: Any = os.environ) -> bool:
    return environ.get(name) in (None, _filled_in.get(name))


def under_mpirun(url: str) -> bool:
    """Whether this process is one of an MPI job, and nobody but fill_in() has told env:// about the others: neither the
    environment nor the rank= and world_size= of init_process_group(), which torch writes into the url."""
    launcher = find_launcher(os.environ)
    of_mpi = WORLD.comm is not None or (launcher is not None and not launcher.through_store)
    told = dict(parse_qsl(urlparse(url).query))
    return of_mpi and any(name.lower() not in told and _is_missing(name) for name in STORE_VARIABLES)


def from_environment(url: str, timeout: timedelta = dist.default_pg_timeout, **options: Any) -> Iterator[Any]:
    """torch's handler of env://, which knows MPI's launchers."""
    if not under_mpirun(url):
        yield from _torchs(url, timeout=timeout, **options)
        return
    store = fill_in(os.environ, timeout)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if store is None:
        port = int(os.environ["MASTER_PORT"])
        store = TCPStore(os.environ["MASTER_ADDR"], port, size, False, timeout, wait_for_workers=False)
    assert WORLD.comm is not None
    WORLD.comm.barrier_sync("init_process_group")  # rank 0 may destroy the group at once, and the store with it
    yield store, rank, size
    raise RuntimeError("Unable to perform re-rendezvous using env:// method")


# The module, whose name in its package is that of a function.
_HANDLERS: dict[str, Any] = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
_torchs = _HANDLERS["env"]


def install() -> None:
    _HANDLERS["env"] = from_environment
