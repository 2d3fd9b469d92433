"""Where the communicator of a process group comes from: the job's for the first, parts of it for the others."""

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dcoll import _C
from dcoll.errors import ArgumentError, DcollError, PeerError, TimeoutError
from dcoll.job.find_launcher import find_launcher
from dcoll.job.lifecycle import GROUPS, LEAVING, leave_group
from dcoll.job.process_sets import REGISTRY
from dcoll.job.store_startup import meet
from dcoll.job.world import WORLD, init, init_through, mpi_enabled, shutdown

_LOG = logging.getLogger(__name__)

_JOINED: list[_C.Communicator] = []
"""The job, where torch has joined it."""

_BESIDE: list[_C.Communicator] = []
"""The job, where new_group() has, beside another default backend: no default group ends with it."""


def _is_in_job() -> bool:
    """One that torch has joined and that failed since, by abort() say, is left."""
    if WORLD.comm is not None and WORLD.comm in _JOINED and WORLD.comm.failure() != "":
        shutdown()
    return WORLD.comm is not None


def join(timeout: timedelta, begin: Callable[[], None]) -> bool:
    """Joins the job, where nobody has: with one deadline, which names who is missing, torch's unless DCOLL_TIMEOUT is
    set. Whether that was done."""
    if _is_in_job():
        return False
    given = "DCOLL_TIMEOUT" in os.environ
    if not given:
        os.environ["DCOLL_TIMEOUT"] = str(timeout.total_seconds())
    try:
        begin()
    finally:
        if not given:
            del os.environ["DCOLL_TIMEOUT"]
    assert WORLD.comm is not None
    _JOINED[:] = [WORLD.comm]
    return True


def world(store: Any, rank: int, size: int, timeout: timedelta, beside: bool) -> tuple[_C.Communicator, bool]:
    """The communicator of all ranks, and whether destroying the group has to leave the job: it does where
    init_process_group() has joined it. beside: this is for a group of new_group(), beside another default backend.
    Torch does not end the others with that one, which are parts of the job."""
    joined = join(timeout, lambda: _begin(store, rank, size))
    comm = WORLD.comm
    assert comm is not None
    if (comm.rank, comm.size) != (rank, size):
        if joined:
            shutdown()
        raise ArgumentError(
            f'init_process_group("dcoll") got rank {rank} of {size}, but dcoll.init() says rank {comm.rank} of '
            f"{comm.size}: leave rank= and world_size= (and RANK and WORLD_SIZE) out, or pass the launcher's"
        )
    if joined:
        _BESIDE[:] = [comm] if beside else []
    return comm, joined and not beside


def is_limited_by(timeout: timedelta, comm: _C.Communicator) -> bool:
    """Whether a new group takes torch's timeout: not where it is torch's default, which says nothing to a part of the
    job or to a job that the program has begun. The job's is DCOLL_TIMEOUT where that is set and less."""
    if timeout == dist.default_pg_timeout and comm not in _JOINED:
        return False
    return comm in GROUPS or "DCOLL_TIMEOUT" not in os.environ or timeout.total_seconds() < comm.timeout_s


def _begin(store: Any, rank: int, size: int) -> None:
    """Where MPI has not started just these ranks, they meet in the store that init_process_group() was given."""
    launcher = find_launcher(os.environ)
    by_mpi = launcher is not None and not launcher.through_store and "TORCHELASTIC_RUN_ID" not in os.environ
    first = WORLD.lifecycle is None
    if launcher is not None and by_mpi and launcher.size in (None, size) and (first or mpi_enabled()):
        try:
            return init()
        except (TimeoutError, PeerError):
            raise
        except DcollError as error:
            # There is no MPI here, or not the launcher's, which each rank finds alone. Where only some do, the others
            # wait for them by MPI: both sides say who is missing when the deadline has passed, these with `error` too.
            if WORLD.lifecycle is not None:
                raise
            _LOG.info("dcoll: the ranks meet in the store of init_process_group(): %s", error)
            return _through(store, rank, size)
    _through(store, rank, size)


def _through(store: Any, rank: int, size: int) -> None:
    if size == 1:
        return init_through(None)

    # Keys are written once, and torch gives default groups of a program the same store: they are counted, those that do
    # not come about too, which leave letters there. Where only some ranks have tried the others count differently, and
    # need another store.
    prefix = f"{store.add(f'groups/{rank}', 1)}/"
    _C.make_ender()
    init_through(meet(store, prefix, rank, size))


def is_first(size: int) -> bool:
    """Whether a group of new_group() is the first of dcoll's, beside another backend, and has all ranks: it is the job
    then."""
    is_there = WORLD.comm is not None and (WORLD.comm not in _BESIDE or _is_in_job())
    return not is_there and dist.is_initialized() and dist.get_world_size() == size


def subgroup(ranks: Sequence[int]) -> _C.Communicator:
    """The communicator of some ranks of the job. Collective over them alone; without the store, which is slow."""
    whole = WORLD.comm
    if whole is None:
        raise DcollError(
            f"new_group got the ranks {list(ranks)}, but there is no group of dcoll's with all ranks yet that they "
            'could be a part of: call init_process_group("dcoll"), dcoll.init(), or new_group() with all ranks before'
        )
    _check_numbers(whole)
    close_those_left()
    made = _C.make_group(whole, list(ranks), REGISTRY.job)
    made.timeout_s = whole.timeout_s
    GROUPS.append(made)
    return made


def _check_numbers(whole: _C.Communicator) -> None:
    """Another default backend may have begun again, with other ranks than the job's."""
    if dist.is_initialized() and (whole.rank, whole.size) != (dist.get_rank(), dist.get_world_size()):
        raise ArgumentError(
            f"new_group: this is rank {dist.get_rank()} of {dist.get_world_size()} of the default group, but rank "
            f"{whole.rank} of {whole.size} of dcoll's job: give the ranks their numbers there, or call "
            "dcoll.shutdown() on all of them before"
        )


def close(comm: _C.Communicator) -> None:
    """Waits for nobody."""
    leave_group(comm)
    close_those_left()


def close_those_left() -> None:
    for comm in LEAVING[:]:
        if comm.left():
            LEAVING.remove(comm)
            comm.close()
