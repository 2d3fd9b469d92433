"""Ranks as threads of this process: every collective for any number of ranks, without mpirun."""

import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

from dcoll import _C

T = TypeVar("T")

JOIN_S = 60.0


def run_ranks(n: int, body: Callable[[_C.Communicator], T]) -> list[T]:
    """Run body(comm) on n ranks; return what each returned, in rank order, or fail with every rank's traceback."""
    comms = _C.connect_local(n)
    results: list[T | None] = [None] * n
    errors: list[str] = []

    def work(rank: int) -> None:
        try:
            results[rank] = body(comms[rank])
        except BaseException:  # shown below, with the other ranks'
            errors.append(f"rank {rank}: {traceback.format_exc()}")
            comms[rank].fail("the test failed")
        comms[rank].close()  # waits for the others: each rank closes its own

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not errors, "\n".join(errors)
    assert not hanging, f"ranks {hanging} still run after {JOIN_S} s"
    return results  # type: ignore[return-value]
