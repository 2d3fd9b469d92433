"""Calls let another thread of the program get on while bytes are moved. For 2 ranks of one node."""

import ctypes
import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dcoll as hvd


def large_operands() -> dict[str, Any]:
    """Of 64 MiB: in private memory and in mapped, dense and strided, of both libraries."""
    operands: dict[str, Any] = {}
    for memory, flat in (("private", torch.zeros(16 << 20)), ("mapped", hvd.empty(16 << 20))):
        dense = flat.view(4 << 10, 4 << 10)
        for layout, tensor in (("dense", dense), ("strided", dense.t())):
            operands[f"{memory} {layout} tensor"] = tensor
            operands[f"{memory} {layout} array"] = tensor.numpy()
    return operands


def large_calls() -> dict[str, Callable[[], object]]:
    """Calls in which rank 0 moves 64 MiB or more, by what they are."""
    calls: dict[str, Callable[[], object]] = {}
    for name, operand in large_operands().items():
        calls |= {
            f"allreduce of a {name}": functools.partial(hvd.allreduce, operand),
            f"allreduce_ of a {name}": functools.partial(hvd.allreduce_, operand),
            f"allgather of a {name}": functools.partial(hvd.allgather, operand),
            f"broadcast of a {name}": functools.partial(hvd.broadcast, operand, 1),
        }
    dense, strided = torch.zeros(16 << 20), torch.zeros(4 << 10, 4 << 10).t()
    return calls | {
        "reducescatter": lambda: hvd.reducescatter(strided),
        "alltoall": lambda: hvd.alltoall(dense),
        "group": lambda: hvd.grouped_allreduce([dense, dense]),
        "group in place": lambda: hvd.grouped_allreduce_([dense]),
        "group waited for": lambda: hvd.synchronize(hvd.grouped_allreduce_async_([dense, dense])),
        "group of gathers": lambda: hvd.grouped_allgather([dense, strided]),
        "group of scatters": lambda: hvd.grouped_reducescatter([dense, strided]),
    }


def longest_hold(call: Callable[[], object]) -> tuple[float, float]:
    """The most CPU time, in seconds, that this thread has used in the call without another one getting on, and what it
    has used in all of the call."""
    clock, over = time.pthread_getcpuclockid(threading.get_ident()), threading.Event()
    ticks = [time.clock_gettime(clock)]

    def tick() -> None:
        while not over.is_set():
            ticks.append(time.clock_gettime(clock))
            time.sleep(1e-5)

    other = threading.Thread(target=tick)
    other.start()
    result = call()
    ticks.append(time.clock_gettime(clock))
    over.set()
    other.join()
    del result  # giving memory back is not looked at
    return max(later - earlier for earlier, later in itertools.pairwise(ticks)), ticks[-1] - ticks[0]


def check_large_calls_let_the_interpreter_lock_go() -> None:
    """Another thread of the program gets on while bytes are moved, whatever they lie in. Looked at on rank 0, for which
    the other one waits: so it moves them in the call itself. CPU time does not count what else the machine does, and
    a call that holds the lock does so every time; one look without is enough."""
    if "tsan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("ThreadSanitizer's threads wait for each other")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)  # the lock changes hands where somebody lets it go, and nowhere else
    # What holds the lock for 64 MiB uses the time of a copy. A busy machine leaves a thread its core for a few
    # milliseconds, whoever waits: where a copy takes no longer (3 ms on Zen 4), only what holds it for longer is seen.
    # AddressSanitizer gives back 64 MiB of NumPy's in the time of two copies, with the lock: there a fifth of the call
    # may be that.
    source, target, copies = np.ones(16 << 20, np.float32), np.ones(16 << 20, np.float32), [time.thread_time()]
    for _ in range(3):
        np.copyto(target, source)
        copies.append(time.thread_time())
    limit = max(0.005, min(later - earlier for earlier, later in itertools.pairwise(copies)) * 0.6)
    share = 0.2 if "asan" in os.environ.get("LD_PRELOAD", "") else 0.0
    copy, bytes_of_it = ctypes.PyDLL(None).memcpy, (target.ctypes.data, source.ctypes.data, source.nbytes)
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def holds() -> None:
        """What a call would be that keeps the lock while it moves 64 MiB, or more where that is done within the limit:
        PyDLL does not let it go."""
        until = time.thread_time() + 2 * limit
        while time.thread_time() < until:
            copy(*bytes_of_it)

    def gets_on(call: Callable[[], object]) -> bool:
        hvd.barrier()
        if hvd.rank() == 0:
            time.sleep(0.02)  # the other rank is there by then, or this look finds nothing
            held, used = longest_hold(call)
        else:
            call()
            held, used = 0.0, 0.0
        return bool(hvd.broadcast(np.array([held < max(limit, share * used)]), 0)[0])

    try:
        assert not any(gets_on(holds) for _ in range(3)), "a call that holds the lock is not seen here"
        held = [name for name, call in large_calls().items() if not any(gets_on(call) for _ in range(60))]
    finally:
        sys.setswitchinterval(interval)
    assert not held, held
