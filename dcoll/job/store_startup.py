"""A job without MPI: its ranks meet in torch's TCPStore, at the address that torchrun puts into the environment."""

import os
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from dcoll import _C
from dcoll.errors import ArgumentError, DcollError, TimeoutError
from dcoll.job import environment
from dcoll.job.find_launcher import Launcher


def open_store(launcher: Launcher, env: Mapping[str, str] = os.environ) -> _C.Bootstrap:
    """The job that the environment tells of. TimeoutError: its store is not there."""
    rank, size, port = (_number(env, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host = env.get("MASTER_ADDR", "")
    if not host or rank >= size:
        raise ArgumentError(
            f"{launcher} started this process with RANK={rank}, WORLD_SIZE={size} and MASTER_ADDR={host!r}: the rank "
            "must be below the size, and the address that of rank 0's host"
        )
    _C.make_ender()
    in_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit = environment.seconds("DCOLL_TIMEOUT")
    if in_agent or rank != 0:
        whose = "the agent of torchrun" if in_agent else "rank 0, in dcoll.init(),"
        _wait_for(host, port, limit, f"{whose} has not opened the store at {host}:{port} (MASTER_ADDR, MASTER_PORT)")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        # Several libraries may host one at this address, as init_process_group does: they share it (multi_tenant).
        store = TCPStore(
            host, port, size, rank == 0 and not in_agent, timedelta(seconds=limit), wait_for_workers=False,
            multi_tenant=True,
        )  # fmt: skip
    except RuntimeError as error:
        raise DcollError(f"dcoll.init(): the store at {host}:{port} cannot be used: {error}") from error
    # An agent keeps its store when it starts the ranks again.
    prefix = f"dcoll/{env.get('TORCHELASTIC_RUN_ID', '')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}/"

    return meet(store, prefix, rank, size)


def meet(store: Any, prefix: str, rank: int, size: int) -> _C.Bootstrap:
    """A job whose ranks meet in one of torch's stores, where the names of their keys begin so."""

    def get(key: str) -> bytes | None:
        return bytes(store.get(prefix + key)) if store.check([prefix + key]) else None

    return _C.open_store(rank, size, lambda key, value: store.set(prefix + key, value), get)


def _number(env: Mapping[str, str], name: str) -> int:
    if not env.get(name, "").isdecimal():
        raise ArgumentError(f"{name}={env.get(name)!r} is no number, but tells where this process is in its job")
    return int(env[name])


def _wait_for(host: str, port: int, limit: float, missing: str) -> None:
    """Until somebody listens there. torch's own client waits as well, but heeds neither Ctrl-C nor tells of it."""
    begin, report = time.monotonic(), environment.seconds("DCOLL_STALL_CHECK_TIME")
    while True:
        try:
            socket.create_connection((host, port), timeout=min(limit, 5.0)).close()
        except OSError as error:
            why = str(error)
        else:
            return
        waited = time.monotonic() - begin
        if waited >= limit:
            raise TimeoutError(f"dcoll.init(): {missing}, within {limit:g} s (DCOLL_TIMEOUT): {why}.")
        if waited >= report:
            print(f"dcoll: dcoll.init() has waited {report:g} s: {missing}: {why}.", file=sys.stderr, flush=True)
            report = limit
        time.sleep(0.05)
