"""Where the ranks of a job run: -H host1:2,host2:2, or a host file."""

import re
import socket
from dataclasses import dataclass
from pathlib import Path


class UsageError(Exception):
    """What the user wrote cannot be done; the text says what to write instead."""


@dataclass(frozen=True)
class Host:
    """A host and how many ranks it takes."""

    name: str
    slots: int


_HOST = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:]+\])(:(?P<slots>[0-9]{1,9}))?")


def parse_hosts(text: str) -> list[Host]:
    """'host1:2,host2:4', as horovodrun and mpirun take it; a host without a number has one slot."""
    hosts = []
    for entry in text.split(","):
        match = _HOST.fullmatch(entry.strip())
        if match is None or (match["slots"] is not None and int(match["slots"]) == 0):
            raise UsageError(f"-H {text}: {entry.strip()!r} is not a host; write host:slots, like node1:4,node2:4")
        hosts.append(Host(match["name"], int(match["slots"] or 1)))
    return merge(hosts)


def parse_hostfile(path: Path) -> list[Host]:
    """Lines 'host slots=N' (Horovod, Open MPI), 'host:N' (MPICH) or 'host'; # begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()  # comments are in any encoding
    except OSError as error:
        raise UsageError(f"--hostfile {path} cannot be read: {error.strerror}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        slots = [word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")]
        match = _HOST.fullmatch(words[0])
        count = slots[0] if slots else (match and match["slots"]) or "1"
        if match is None or not re.fullmatch("[0-9]{1,9}", count) or int(count) == 0:
            raise UsageError(f"--hostfile {path}, line {number}: {line.strip()!r} is not 'host slots=N'")
        hosts.append(Host(match["name"], int(count)))
    if not hosts:
        raise UsageError(f"--hostfile {path} names no host")
    return merge(hosts)


def merge(hosts: list[Host]) -> list[Host]:
    """A host named twice has the slots of both."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(name, count) for name, count in slots.items()]


def is_local(host: str) -> bool:
    """Whether the name means this machine."""
    own = socket.gethostname()
    return host in ("localhost", "127.0.0.1", "[::1]", own, own.split(".")[0], socket.getfqdn())


def fit(hosts: list[Host], ranks: int) -> list[Host]:
    """The hosts as filled by `ranks` ranks, one after the other; too few slots are an error."""
    have = sum(host.slots for host in hosts)
    if ranks > have:
        named = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise UsageError(f"-np {ranks} is more than the {have} slots of {named}; name more hosts or slots")
    filled = []
    for host in hosts:
        take = min(host.slots, ranks)
        ranks -= take
        if take:
            filled.append(Host(host.name, take))
    return filled
