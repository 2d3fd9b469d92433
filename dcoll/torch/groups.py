"""Where the communicator of a process group comes from: the job's for the first, parts of it for the others."""

import atexit
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from dcoll import _C
from dcoll.errors import ArgumentError, DcollError
from dcoll.job.find_launcher import find_launcher
from dcoll.job.process_sets import REGISTRY
from dcoll.job.world import WORLD, init, init_through, shutdown

OPEN: list[_C.Communicator] = []
"""Of groups that were not destroyed yet, in the order in which they were made."""


def world(store: Any, rank: int, size: int, timeout: timedelta) -> tuple[_C.Communicator, bool]:
    """The communicator of all ranks, and whether destroying the group has to leave the job: it does where
    init_process_group() has joined it."""
    joined = WORLD.comm is None
    if joined:
        # One deadline, which names who is missing: torch's, unless DCOLL_TIMEOUT is set.
        given = "DCOLL_TIMEOUT" in os.environ
        if not given:
            os.environ["DCOLL_TIMEOUT"] = str(timeout.total_seconds())
        try:
            _join(store, rank, size)
        finally:
            if not given:
                del os.environ["DCOLL_TIMEOUT"]
    comm = WORLD.comm
    assert comm is not None
    if (comm.rank, comm.size) != (rank, size):
        if joined:
            shutdown()
        raise ArgumentError(
            f'init_process_group("dcoll") got rank {rank} of {size}, but dcoll.init() says rank {comm.rank} of '
            f"{comm.size}: leave rank= and world_size= (and RANK and WORLD_SIZE) out, or pass the launcher's"
        )
    return comm, joined


def _join(store: Any, rank: int, size: int) -> None:
    """Where MPI has not started the ranks, they meet in the store that init_process_group() was given."""
    launcher = find_launcher(os.environ)
    if size == 1 or (launcher is not None and not launcher.through_store):
        return init()

    def get(key: str) -> bytes | None:
        return bytes(store.get(key)) if store.check([key]) else None

    _C.make_ender()
    init_through(_C.open_store(rank, size, store.set, get))


def subgroup(ranks: Sequence[int]) -> _C.Communicator:
    """The communicator of some ranks of the job. Collective over them alone; without the store, which is slow."""
    whole = WORLD.comm
    if whole is None:
        raise DcollError('the default group was destroyed: call init_process_group("dcoll") before new_group()')
    if list(ranks) != sorted(ranks):
        raise ArgumentError(
            f"new_group got the ranks {list(ranks)} with sort_ranks=False, but dcoll's groups count their ranks in "
            "ascending order: leave sort_ranks out"
        )
    made = _C.make_group(whole, list(ranks), REGISTRY.job)
    if not OPEN:
        atexit.register(close_all)  # runs before the job's own farewell, which was registered earlier
    OPEN.append(made)
    return made


def close(comm: _C.Communicator) -> None:
    if comm in OPEN:
        OPEN.remove(comm)
    comm.close()


def close_all() -> None:
    """What is still open when the program ends: in the order in which the groups were made, the same on all ranks."""
    for comm in OPEN[:]:
        if comm.failure() == "":
            close(comm)


def leave() -> None:
    """The job, which init_process_group() has joined."""
    close_all()
    shutdown()
