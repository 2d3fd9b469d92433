"""One rank of a job whose last rank does something else: python stalls.py KIND... (see test_mpi_stalls.py).

Each kind stalls all ranks but the last until that one has seen the report, however long that takes, and then goes on.
Standard error of all ranks is one file, STALL_LOG. With STALL_THREADS the script has initialised MPI with that level.
"""

import ctypes
import os
import signal
import sys
import threading
import time

import numpy as np

import dcoll as hvd

if "STALL_THREADS" in os.environ:
    import mpi4py

    mpi4py.rc.thread_level = os.environ["STALL_THREADS"]
    from mpi4py import MPI  # noqa: F401

LOG = os.open(os.environ["STALL_LOG"], os.O_RDWR | os.O_APPEND | os.O_CREAT)
LONGEST_S = 60.0


def is_last() -> bool:
    return hvd.rank() == hvd.size() - 1


def loads_data(*texts: str) -> None:
    """Until the log has all of these texts. No Python function is called meanwhile: the report shows this one."""
    parts, end = [text.encode() for text in texts], time.monotonic() + LONGEST_S
    while time.monotonic() < end:
        log = os.pread(LOG, 1 << 20, 0)
        if not [part for part in parts if part not in log]:
            break
        time.sleep(0.02)


def let_a_child_watch(*texts: str) -> int:
    """A process that ends when the log has these texts, for a rank that cannot look; returns what is readable then."""
    readable, written = os.pipe()
    if os.fork() == 0:
        loads_data(*texts)
        os.write(written, b"x")
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    return readable


def after_join() -> None:
    """The numbers of operations by which ranks ask each other are the same after some of them joined."""
    for step in range(0 if is_last() else 4):
        hvd.synchronize(hvd.allreduce_async(np.ones(3), name=f"step {step}"))
    hvd.join()
    if is_last():
        loads_data("allreduce 'after' (sum of 5 float64) stalls")
    hvd.allreduce(np.ones(5), name="after", op=hvd.Sum)


def ordered() -> None:
    hvd.broadcast(np.ones(3), 0, name="weights")
    if is_last():
        loads_data("allreduce 'loss' (sum of 5 float64) stalls")
    hvd.allreduce(np.ones(5), name="loss", op=hvd.Sum)


def not_asked() -> None:
    """Where no thread may listen: the ranks that wait say it by themselves."""
    if is_last():
        loads_data(*(f"rank {rank}] allreduce 'loss' (sum of 5 float64) made no progress" for rank in (0, 1)))
    hvd.allreduce(np.ones(5), name="loss", op=hvd.Sum)
    if is_last():
        loads_data(*(f"rank {rank}] allreduce 'late' (average of 2 float32) made no progress" for rank in (0, 1)))
    hvd.allreduce_async(np.ones(2, np.float32), name="late").wait()


def by_name() -> None:
    if is_last():
        loads_data("by name: 'b' 'c') stalls")
    handles = [hvd.allreduce_async(np.ones(5, np.float32), name=name) for name in ("a", "b", "c")]
    for handle in handles:
        hvd.synchronize(handle)


def barrier() -> None:
    hvd.allreduce(np.ones(4, np.float32), op=hvd.Sum)
    if is_last():
        loads_data("] barrier stalls")
    hvd.barrier()


def join() -> None:
    if is_last():
        loads_data("] join stalls")
    hvd.join()


def process_set() -> None:
    ends = hvd.add_process_set([0, hvd.size() - 1])
    if is_last():
        loads_data("allreduce 'of the set' (average of 2 float64) stalls")
    if ends.included():
        hvd.allreduce(np.ones(2), name="of the set", process_set=ends)
    hvd.barrier()


def holds_lock() -> None:
    """A call into C that does not release the interpreter lock."""
    if is_last():
        end = let_a_child_watch("Python's lock")
        ctypes.PyDLL(None).read(end, ctypes.create_string_buffer(1), 1)
        os.wait()
    hvd.barrier()


def stopped() -> None:
    hvd.broadcast(np.ones(3), 0, name="weights")
    if is_last():
        let_a_child_watch("No answer from rank 2")
        os.kill(os.getpid(), signal.SIGSTOP)
        os.wait()
    hvd.barrier()


def elsewhere() -> None:
    """The last rank waits for something that the others will only call later: two orders, one of them by name."""

    def come_at_last() -> None:
        loads_data("allreduce 'first' (average of 1 float32) stalls")
        hvd.allreduce_async(np.ones(1, np.float32), name="first").wait()

    if is_last():
        late = threading.Thread(target=come_at_last)
        late.start()
        hvd.barrier()
        late.join()
    else:
        hvd.allreduce_async(np.ones(1, np.float32), name="first").wait()
        hvd.barrier()


def leaves_early() -> None:
    """Ranks that are done wait in shutdown() for the last one, which nobody needs to be told of."""
    if is_last():
        loads_data("shutdown stalls")
    hvd.shutdown()


def ends() -> None:
    """DCOLL_STALL_SHUTDOWN_TIME: the same words everywhere, also where the rank comes too late."""
    hvd.barrier()
    everybody_else = [f"<{rank}> " for rank in range(hvd.size() - 1)]
    if is_last():
        loads_data(*everybody_else)
    try:
        for step in range(3):
            hvd.allreduce(np.ones(5), name=f"loss {step}")
    except hvd.TimeoutError as error:
        tell(f"<{hvd.rank()}> step {step}: {error}")
    else:
        tell(f"<{hvd.rank()}> no error")
    loads_data(*everybody_else, f"<{hvd.size() - 1}> ")  # or the end of this rank would end what the others wait for


def tell(text: str) -> None:
    os.write(LOG, f"{text}\n".encode())


if __name__ == "__main__":
    os.dup2(LOG, 2)
    hvd.init()
    rank = hvd.rank()
    for kind in sys.argv[1:]:
        hvd.barrier()  # they begin together, so that only the last one is missing
        if hvd.rank() == 0:
            tell(f"== {kind}")
        globals()[kind]()
        if rank == 0:
            tell("== between")
