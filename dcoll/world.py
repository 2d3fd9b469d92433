"""The job: who is in it, and which of them this process is."""

import os
from collections import Counter
from dataclasses import dataclass

from dcoll import _C, launch
from dcoll.launcher import find_launcher
from dcoll.lifecycle import Lifecycle


@dataclass(frozen=True)
class Cross:
    """The ranks with this process's local rank, one per node: Horovod's cross communicator."""

    rank: int
    size: int

    @staticmethod
    def of(comm: _C.Communicator) -> "Cross":
        locals_of = Counter(comm.nodes)
        peers = [node for node in sorted(locals_of) if locals_of[node] > comm.local_rank]
        return Cross(peers.index(comm.node), len(peers))


class World:
    """The state of this process in the job."""

    comm: _C.Communicator | None = None
    cross = Cross(0, 1)
    lifecycle: Lifecycle | None = None  # from the first init() on: MPI cannot be initialised twice


WORLD = World()


def init() -> None:
    """Join the job: all ranks that mpirun started, or this process alone. Calling it again changes nothing."""
    if WORLD.comm is not None:
        return
    if WORLD.lifecycle is None:
        launcher = find_launcher(os.environ)
        needs_mpi = launch.mpi4py_started_mpi() or (launcher is not None and launcher.size != 1)
        WORLD.lifecycle = Lifecycle(launch.load_mpi(launcher) if needs_mpi else None)
    comm = _C.connect_world(WORLD.lifecycle.mpi)
    WORLD.lifecycle.join(comm)
    WORLD.cross = Cross.of(comm)
    WORLD.comm = comm
    _C.set_job(comm)
    from dcoll import environment, timeline  # which need this module

    environment.report(comm)
    timeline.start_from_environment(comm)


def shutdown() -> None:
    """Leave the job after finishing what is queued. init() joins it again; MPI itself ends when the process does."""
    WORLD.comm = None
    _C.set_job(None)
    if WORLD.lifecycle is not None:
        WORLD.lifecycle.leave()


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
    return WORLD.cross.rank


def cross_size() -> int:
    """How many nodes have a process with this local rank."""
    communicator()
    return WORLD.cross.size


def is_homogeneous() -> bool:
    """True when every node has the same number of processes."""
    return len(set(Counter(communicator().nodes).values())) == 1


def mpi_threads_supported() -> bool:
    """True when MPI was initialised with MPI_THREAD_MULTIPLE. dcoll itself needs only MPI_THREAD_SERIALIZED."""
    communicator()
    mpi = WORLD.lifecycle.mpi if WORLD.lifecycle is not None else None
    return mpi is not None and mpi.thread_level == 3


def mpi_enabled() -> bool:
    """True when this job runs on MPI; False for a process that was started alone."""
    return WORLD.lifecycle is not None and WORLD.lifecycle.mpi is not None


def mpi_built() -> bool:
    """True when dcoll was built with MPI."""
    return launch.PLUGIN.exists()


def cuda_built() -> bool:
    """True when dcoll was built with its CUDA kernels."""
    return _C.cuda_built


def nccl_built() -> int:
    """Always 0: dcoll brings its own kernels."""
    return 0


def gloo_built() -> bool:
    """Always False: dcoll does not use Gloo."""
    return False


def gloo_enabled() -> bool:
    """Always False: dcoll does not use Gloo."""
    return False


def ddl_built() -> bool:
    """Always False: dcoll does not use IBM DDL."""
    return False


def ccl_built() -> bool:
    """Always False: dcoll does not use oneCCL."""
    return False


def rocm_built() -> bool:
    """Always False: there are no ROCm kernels."""
    return False
