"""One rank of a job that is hit by a fault: python rank.py PHASE FAULT DELAY_S FOLDER VICTIM (see cells.py).

Rank VICTIM is hit after DELAY_S of the phase; each other rank leaves a file which says how the job ended for it.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import dcoll as hvd

PHASE, FAULT, DELAY_S, FOLDER = sys.argv[1], sys.argv[2], float(sys.argv[3]), Path(sys.argv[4])
RANK, SIZE = (int(os.environ.get(f"OMPI_COMM_WORLD_{what}") or os.environ[f"PMI_{what}"]) for what in ("RANK", "SIZE"))
VICTIM = int(sys.argv[5])
STOPPED_S, CALM_S, LONGEST_S = 1.0, 3.0, 60.0
"""How long a stopped rank stands, a job with one goes on, and one that ought to fail."""
BEGIN = [time.monotonic()]
"""Of what is repeated: importing torch takes a minute on a busy machine."""


def strike() -> None:
    """The fault, now. Only the victim calls this, from any thread. It leaves a file, for cells.py."""
    (FOLDER / "struck").touch()
    if FAULT == "STOP":
        subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"])
    if FAULT == "exit":
        os._exit(7)
    os.kill(os.getpid(), getattr(signal, f"SIG{FAULT}"))


def strike_soon() -> None:
    if RANK == VICTIM:
        timer = threading.Timer(DELAY_S, strike)
        timer.daemon = True
        timer.start()


def all_had_enough() -> bool:
    """The same on every rank, by a collective whose result is known but for that."""
    longest = CALM_S if FAULT == "STOP" else LONGEST_S
    enough = hvd.allreduce(np.array([time.monotonic() - BEGIN[0] > longest, 1.0]), op=hvd.Sum, name="enough")
    check(enough[1] == SIZE)
    return bool(enough[0] > 0)


def check(right: bool) -> None:
    if not right:
        raise AssertionError("wrong result")


def reduce(count: int, **options: object) -> None:
    total = hvd.allreduce(np.arange(count, dtype=np.float32) % 7 + hvd.rank(), op=hvd.Sum, **options)
    ranks = options["process_set"].ranks if "process_set" in options else range(SIZE)  # type: ignore[attr-defined]
    check(bool((total == np.arange(count) % 7 * len(ranks) + sum(ranks)).all()))


def repeat(body: Callable[[], None]) -> None:
    BEGIN[0] = time.monotonic()
    strike_soon()
    while not all_had_enough():
        body()


def before_init() -> None:
    if RANK == VICTIM:
        time.sleep(DELAY_S)
        strike()
    hvd.init()
    repeat(lambda: reduce(100))


def in_init() -> None:
    strike_soon()
    hvd.init()
    while not all_had_enough():
        reduce(100)


def small() -> None:
    hvd.init()
    repeat(lambda: reduce(3))


def large() -> None:
    hvd.init()
    repeat(lambda: reduce(3_000_001))


def backward() -> None:
    import torch

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(6)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 200)).sum().backward()
        optimizer.step()

    step()  # torch imports much with the first one
    repeat(step)


def process_set() -> None:
    hvd.init()
    some = hvd.add_process_set([rank for rank in range(SIZE) if rank != (VICTIM + 1) % SIZE])
    repeat(lambda: reduce(1000, process_set=some) if some.included() else None)


def named() -> None:
    hvd.init()

    def several() -> None:
        order = range(5) if RANK % 2 else reversed(range(5))
        handles = {i: hvd.allreduce_async(np.full(1000 * i + 1, i), name=f"number {i}", op=hvd.Sum) for i in order}
        for i, handle in handles.items():
            check(bool((hvd.synchronize(handle) == i * SIZE).all()))

    repeat(several)


def elastic() -> None:
    """Leaving and joining again and again, as after a failure."""
    hvd.init()

    def again() -> None:
        hvd.shutdown()
        hvd.init()

    repeat(again)


def shutdown() -> None:
    hvd.init()
    reduce(100)
    if RANK == VICTIM:
        threading.Timer(DELAY_S / 20, strike).start()
    hvd.shutdown()


def tell(how: str, text: str = "") -> None:
    told = FOLDER / f"{RANK}.part"
    told.write_text(json.dumps({"how": how, "text": text, "seconds": time.monotonic() - BEGIN[0]}))
    told.rename(FOLDER / f"{RANK}.json")


def wait_for_survivors() -> None:
    """Once one ends, mpirun may end the others, some of whom may notice at the deadline alone."""
    deadline = time.monotonic() + 15 + float(os.environ["DCOLL_TIMEOUT"])
    while len(list(FOLDER.glob("*.json"))) < SIZE - 1 and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    try:
        globals()[PHASE]()
    except AssertionError as error:
        tell("wrong", str(error))
        os._exit(1)
    except hvd.DcollError as error:
        tell("error", f"{type(error).__name__}: {error}")
        wait_for_survivors()
        os._exit(0)
    tell("fine")
    if FAULT != "STOP":
        wait_for_survivors()
        os._exit(0)
