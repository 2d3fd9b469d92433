"""What coordinator and workers say to each other: JSON values, one per line, over a Unix socket.

Only the standard library: workers run in virtual environments that hold nothing but one MPI and NumPy.
"""

import json
import os
import socket
import time
from typing import Any


class Closed(Exception):
    """The other side is gone."""


class Channel:
    """One connection. receive() blocks in the kernel, so that whoever waits for its turn uses no CPU."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pending = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def has_message(self) -> bool:
        """A whole message has been read already: the socket will not tell of it again."""
        return b"\n" in self._pending

    def send(self, message: dict[str, Any]) -> None:
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Closed(str(error)) from None

    def receive(self, deadline: float | None = None) -> dict[str, Any]:
        """The next message. Raises TimeoutError when the time (of time.monotonic()) is past, Closed at the end."""
        while b"\n" not in self._pending:
            try:
                more = self._read(deadline)
            except TimeoutError:
                raise
            except OSError as error:
                raise Closed(str(error)) from None
            if not more:
                raise Closed("the connection was closed")
            self._pending += more
        line, self._pending = self._pending.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _read(self, deadline: float | None) -> bytes:
        if deadline is None:
            return self._connection.recv(1 << 16)
        self._connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        try:
            return self._connection.recv(1 << 16)
        finally:
            self._connection.settimeout(None)

    def close(self) -> None:
        self._connection.close()


def connect(path: str) -> Channel:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return Channel(connection)


# How the launchers tell a process its rank: ours, Open MPI's, and that of Hydra (MPICH, Intel MPI) and Slurm.
RANK_VARIABLES = ("BENCH_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def rank_from_environment() -> int:
    for name in RANK_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    raise RuntimeError(f"no rank in the environment: start workers by a launcher that sets one of {RANK_VARIABLES}")
