"""One rank of a job beside epoll descriptors of others: python beside_epoll.py none|foreign dcoll|mpi4py.

Prints how many seconds of CPU rank 0 spent on two long waits: beside the descriptors there were when the job
began, and after some were closed and their numbers used again.
"""

import os
import select
import sys
import time

import numpy as np

import dcoll as hvd

FOREIGN, MPI_BY = sys.argv[1] == "foreign", sys.argv[2]
WORK_S = 1.0
"""How long the others compute while rank 0 waits: in CPU time, of which a wait that burns its core gets as much."""

kept: list[object] = []


def always_ready() -> select.epoll:
    """An epoll descriptor that has news whenever it is asked."""
    event = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    watcher = select.epoll()
    watcher.register(event, select.EPOLLIN)
    kept.extend((event, watcher))
    return watcher


def idle_wait() -> float:
    hvd.barrier()
    began = time.process_time()
    if hvd.rank() != 0:
        while time.process_time() < began + WORK_S:
            pass
    assert hvd.allreduce(np.arange(1000.0), op=hvd.Sum).tolist() == [i * hvd.size() for i in range(1000)]
    return time.process_time() - began


def work() -> None:
    for count in (1, 1000, 300_007):
        got = hvd.allreduce(np.full(count, float(hvd.rank())), op=hvd.Sum)
        assert (got == sum(range(hvd.size()))).all()


if FOREIGN:
    always_ready()
    replaced, quiet = select.epoll(), select.epoll()
if MPI_BY == "mpi4py":
    from mpi4py import MPI  # initialises it: then nobody knows whose the descriptors are

    assert MPI.Is_initialized()
hvd.init()
work()
waits = [idle_wait()]
if FOREIGN:
    os.dup2(always_ready().fileno(), replaced.fileno(), inheritable=False)
    quiet.close()
    always_ready()
work()
waits.append(idle_wait())
if hvd.rank() == 0:
    print("cpu", *waits, flush=True)
