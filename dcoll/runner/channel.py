"""What dcoll.run() and its ranks talk over: frames, once both ends have shown each other that they hold the key."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Sequence

HANDSHAKE_SECONDS = 20.0
"""How long a peer may take to show the key, from its connection on."""
SILENCE_SECONDS = 60.0
"""How long a rank waits for the next bytes of the caller, which answers at once."""
_NONCE = 32
_PIECE = 1 << 20


class Channel:
    """Frames over a connected socket, which it owns. The constructor raises an OSError when the peer has not shown the
    key in HANDSHAKE_SECONDS. Until it has, what it sends is 64 bytes to compare: no length is believed, nothing is
    unpickled. What follows is neither encrypted nor signed."""

    def __init__(self, connection: socket.socket, key: bytes, side: str, silence: float | None = None) -> None:
        self._socket = connection
        self._deadline: float | None = time.monotonic() + HANDSHAKE_SECONDS
        self._silence = silence
        try:
            self._shake_hands(key, side)
        except BaseException:
            connection.close()
            raise
        self._deadline = None

    def _shake_hands(self, key: bytes, side: str) -> None:
        other = {"caller": "rank", "rank": "caller"}[side]  # in what is signed: an answer sent back is no answer
        own = os.urandom(_NONCE)
        self._write(own)
        nonce = bytes(self._read(_NONCE))
        self._write(_proof(key, side, nonce))
        if not hmac.compare_digest(self._read(_NONCE), _proof(key, other, own)):
            raise ConnectionError("the peer does not hold this job's key")

    def send(self, data: bytes) -> None:
        """One frame."""
        self._write(struct.pack("!Q", len(data)))
        for begin in range(0, len(data), _PIECE):
            self._write(memoryview(data)[begin : begin + _PIECE])

    def receive(self) -> bytes:
        """The next frame."""
        return bytes(self._read(*struct.unpack("!Q", self._read(8))))

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _patience(self) -> float | None:
        """For the next call: what is left of the handshake's time, which drops of bytes do not prolong."""
        return self._silence if self._deadline is None else max(self._deadline - time.monotonic(), 1e-3)

    def _write(self, data: bytes | memoryview) -> None:
        self._socket.settimeout(self._patience())
        self._socket.sendall(data)

    def _read(self, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:  # memory grows with what came, not with what was announced
            self._socket.settimeout(self._patience())
            piece = self._socket.recv(min(size - len(data), _PIECE))
            if not piece:
                raise ConnectionError("the peer closed the connection too early")
            data += piece
        return data


def _proof(key: bytes, side: str, nonce: bytes) -> bytes:
    return hmac.digest(key, side.encode() + nonce, "sha256")


def connect(address: str, key: bytes) -> Channel:
    """To the process that called run(). address: @ and an abstract socket's name, or host,host,...:port."""
    if address.startswith("@"):
        local = socket.socket(socket.AF_UNIX)
        local.connect(address.replace("@", "\0", 1))
        return Channel(local, key, "rank", SILENCE_SECONDS)
    hosts, _, port = address.rpartition(":")
    failures = []
    for host in hosts.split(","):
        try:
            # Where a name means another host here, another program may listen: it is left, and the next one tried.
            return Channel(socket.create_connection((host, int(port)), HANDSHAKE_SECONDS), key, "rank", SILENCE_SECONDS)
        except OSError as error:
            failures.append(f"{host}: {error}")
    raise ConnectionError(f"the host that called dcoll.run() cannot be reached: {'; '.join(failures)}")


def reachable_names(remote: Sequence[str]) -> list[str]:
    """Under which the ranks on the hosts `remote` may find this one: the addresses from which packets to them leave,
    then its names. Nothing that would mean the remote host itself there."""
    found = []
    for host in remote:
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)  # sends nothing
                found.append(str(probe.getsockname()[0]))
        except OSError:  # a name that only ssh knows, or no route: the names are left
            continue
    name = socket.gethostname()
    found += [socket.getfqdn(), name]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)]
    return [one for one in dict.fromkeys(found) if not _is_loopback(one)]


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.partition(".")[0] in ("", "localhost", "ip6-localhost", "ip6-loopback")
