"""One rank of a job that cannot begin, or not begin again: python late.py KIND (see test_mpi_late.py)."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import dcoll as hvd
from dcoll.job import world

if "OMPI_COMM_WORLD_RANK" not in os.environ and "PMI_RANK" not in os.environ:
    import torch.distributed  # noqa: F401 - seconds on a busy machine, of which init() would be thought to take them

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or os.environ["RANK"])
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or os.environ["WORLD_SIZE"])


def say(text: str) -> None:
    print(f"[{RANK}] {text}", flush=True)


def wait_for_survivors(seconds: float) -> None:
    """Until those that can have said what ended their init()."""
    folder, deadline = Path(os.environ["FAULT_FOLDER"]), time.monotonic() + seconds
    while len(list(folder.iterdir())) < int(os.environ["FAULT_SURVIVORS"]) and time.monotonic() < deadline:
        time.sleep(0.02)


def hang() -> None:
    wait_for_survivors(100)  # longer than a job may take
    time.sleep(1)  # they end first
    os._exit(0)


def soon(seconds: float, what: signal.Signals) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), what)).start()


def begin() -> None:
    """What ends it is said and passed on, once all that can have said theirs."""
    start = time.monotonic()
    try:
        hvd.init()
    except (hvd.DcollError, KeyboardInterrupt) as error:
        say(f"{type(error).__name__} after {time.monotonic() - start:.1f} s: {error}")
        (Path(os.environ["FAULT_FOLDER"]) / str(RANK)).touch()
        wait_for_survivors(15)
        time.sleep(0.3)  # mpirun passes on what was printed
        raise


def work() -> None:
    assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [float(SIZE)] * 3
    say("works")


def never() -> None:
    """Rank 1 does not call init()."""
    if RANK == 1:
        hang()
    begin()


def first_never() -> None:
    """Rank 0 does not call init()."""
    if RANK == 0:
        hang()
    begin()


def dies_once() -> None:
    """Rank 1 dies in its first attempt."""
    hvd.init()
    if RANK == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    work()


def work_at_once() -> None:
    begin()
    work()


def late() -> None:
    """Rank 1 comes when the others have given up once or twice, and are patient."""
    if RANK == 1:
        time.sleep(float(os.environ["DCOLL_TIMEOUT"]) + 1)
    while not hvd.is_initialized():
        try:
            hvd.init()
        except hvd.TimeoutError as error:
            say(str(error))
    work()


def both_give_up() -> None:
    """Rank 1 comes when the others have given up. All catch that and end."""
    if RANK == 1:
        wait_for_survivors(30)
    with contextlib.suppress(hvd.DcollError):
        begin()


def when_stopped(process: Path, then: Callable[[], object]) -> None:
    """Wait for it in a thread: for the process of this number, and until it is stopped."""

    def watch() -> None:
        while not process.exists() or Path(f"/proc/{process.read_text()}/stat").read_text().split()[2] != "T":
            time.sleep(0.02)
        then()

    threading.Thread(target=watch, daemon=True).start()


def stops_where_told() -> None:
    """Rank WHO stops in a function of C, of which LIBRARY has another, which must be there before Python."""
    library, who, then = (os.environ[name] for name in ("LIBRARY", "WHO", "THEN"))
    process = Path(f"{library}.pid")
    if str(RANK) == who:
        if "LD_PRELOAD" not in os.environ:
            os.environ["LD_PRELOAD"] = library
            os.execv(sys.executable, [sys.executable, *sys.argv])
        begun = Path(f"{library}.begun")
        begun.write_text(str(os.getpid()))
        begun.rename(process)  # whoever sees the file may read the number at once
    elif then == "interrupt":
        when_stopped(process, lambda: os.kill(os.getpid(), signal.SIGINT))
    if then == "again":
        text = ""
        while "does not return" not in text and not (text and str(RANK) == who):  # others may be late
            try:
                hvd.init()
            except hvd.DcollError as error:
                text = str(error)
        if str(RANK) != who:
            os.kill(int(process.read_text()), signal.SIGCONT)
    begin()


def ends_before() -> None:
    """Rank WHO, else 1, ends before it has called init(): with STATUS, or killed where there is none."""
    if os.environ.get("WHO", "1") == str(RANK):
        if "STATUS" in os.environ:
            os._exit(int(os.environ["STATUS"]))
        os.kill(os.getpid(), signal.SIGKILL)
    begin()


def dies_in_it() -> None:
    """Rank 1 dies in init(), where rank 2 never comes."""
    if RANK == 2:
        hang()
    if RANK == 1:
        soon(4, signal.SIGKILL)
    begin()


def stops_in_it() -> None:
    """Rank 1 is stopped in init(), where rank 2 never comes."""
    if RANK == 2:
        hang()
    if RANK == 1:
        soon(1, signal.SIGSTOP)
    begin()


def interrupted() -> None:
    """Ctrl-C in init()."""
    if RANK == 1:
        hang()
    soon(1, signal.SIGINT)
    begin()


def again() -> None:
    """Rank 1 does not come to the second init()."""
    hvd.init()
    work()
    hvd.shutdown()
    if RANK == 1:
        hang()
    begin()


def again_dead() -> None:
    """Rank WHO, else 1, is dead when the others begin anew."""
    hvd.init()
    work()
    hvd.shutdown()
    if os.environ.get("WHO", "1") == str(RANK):
        os.kill(os.getpid(), signal.SIGKILL)
    begin()


def again_interrupted() -> None:
    """Ctrl-C in a second init()."""
    hvd.init()
    hvd.shutdown()
    if RANK == 1:
        hang()
    if RANK == 0:
        soon(1, signal.SIGINT)
    begin()


def elastic() -> None:
    """Rank 1 hangs in a step, for good or for a while."""
    seconds = float(os.environ["HANG"])
    hung = []

    def train(state: hvd.elastic.State) -> None:
        while state.step < 4:
            if RANK == 1 and state.step == 2 and not hung:
                hung.append(True)
                time.sleep(seconds)
            hvd.allreduce(np.ones(3), name="work")
            state.step += 1
            state.commit()

    hvd.init()
    begun = hvd.init
    world.init = begin if seconds > 100 else begun
    hvd.elastic.run(train)(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0))
    work()


def no_room() -> None:
    """Rank 1 may not map its memory, or that of the others."""
    if RANK == 1:
        status = Path("/proc/self/status").read_text()
        used = int(status.split("VmSize:")[1].split()[0]) << 10
        room = used + (int(os.environ["ROOM_MB"]) << 20)
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
    begin()
    work()


def no_files() -> None:
    """Rank 1 may open too few more files for the node's memory when all begin anew, and enough for messages."""
    hvd.init()
    work()
    hvd.shutdown()
    if RANK == 1:
        used = set(map(int, os.listdir("/proc/self/fd")))
        free = [number for number in range(1000) if number not in used]
        room = free[int(os.environ["ROOM"])]
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, room))
    begin()
    work()


def no_thread() -> None:
    """Rank 1 is given no thread when all begin anew, as when it has as many as it may have."""
    hvd.init()
    work()
    hvd.shutdown()
    if RANK == 1:
        libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_attr_init(attributes)
        libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 46))
        assert libc.pthread_setattr_default_np(attributes) == 0
    begin()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
