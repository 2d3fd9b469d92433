"""The job: who is in it, and which of them this process is."""

import contextlib
import multiprocessing
import operator
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dcoll import _C
from dcoll.errors import ArgumentError, DcollError
from dcoll.job import environment, mpi_startup, store_startup
from dcoll.job.find_launcher import find_launcher, place_in
from dcoll.job.lifecycle import Lifecycle
from dcoll.job.process_sets import REGISTRY, ProcessSet, global_process_set, ranks_in_world


class World:
    """The state of this process in the job."""

    comm: _C.Communicator | None = None
    cross = 0, 1
    """This process's number among the ranks with its local rank, one per node, and how many those are: Horovod's cross
    communicator."""
    lifecycle: Lifecycle | None = None  # from the first init() on: MPI cannot be initialised twice


WORLD = World()


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job: all ranks that mpirun or torchrun started, or this process alone. Calling it again changes nothing;
    process sets that it is given then must be of the job, or it is an ArgumentError.

    TimeoutError names the ranks that have not called it within DCOLL_TIMEOUT; calling it again waits for them again.

    comm: the job is these ranks alone: a list of ranks as the launcher counts, an mpi4py communicator, or a list of
    such communicators, of which the second and the following become process sets. Ranks that are left out do not
    call this.
    process_sets: the sets to begin with. "dynamic" is accepted and changes nothing: sets can always be added.
    """
    if WORLD.comm is not None:
        REGISTRY.adopt(_initial_sets(None, process_sets))
        return
    ranks, sets = _members(comm), _initial_sets(comm, process_sets)
    if WORLD.lifecycle is not None and WORLD.lifecycle.belongs_to_parent():
        raise DcollError(
            "init() was called in a process that was forked from one of the job's ranks and cannot take its place: "
            "leave dcoll to the rank"
        )
    if WORLD.lifecycle is None:
        if _runs_a_ranks_script_again():
            raise DcollError(
                "init() was called in a process that multiprocessing started from one of the job's ranks, such as a "
                "data loader's worker: it runs the rank's script again, but for what is below "
                '`if __name__ == "__main__":`. Call init() there'
            )
        _open_standard_streams()
        WORLD.lifecycle = Lifecycle(_begin())
    if WORLD.lifecycle.job is not None:
        os.environ[_TAKEN] = place_in(os.environ)
    _enter(WORLD.lifecycle, _part_of(WORLD.lifecycle.job, ranks))
    global_process_set.mpi_comm = _mpi_comm(comm)
    for process_set in sets:
        REGISTRY.add(process_set, may_exist=True)


_TAKEN = "_DCOLL_TAKEN"
"""The variable that tells the processes a rank starts in which place the rank is."""


def _runs_a_ranks_script_again() -> bool:
    """In a process that multiprocessing has spawned: it has the variables of the rank, whose place would be its own."""
    # Of a process that is about to run the script multiprocessing tells in private only that it is one of its own.
    spawned = getattr(multiprocessing.current_process(), "_inheriting", False)
    ours = spawned or multiprocessing.parent_process() is not None
    return ours and os.environ.get(_TAKEN, "") == place_in(os.environ) != ""


def init_through(job: _C.Bootstrap | None) -> None:
    """init() of ranks that meet through somebody else's store, which may be another one each time. None: of one."""
    if WORLD.lifecycle is None:
        _open_standard_streams()
        WORLD.lifecycle = Lifecycle(job)
    WORLD.lifecycle.job = job
    _enter(WORLD.lifecycle, job)


def _open_standard_streams() -> None:
    """The core and MPI write to standard error. Where it was closed, the next socket to another rank would be that."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free


def _enter(lifecycle: Lifecycle, job: _C.Bootstrap | None) -> None:
    connected = _C.connect_world(job)
    lifecycle.join(connected)
    locals_of = Counter(connected.nodes)
    peers = [node for node in sorted(locals_of) if locals_of[node] > connected.local_rank]
    WORLD.cross = peers.index(connected.node), len(peers)
    WORLD.comm = connected
    _C.set_job(connected)
    REGISTRY.open(connected, job)
    environment.report(connected)
    environment.start_timeline(connected)


def _begin() -> _C.Bootstrap | None:
    """What whoever started this process has for its ranks to meet; None: it was started alone."""
    launcher = find_launcher(os.environ)
    alone = launcher is None or launcher.size == 1
    if launcher is not None and launcher.through_store and not alone:
        return store_startup.open_store(launcher)
    if alone and not mpi_startup.mpi4py_started_mpi():
        return None
    return mpi_startup.load_mpi(launcher)


def _members(comm: Any) -> list[int] | None:
    """Those of the ranks that were started that are in the job; None: all."""
    if comm is None:
        return None
    if (given := _mpi_comm(comm)) is not None:
        return ranks_in_world(given)
    try:
        ranks = [operator.index(rank) for rank in comm]
    except TypeError:
        raise ArgumentError(
            f"init got comm={comm!r}, but takes a list of ranks, an mpi4py communicator or a list of those"
        ) from None
    return ranks or None  # as Horovod: an empty list is everybody


def _mpi_comm(comm: Any) -> Any:
    """The mpi4py communicator that was given, or was the first of several."""
    first = comm[0] if isinstance(comm, (list, tuple)) and comm else comm
    return first if hasattr(first, "Get_group") else None


def _initial_sets(comm: Any, process_sets: Sequence[ProcessSet] | str | None) -> list[ProcessSet]:
    sets = []
    if isinstance(comm, (list, tuple)) and comm and hasattr(comm[0], "Get_group"):
        sets = [ProcessSet(one) for one in comm[1:]]
    if process_sets is None or (isinstance(process_sets, str) and process_sets == "dynamic"):
        return sets
    if isinstance(process_sets, str) or not all(isinstance(one, ProcessSet) for one in process_sets):
        raise ArgumentError(
            f'init got process_sets={process_sets!r}, but takes a list of dcoll.ProcessSet or "dynamic"'
        )
    listed_or_not = [one.ranks or (one.mpi_comm and sorted(ranks_in_world(one.mpi_comm))) for one in process_sets]
    by_ranks = [ranks for ranks in listed_or_not if ranks]
    for number, listed in enumerate(by_ranks):
        if listed in by_ranks[:number]:
            raise ArgumentError(f"init got process_sets with the ranks {listed} twice: pass every set once")
    return [*sets, *process_sets]


def _part_of(all_started: _C.Bootstrap | None, ranks: list[int] | None) -> _C.Bootstrap | None:
    """The same for the ranks of the job alone."""
    started, rank = (1, 0) if all_started is None else (all_started.size, all_started.rank)
    if ranks is None or ranks == list(range(started)):
        return all_started
    if len(set(ranks)) != len(ranks) or not 0 <= min(ranks) <= max(ranks) < started:
        raise ArgumentError(f"init got comm={ranks}, but needs different ranks from 0 to {started - 1}")
    if rank not in ranks:
        raise ArgumentError(f"init got comm={ranks}, but this is rank {rank}: only ranks of the job call init()")
    return None if all_started is None else all_started.subset(ranks)


def shutdown() -> None:
    """Leave the job after finishing what is queued. init() joins it again; MPI itself ends when the process does."""
    WORLD.comm = None
    os.environ.pop(_TAKEN, None)
    _C.set_job(None)
    sets = REGISTRY.communicators()
    REGISTRY.close()
    if WORLD.lifecycle is not None:
        WORLD.lifecycle.leave(sets)


def is_initialized() -> bool:
    """True between init() and shutdown()."""
    return WORLD.comm is not None


def communicator() -> _C.Communicator:
    """The communicator of all ranks."""
    comm = WORLD.comm
    if comm is None:
        raise ValueError("dcoll has not been initialized; use dcoll.init().")
    return comm


def rank() -> int:
    """This process's number in the job, 0 .. size() - 1."""
    return communicator().rank


def size() -> int:
    """How many processes the job has."""
    return communicator().size


def local_rank() -> int:
    """This process's number on its node."""
    return communicator().local_rank


def local_size() -> int:
    """How many processes of the job run on this node."""
    return communicator().local_size


def cross_rank() -> int:
    """This node's number among the nodes that have a process with this local rank."""
    communicator()
    return WORLD.cross[0]


def cross_size() -> int:
    """How many nodes have a process with this local rank."""
    communicator()
    return WORLD.cross[1]


def is_homogeneous() -> bool:
    """True when every node has the same number of processes."""
    return len(set(Counter(communicator().nodes).values())) == 1


def mpi_threads_supported() -> bool:
    """True when MPI was initialised with MPI_THREAD_MULTIPLE. dcoll itself needs only MPI_THREAD_SERIALIZED."""
    communicator()
    job = WORLD.lifecycle.job if WORLD.lifecycle is not None else None
    return isinstance(job, _C.Mpi) and job.thread_level == 3


def mpi_enabled() -> bool:
    """True when this job runs on MPI; False under torchrun, and for a process that was started alone."""
    return WORLD.lifecycle is not None and isinstance(WORLD.lifecycle.job, _C.Mpi)


def mpi_built() -> bool:
    """True when dcoll was built with MPI."""
    return mpi_startup.PLUGIN.exists()


def cuda_built() -> bool:
    """Always True: collectives take CUDA tensors; CUDA's runtime is looked up when one comes. What stays on
    the devices, by NCCL or in memory that ranks open of each other, and what goes through host memory: docs/gpu.md."""
    return True


def nccl_built() -> int:
    """The version of NCCL that torch brings, 22703 for 2.27.3, or 0: dcoll uses it where each rank has a GPU of its
    own."""
    if _C.nccl_version() == 0:
        with contextlib.suppress(ImportError):
            import torch  # noqa: F401  # which loads it from a folder of its own
    return _C.nccl_version()


def gloo_built() -> bool:
    """Always False: dcoll uses neither Gloo, IBM DDL nor oneCCL, and has no ROCm kernels."""
    return False


gloo_enabled = ddl_built = ccl_built = rocm_built = gloo_built
