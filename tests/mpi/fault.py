"""One rank of a job in which something goes wrong: python fault.py KIND (see test_mpi_faults.py)."""

import _thread
import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import dcoll as hvd
from dcoll.job import world


def say(text: str) -> None:
    print(f"[{hvd.rank()}] {text}", flush=True)


def work_for_ever() -> None:
    while True:
        hvd.allreduce(np.ones(1000), name="work")


def now() -> None:
    """For the test that takes the time: this rank fails now."""
    if "FAULT_TIME" in os.environ:
        Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))


def exception() -> None:
    """One rank raises; nobody catches anything."""
    for step in range(1000):
        if step == 20 and hvd.rank() == 1:
            now()
            raise RuntimeError("the data ran out")
        hvd.allreduce(np.ones(1000), name="work")


def exception_without_text() -> None:
    """Its class cannot make one."""

    class Textless(Exception):
        def __str__(self) -> str:
            raise KeyError

    if hvd.rank() == 1:
        raise Textless
    work_for_ever()


def stdout_is_closed() -> None:
    hvd.barrier()
    sys.stdout.close()


def exception_in_training() -> None:
    """As a user would see it: in the middle of an epoch, the others inside backward()."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(1000):
        if step == 5 and hvd.rank() == 0:
            raise KeyError("no such batch")
        optimizer.zero_grad()
        model(torch.ones(4, 50)).sum().backward()
        optimizer.step()


def exception_before_anything() -> None:
    """Right after init(); the others wait in their first collective."""
    if hvd.rank() == 1:
        raise FileNotFoundError("data.bin")
    work_for_ever()


def killed() -> None:
    """One rank is killed without a word; the others say what they saw."""
    hvd.allreduce(np.ones(1))
    if hvd.rank() == 1:
        time.sleep(0.3)  # what it has sent may be on its way, and would be lost
        os.kill(os.getpid(), signal.SIGKILL)
    tell_what_ends(work_for_ever)


def killed_beside_its_child() -> None:
    """As killed(), but a child that it forked, a data loader's worker say, lives on."""
    hvd.allreduce(np.ones(1))
    if hvd.rank() == 1:
        if os.fork() == 0:
            os.closerange(0, 3)  # or mpirun would wait for what it may print
            time.sleep(45)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    tell_what_ends(work_for_ever)


def killed_while_it_is_read() -> None:
    """One rank is killed while its peers read its private memory, which they do most of the time."""
    mine = np.ones(1 << 20)
    hvd.allgather(mine)
    if hvd.rank() == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def read_for_ever() -> None:
        while True:
            hvd.allgather(mine)

    tell_what_ends(read_for_ever)


def tell_what_ends(work: Callable[[], None]) -> None:
    start = time.monotonic()
    try:
        work()
    except hvd.DcollError as error:
        say(f"{type(error).__name__} after {time.monotonic() - start:.1f} s: {error}")
        try:
            hvd.barrier()
        except hvd.DcollError as again:
            say(f"again: {str(again) == str(error) or str(error) in str(again)}")
        wait_for_survivors()
        # Not `raise`: after MPI_Abort, Open MPI's `mpirun --continuous` now and then goes on waiting, or returns 0.
        os._exit(1)


def wait_for_others(seconds: float) -> None:
    """Until all but rank 1 have said what they saw."""
    folder, deadline = Path(os.environ["FAULT_FOLDER"]), time.monotonic() + seconds
    while len(list(folder.iterdir())) < hvd.size() - 1 and time.monotonic() < deadline:
        time.sleep(0.02)


def wait_for_survivors() -> None:
    """Once one ends, mpirun may end the others and lose their words."""
    (Path(os.environ["FAULT_FOLDER"]) / str(hvd.rank())).touch()
    wait_for_others(20)
    time.sleep(0.5)  # mpirun passes on what was printed


def frozen() -> None:
    """All ranks are stopped for longer than the timeout, as in a container that is frozen, and go on one by one."""
    seconds = 5
    world.communicator().timeout_s = seconds  # from now on: the start may be slow
    processes = hvd.allgather(np.array([os.getpid()])).tolist()
    if hvd.rank() == 1 and os.fork() == 0:
        time.sleep(0.3)  # the others wait by then
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        time.sleep(seconds + 2)
        for process in processes:
            os.kill(process, signal.SIGCONT)
            time.sleep(0.5)
        os._exit(0)
    if hvd.rank() == 1:
        os.wait()
    named = hvd.allreduce_async(np.ones(3), name="by name", op=hvd.Sum)
    hvd.barrier()
    assert hvd.synchronize(named).tolist() == [hvd.size()] * 3
    say("works")


def late_on_two_levels() -> None:
    """A rank that others waited for before is not the one that is late now: rank 1 is, which leads the second node."""
    large = np.ones(1 << 20, dtype=np.float32)
    for _ in range(3):
        if hvd.rank() == 0:
            time.sleep(0.2)
        hvd.allreduce(large, op=hvd.Sum)
    if hvd.rank() == 1:
        wait_for_survivors()
        os._exit(0)
    try:
        hvd.allreduce(large[:1000], name="next")
    except hvd.DcollError as error:
        say(str(error))
        wait_for_survivors()
        os._exit(0)


def exits() -> None:
    """One rank leaves with sys.exit while the others still work."""
    if hvd.rank() == 1:
        sys.exit(3)
    work_for_ever()


def exits_alone() -> None:
    """As exits(), but the others compute and call nothing."""
    if hvd.rank() == 1:
        now()
        sys.exit(3)
    hang()


def exits_from_a_thread() -> None:
    """One rank ends a thread, which threading knows nothing of, with sys.exit: that ends no more than the thread."""
    if hvd.rank() == 1:
        _thread.start_new_thread(sys.exit, (3,))
        time.sleep(2.0)  # what comes of it would come by then
    hvd.allreduce(np.ones(3))


def ends_early() -> None:
    """One rank's program ends as if all were well, after an exit that was none."""
    if hvd.rank() == 1:
        try:
            sys.exit(4)
        except SystemExit:
            return
    work_for_ever()


def thread_hangs() -> None:
    """One rank raises, and then waits for a thread that does not end. The others call nothing."""
    if hvd.rank() == 1:
        threading.Thread(target=hang).start()
        now()
        raise RuntimeError("the data ran out")
    hang()


def exit_hangs() -> None:
    """All end, but one hangs before it has told the others so."""
    if hvd.rank() == 1:
        atexit.register(hang)  # runs before dcoll's own


def works_on() -> None:
    """All end, but one computes for longer than the timeout."""
    world.communicator().timeout_s = 2  # from now on: the start may be slow
    end = time.monotonic() + 7
    while hvd.rank() == 1 and time.monotonic() < end:
        sum(range(10000))


def works_on_after_shutdown() -> None:
    """All have called shutdown(), and one computes on for longer than the timeout, while the others have ended."""
    os.environ["DCOLL_TIMEOUT"] = "2"
    hvd.shutdown()
    end = time.monotonic() + 7
    while RANK == 1 and time.monotonic() < end:
        sum(range(10000))


def shutdown_hangs() -> None:
    """All have called shutdown(), and one hangs."""
    hvd.shutdown()
    if RANK == 1:
        hang()


def end_hangs() -> None:
    """All end, but one hangs when it has told the others so."""


def hang_if_asked() -> None:
    if sys.argv[1] == "end_hangs" and RANK == 1:
        hang()


def hang() -> None:
    time.sleep(600)


def caught() -> None:
    """Every rank catches the failure and ends normally: that must not hang in MPI_Finalize."""
    try:
        if hvd.rank() == 1:
            raise ValueError("bad")
        work_for_ever()
    except hvd.DcollError as error:
        say(f"caught {error}")
    except ValueError as error:
        world.communicator().fail(f"ValueError: {error}")


def stall_caught() -> None:
    """Rank 1 comes so late that the others gave up (DCOLL_STALL_SHUTDOWN_TIME); all catch that and end normally."""
    if hvd.rank() == 1:
        wait_for_others(20)
    try:
        hvd.allreduce(np.ones(3), name="late")
    except hvd.TimeoutError:
        say("caught")
        (Path(os.environ["FAULT_FOLDER"]) / str(hvd.rank())).touch()


def init_fails() -> None:
    """Before init(): the ranks' settings differ. All catch that and end normally."""
    os.environ["DCOLL_SLICE_KB"] = ("16", "32")[RANK_IN_JOB % 2]
    try:
        hvd.init()
    except hvd.DcollError as error:
        print(f"caught {error}", flush=True)


class SlowToGo:
    """Keeps Python's own end for longer than DCOLL_TIMEOUT, as unloading torch does on a loaded machine."""

    def __del__(self) -> None:
        time.sleep(4)
        os.write(1, b"gone\n")


def slow_teardown() -> None:
    globals()["KEPT"] = SlowToGo()
    hvd.barrier()


def leaves_handles() -> None:
    """Ends while a collective is under way."""
    hvd.allreduce_async(np.ones(1_000_000))
    say("done")


if __name__ == "__main__":
    atexit.register(hang_if_asked)  # runs after dcoll's own
    KIND = sys.argv[1]
    RANK_IN_JOB = int(
        os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or os.environ.get("RANK") or 0
    )
    if KIND != "init_fails":
        hvd.init()
        RANK = hvd.rank()
    globals()[KIND]()
