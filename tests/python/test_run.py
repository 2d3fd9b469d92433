"""dcoll.run() with ranks on other hosts, and strangers at its port. tests/mpi has the jobs without strangers."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dcoll
from dcoll.runner import api, channel, command_lines
from dcoll.runner.command_lines import Job, Mpirun
from dcoll.runner.hosts import Host

Server = Callable[[bytes], tuple[api._Job, int]]
KEY = bytes(range(32))

# Stands for mpirun and ssh: strangers connect to the caller before the ranks do, and stay until they have ended.
LAUNCHER = """
import os, socket, struct, subprocess, sys

def stranger(data):
    hosts, _, port = os.environ["_DCOLL_RUN_ADDRESS"].rpartition(":")
    found = socket.create_connection((hosts.split(",")[0], int(port)), 10)
    found.sendall(data)
    return found

half = struct.pack("!i", 32) + bytes(10)
strangers = [stranger(data) for data in [b"", b"GET / HTTP/1.0\\r\\n\\r\\n" * 9, bytes(7), half, b"\\xff" * 64]]
ranks = [
    subprocess.Popen(sys.argv[-3:], env=os.environ | {"PMI_RANK": str(rank)})
    for rank in range(int(sys.argv[sys.argv.index("-n") + 1]))
]
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A launcher that starts the ranks of every host here, and lets strangers in first."""
    script = tmp_path / "launcher"
    script.write_text(f"#!{sys.executable}\n{LAUNCHER}")
    script.chmod(0o755)
    monkeypatch.setattr(command_lines, "find_mpirun", lambda: Mpirun(str(script), "hydra", 0, "HYDRA"))
    monkeypatch.setattr(api, "reachable_names", lambda remote: ["127.0.0.1"])
    return script


def is_over(thread: threading.Thread) -> bool:
    thread.join(30)
    return not thread.is_alive()


def times_two(number: int) -> int:
    return 2 * number


def test_strangers_keep_nobody_waiting(remote: Path) -> None:
    began = time.monotonic()
    assert dcoll.run(times_two, (21,), num_proc=2, hosts="192.0.2.1:2") == [42, 42]
    assert time.monotonic() - began < channel.HANDSHAKE_SECONDS * 3  # not for ever
    assert not [thread for thread in threading.enumerate() if "_talk" in thread.name and not is_over(thread)]


# Ends its ranks when it is told to end, as mpirun does.
LAUNCHER_THAT_IS_ENDED = """
import os, signal, subprocess, sys
from pathlib import Path

rank = subprocess.Popen(sys.argv[-3:])
signal.signal(signal.SIGTERM, lambda *_: rank.kill())
folder = Path(sys.argv[0]).parent
(folder / "written").write_text(os.environ["_DCOLL_RUN_ADDRESS"])
(folder / "written").rename(folder / "address")
rank.wait()
"""
CALLER = """
import sys
from pathlib import Path
import dcoll
from dcoll.runner import api, command_lines

folder = Path(sys.argv[1])
command_lines.find_mpirun = lambda: command_lines.Mpirun(str(folder / "launcher"), "hydra", 0, "HYDRA")
api.reachable_names = lambda remote: ["127.0.0.1"]

def work(file):
    import time
    file.touch()
    time.sleep(1000)

if __name__ == "__main__":
    dcoll.run(work, (folder / "working",), hosts="192.0.2.1:1")
"""


def test_a_signal_ends_it_whoever_is_connected(remote: Path) -> None:
    remote.write_text(f"#!{sys.executable}\n{LAUNCHER_THAT_IS_ENDED}")
    folder = remote.parent
    (folder / "caller.py").write_text(CALLER)

    def wait_for(name: str) -> Path:
        until = time.monotonic() + 60
        while not (folder / name).exists():
            assert time.monotonic() < until, f"no file {name!r}"
            assert caller.poll() is None
            time.sleep(0.05)
        return folder / name

    with subprocess.Popen(
        [sys.executable, str(folder / "caller.py"), str(folder)], stderr=subprocess.PIPE, text=True
    ) as caller:
        try:
            host, _, port = wait_for("address").read_text().rpartition(":")
            with socket.create_connection((host, int(port))):  # says nothing, and outlives the launcher
                wait_for("working")
                caller.send_signal(signal.SIGTERM)
                _, told = caller.communicate(timeout=30)
        finally:
            caller.kill()
    assert caller.returncode == 1
    assert "without a result of rank 0" in told


@pytest.fixture
def server() -> Iterator[Server]:
    """server(task): a job that serves at a port, with KEY."""
    listeners = []

    def serve(task: bytes) -> tuple[api._Job, int]:
        job = api._Job(1, [], sys.executable)
        job._key = KEY
        listener = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=job._serve, args=(listener, task), daemon=True)
        thread.start()
        listeners.append((listener, thread))
        return job, listener.getsockname()[1]

    yield serve
    for listener, thread in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        assert is_over(thread)
        listener.close()


def ended_by_the_caller(stranger: socket.socket) -> bool:
    """Whether the caller closes the connection; what it says before does not matter."""
    stranger.settimeout(30)
    with contextlib.suppress(ConnectionError):
        while stranger.recv(1000):
            pass
    return True


@pytest.mark.parametrize(
    "said",
    [
        b"",
        bytes(10),
        bytes(64),
        b"\xff" * 4096,
        struct.pack("!i", 0x7FFFFFFF),
        struct.pack("!iQ", -1, 1 << 60) + b"x" * 100,
        b"\x80\x04\x95" * 30,
    ],
    ids=["silent", "half", "zeros", "ones", "length", "long length", "pickle"],
)
def test_a_stranger_is_left_at_the_deadline(server: Server, said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.3)
    job, port = server(b"secret task")
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(said)
        assert ended_by_the_caller(stranger)
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 20.0)
    with channel.connect(f"127.0.0.1:{port}", KEY) as rank:  # the next one finds all well
        rank.send(b"task 0")
        assert rank.receive() == b"secret task"
    assert (job._results, job._errors) == ({}, {})


def test_drops_of_bytes_do_not_prolong_the_deadline(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.5)
    _, port = server(b"task")
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        dropped = 0
        with contextlib.suppress(OSError):
            while dropped < 31:  # of the 32 of a nonce, in 6 s
                stranger.sendall(b"x")
                dropped += 1
                time.sleep(0.2)
        assert dropped < 31


def test_who_has_another_key_gets_nothing(server: Server) -> None:
    job, port = server(b"secret task")
    with pytest.raises(ConnectionError, match=r"cannot be reached: 127\.0\.0\.1: the peer"):
        channel.connect(f"127.0.0.1:{port}", bytes(32))
    assert (job._results, job._errors) == ({}, {})


def test_an_echo_is_no_proof() -> None:
    """A peer that sends back what it gets would prove the key if both sides signed alike."""
    ours, theirs = socket.socketpair()

    def echo() -> None:
        with theirs:
            for _ in range(2):
                theirs.sendall(theirs.recv(32, socket.MSG_WAITALL))

    thread = threading.Thread(target=echo)
    thread.start()
    with pytest.raises(ConnectionError, match="does not hold this job's key"):
        channel.Channel(ours, KEY, "caller")
    assert is_over(thread)


def test_a_rank_tries_the_next_name_when_one_is_someone_else(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    _, port = server(b"task")
    other = socket.create_server(("127.0.0.2", port))  # accepts nobody, and says nothing
    with other:
        monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.5)
        with channel.connect(f"127.0.0.2,127.0.0.1:{port}", KEY) as rank:
            rank.send(b"task 0")
            assert rank.receive() == b"task"


def test_results_of_any_size_arrive(server: Server) -> None:
    from dcoll.runner import task

    job, port = server(b"")
    sizes = [0, 1, (1 << 20) - 1, 1 << 20, (1 << 23) + 1]
    for rank, size in enumerate(sizes):
        task.hand_in(channel.connect(f"127.0.0.1:{port}", KEY), "result", rank, os.urandom(size))
    assert [len(job._results[rank]) for rank in range(len(sizes))] == sizes


@pytest.mark.parametrize("own", ["localhost", "localhost.localdomain", "node1"])
def test_other_hosts_get_no_name_of_the_loopback(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel.socket, "gethostname", lambda: own)
    monkeypatch.setattr(channel.socket, "getfqdn", lambda: own)
    loopback = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 9))]  # as Debian's /etc/hosts has it
    monkeypatch.setattr(channel.socket, "getaddrinfo", lambda *args, **kwargs: loopback)
    expected = ["node1"] if own == "node1" else []
    assert channel.reachable_names(["there"]) == expected
    job = Job(["x"], 1, [Host("there", 1)])
    if expected:
        listener, address = api._listen(job)
        listener.close()
        assert address.startswith("node1:")
    else:
        with pytest.raises(dcoll.ArgumentError, match="no address but those of the loopback"):
            api._listen(job)
