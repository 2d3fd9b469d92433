"""One rank of a job whose last rank does something else: python stalls.py KIND... (see test_mpi_stalls.py).

Each kind stalls all ranks but the last until that one has slept long enough for the report, and then goes on.
"""

import ctypes
import os
import signal
import sys
import threading
import time

import numpy as np
import torch

import dcoll as hvd

REPORT_S = float(os.environ.get("STALL_REPORT_S", "2"))
"""How long the last rank stays away: DCOLL_STALL_CHECK_TIME and what the report may take."""


def is_last() -> bool:
    return hvd.rank() == hvd.size() - 1


def loads_data() -> None:
    time.sleep(REPORT_S)


def ordered() -> None:
    hvd.broadcast(np.ones(3), 0, name="weights")
    if is_last():
        loads_data()
    hvd.allreduce(np.ones(5), name="loss", op=hvd.Sum)


def by_name() -> None:
    if is_last():
        loads_data()
    handles = [hvd.allreduce_async(torch.ones(5), name=name) for name in ("a", "b", "c")]
    for handle in handles:
        hvd.synchronize(handle)


def barrier() -> None:
    if is_last():
        loads_data()
    hvd.barrier()


def join() -> None:
    if is_last():
        loads_data()
    hvd.join()


def process_set() -> None:
    ends = hvd.add_process_set([0, hvd.size() - 1])
    if is_last():
        loads_data()
    if ends.included():
        hvd.allreduce(np.ones(2), name="of the set", process_set=ends)
    hvd.barrier()


def backward() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    if is_last():
        loads_data()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def holds_lock() -> None:
    """A call into C that does not release the interpreter lock."""
    if is_last():
        ctypes.PyDLL(None).sleep(int(REPORT_S) + 3)
    hvd.barrier()


def stopped() -> None:
    hvd.broadcast(np.ones(3), 0, name="weights")
    if is_last():
        child = os.fork()
        if child == 0:
            time.sleep(REPORT_S + 6)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(child, 0)
    hvd.barrier()


def elsewhere() -> None:
    """The last rank waits for something that the others will only call later: two orders, one of them by name."""
    if is_last():
        threading.Timer(REPORT_S, lambda: hvd.allreduce_async(torch.ones(1), name="first").wait()).start()
        hvd.barrier()
    else:
        hvd.allreduce_async(torch.ones(1), name="first").wait()
        hvd.barrier()


def ends() -> None:
    """DCOLL_STALL_SHUTDOWN_TIME: the same words everywhere, also where the rank comes too late."""
    hvd.barrier()
    if is_last():
        loads_data()
    try:
        for step in range(3):
            hvd.allreduce(np.ones(5), name=f"loss {step}")
    except hvd.TimeoutError as error:
        print(f"<{hvd.rank()}> step {step}: {error}", flush=True)
    else:
        print(f"<{hvd.rank()}> no error", flush=True)
    if not is_last():
        time.sleep(REPORT_S + 2)  # or the end of this rank would end the last one's sleep


if __name__ == "__main__":
    hvd.init()
    for kind in sys.argv[1:]:
        if hvd.rank() == 0:
            print(f"== {kind}", file=sys.stderr, flush=True)
        globals()[kind]()
