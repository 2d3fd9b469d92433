"""The job: what only all ranks together can see. Every rank runs this, rank 0 prints."""

import fcntl
import os
import socket
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Interface
from pathlib import Path

from dcoll.doctor import machine
from dcoll.doctor.finding import Finding, broken, fine, note
from dcoll.job.find_launcher import find_launcher


@dataclass(frozen=True)
class Seen:
    """What one rank tells of itself."""

    rank: int
    node: int
    host: str
    cpus: frozenset[int]
    versions: str
    interfaces: dict[str, str] = field(default_factory=dict)  # name -> address/prefix


def is_started(env: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as one of several."""
    launcher = find_launcher(env)
    return launcher is not None and launcher.size != 1


def examine() -> list[Finding] | None:
    """Join the job and compare what the ranks see; None on all ranks but the first."""
    import dcoll

    try:
        dcoll.init()
    except Exception as error:  # whatever keeps the job from starting is the finding
        return [*machine.examine(), broken("job", f"{type(error).__name__}: {error}", "See what is broken above.")]
    comm = dcoll.job.world.communicator()
    seen: list[Seen] = dcoll.allgather_object(look(comm.rank, comm.node))
    return [*machine.examine(), *compare(seen, comm.transports)] if comm.rank == 0 else None


def look(rank: int, node: int) -> Seen:
    """This rank's part."""
    import torch

    from dcoll import _C

    versions = f"dcoll {_C.__version__}, torch {torch.__version__}"
    cpus = frozenset(os.sched_getaffinity(0))
    return Seen(rank, node, socket.gethostname(), cpus, versions, interfaces())


def interfaces() -> dict[str, str]:
    """IPv4 addresses of the interfaces that are up, without loopback."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                address = fcntl.ioctl(query, 0x8915, request)[20:24]  # SIOCGIFADDR
                mask = fcntl.ioctl(query, 0x891B, request)[20:24]  # SIOCGIFNETMASK
            except OSError:
                continue  # it has none
            if address[0] != 127:
                prefix = int.from_bytes(mask, "big").bit_count()
                found[name] = f"{socket.inet_ntoa(address)}/{prefix}"
    return found


def compare(seen: list[Seen], transports: list[str]) -> list[Finding]:
    """What the ranks' reports say together."""
    findings = [ranks(seen, transports), versions(seen), affinity(seen)]
    if len({one.node for one in seen}) > 1:
        findings.append(network(seen))
    return findings


def ranks(seen: list[Seen], transports: list[str]) -> Finding:
    """Who runs where."""
    hosts = Counter(one.host for one in seen)
    text = f"{len(seen)} ranks on " + ", ".join(f"{host} ({count})" for host, count in hosts.items())
    text += f"; rank 0 reaches its peers over {', '.join(sorted(set(transports) - {'self'})) or 'nothing'}"
    nodes = len({one.node for one in seen})
    if nodes > len(hosts):
        return note(
            "job", f"{text}; {nodes} groups share memory",
            "Ranks of one host cannot map each other's memory (separate containers or users?): they use MPI, which is "
            "slower. Run them in one container, with one IPC and user namespace.",
        )  # fmt: skip
    return fine("job", text)


def versions(seen: list[Seen]) -> Finding:
    by_version = Counter(one.versions for one in seen)
    if len(by_version) == 1:
        return fine("versions", next(iter(by_version)))
    text = "; ".join(
        f"{what}: ranks {', '.join(str(s.rank) for s in seen if s.versions == what)}" for what in by_version
    )
    return broken("versions", text, "Install the same versions on all hosts.")


def affinity(seen: list[Seen]) -> Finding:
    """A core for each rank?"""
    for host in sorted({one.host for one in seen}):
        here = [one for one in seen if one.host == host]
        cpus = frozenset[int]().union(*(one.cpus for one in here))
        if len(cpus) < len(here):
            return note(
                "affinity", f"{len(here)} ranks on {host} share {len(cpus)} CPUs",
                "dcoll works so, but as many ranks as cores are faster. If the host has more cores, the ranks "
                "were bound too tightly: mpirun --bind-to core --map-by core, or --bind-to none.",
            )  # fmt: skip
        for one in here:
            if any(one.cpus == other.cpus and len(one.cpus) < len(here) for other in here if other.rank < one.rank):
                return note(
                    "affinity", f"rank {one.rank} on {host} shares its CPUs {sorted(one.cpus)} with another rank",
                    "Give every rank a core of its own: mpirun --bind-to core --map-by core.",
                )  # fmt: skip
    bound = all(len(one.cpus) == 1 or len(seen) == 1 for one in seen)
    return fine("affinity", "each rank has its own core" if bound else "enough CPUs for all ranks, not bound")


def network(seen: list[Seen]) -> Finding:
    """A subnet that all hosts have, and addresses that lead to the wrong host."""
    hosts = {one.host: one.interfaces for one in seen}
    owners = Counter(IPv4Interface(text).ip for addresses in hosts.values() for text in addresses.values())
    shared = {str(address) for address, count in owners.items() if count > 1}
    nets = [{IPv4Interface(text).network for text in addresses.values()} for addresses in hosts.values()]
    common = set.intersection(*nets)
    usable = sorted(str(net) for net in common if not any(IPv4Interface(f"{a}/{net.prefixlen}") in net for a in shared))
    text = "; ".join(
        f"{host}: " + ", ".join(f"{n} {a}" for n, a in sorted(i.items())) for host, i in sorted(hosts.items())
    )
    bad = sorted({name for i in hosts.values() for name, a in i.items() if a.split("/")[0] in shared})
    if not usable:
        return note(
            "network", text,
            "The hosts have no subnet in common; MPI must route. If ranks do not find each other, name the interfaces: "
            "mpirun --mca btl_tcp_if_include NAME.",
        )  # fmt: skip
    if bad:
        return note(
            "network", text,
            f"Several hosts have the same address on {', '.join(bad)} (a container bridge?): messages sent there get "
            f"lost. Leave it out: mpirun --mca btl_tcp_if_exclude lo,{','.join(bad)}.",
        )  # fmt: skip
    link = [f"{n} {speed(n)}" for n, a in sorted(seen[0].interfaces.items()) if str(IPv4Interface(a).network) in usable]
    return fine("network", f"{text}; in common: {', '.join(usable)}; on {seen[0].host}: {', '.join(link)}")


def speed(interface: str) -> str:
    """The link rate as the kernel knows it."""
    try:
        megabits = int(Path(f"/sys/class/net/{interface}/speed").read_text())
    except (OSError, ValueError):
        megabits = -1
    return f"{megabits / 1000:g} Gbit/s" if megabits > 0 else "(rate unknown)"
