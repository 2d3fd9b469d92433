"""dcoll.run(): a function on several ranks, from a Python program that is none of them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from dcoll.errors import ArgumentError, DcollError, text_of
from dcoll.runner import command_lines
from dcoll.runner.channel import Channel, reachable_names
from dcoll.runner.hosts import UsageError, is_local

_FIXED_RANKS = "the ranks of a job are those that mpirun starts: give num_proc and hosts, or hostfile"


def run(
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call func(*args, **kwargs) on num_proc ranks that dcollrun starts, and return their results in rank order.

    The function, which calls dcoll.init() itself, its arguments and its results are pickled, by cloudpickle where that
    is installed. Ranks read nothing from the caller's standard input. An exception on a rank ends the job; DcollError
    names the rank and the exception. hosts: as dcollrun's -H. mpi_args: more arguments for mpirun, in one string.
    executable: the Python of the ranks. hostfile, ssh_port, ssh_identity_file, network_interfaces, output_filename and
    verbose are dcollrun's. The other arguments are horovod.run's, to be left out: they choose between things that are
    fixed here.

    With ranks on other hosts the caller listens on a TCP port while the job runs. Who connects must hold the job's key,
    which mpirun hands to the ranks; the function and its results are then sent unencrypted. So the hosts, their users
    and the network between them must be trusted: results are unpickled here, which lets who sends them run code.
    """
    fixed = {
        "min_num_proc": min_num_proc, "max_num_proc": max_num_proc, "slots": slots, "reset_limit": reset_limit,
        "cooldown_range": cooldown_range, "host_discovery_script": host_discovery_script, "min_np": min_np,
        "max_np": max_np,
    }  # fmt: skip
    for name, value in fixed.items():
        if value is not None:
            raise ArgumentError(f"run() got {name}={value!r}, but {_FIXED_RANKS}; leave {name} out")
    if use_gloo:
        raise ArgumentError("run() got use_gloo=True, but it starts ranks with MPI's mpirun; leave it out")
    if hosts is not None and hostfile is not None:
        raise ArgumentError("run() got hosts= and hostfile=, which say the same thing: pass one of them")
    if start_timeout is not None or disable_cache is not None:
        warnings.warn(
            "start_timeout= and disable_cache= need nothing here: ranks meet within DCOLL_TIMEOUT, nothing is cached",
            stacklevel=2,
        )
    ranks = num_proc if np is None else np
    if not isinstance(ranks, int) or ranks < 1:
        raise ArgumentError(f"run() got num_proc={ranks!r}, but a job has at least 1 rank")
    given = {
        "-H": hosts, "--hostfile": hostfile, "-p": ssh_port, "-i": ssh_identity_file,
        "--output-filename": output_filename, "--network-interfaces": network_interfaces or network_interface,
        "--mpi-args": mpi_args,
    }  # fmt: skip
    options = [
        f"{name}={value}" if name.startswith("--") else f"{name}{value}" for name, value in given.items() if value
    ]
    options += ["--verbose"] if verbose else []
    return _Job(ranks, options, executable or sys.executable).run(_pickled((func, tuple(args), kwargs or {})))


def _pickled(what: Any) -> bytes:
    from dcoll.job.objects import pickled

    try:
        with _main_by_value():
            return pickled(what)
    except Exception as error:  # whatever pickling raised
        raise ArgumentError(
            f"the function and its arguments cannot be pickled ({text_of(error)}); "
            "`pip install cloudpickle` for functions of scripts and lambdas"
        ) from error


@contextlib.contextmanager
def _main_by_value() -> Iterator[None]:
    """In a process that multiprocessing has spawned the script is no __main__, but ranks cannot import it either."""
    main = sys.modules["__main__"]
    try:
        import cloudpickle  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        cloudpickle = None
    if main.__name__ != "__mp_main__" or cloudpickle is None:
        yield
        return
    cloudpickle.register_pickle_by_value(main)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(main)


class _Job:
    """Hands the function to the ranks and takes their results, over connections that both sides authenticate."""

    def __init__(self, ranks: int, options: list[str], executable: str) -> None:
        self._ranks = ranks
        self._options = options
        self._executable = executable
        self._key = os.urandom(32)
        self._results: dict[int, bytes] = {}
        self._errors: dict[int, str] = {}
        self._broken: str | None = None

    def run(self, task: bytes) -> list[Any]:
        from dcoll.runner import cli, options

        command = [self._executable, "-m", "dcoll.runner.task"]
        try:
            args = options.parser().parse_args(["-np", str(self._ranks), *self._options, *command])
            job = cli.job_from(args)
            mpirun = command_lines.find_mpirun()
        except UsageError as error:
            raise ArgumentError(f"run(): {error}") from None
        listener, address = _listen(job)
        job.exported |= {"_DCOLL_RUN_ADDRESS": address, "_DCOLL_RUN_KEY": self._key.hex()}
        job.exported["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        server = threading.Thread(target=self._serve, args=(listener, task), daemon=True)
        server.start()
        try:
            # mpirun would read all of the caller's standard input, which is the program's, or a session's next lines.
            status = cli.start(job, mpirun, args.verbose, stdin=subprocess.DEVNULL)
        finally:
            # Ranks end when the caller has what they sent: who is connected now is none, or was killed.
            listener.shutdown(socket.SHUT_RDWR)
            server.join()
            listener.close()
        return self._outcome(status)

    def _serve(self, listener: socket.socket, task: bytes) -> None:
        """A thread for each connection: one that says nothing keeps nobody waiting."""
        peers: set[socket.socket] = set()
        while True:
            try:
                peer, _ = listener.accept()
            except OSError as error:
                if error.errno == errno.EINVAL:  # shut down
                    break
                time.sleep(0.05)  # out of descriptors, most likely: strangers' time runs out
                continue
            peers = {one for one in peers if one.fileno() >= 0} | {peer}
            try:
                threading.Thread(target=self._talk, args=(peer, task), daemon=True).start()
            except RuntimeError as error:  # no thread
                peer.close()
                self._broken = str(error)
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def _talk(self, peer: socket.socket, task: bytes) -> None:
        try:
            with Channel(peer, self._key, "caller") as channel:
                what, rank = channel.receive().decode().split()
                if what == "task":
                    channel.send(task)
                elif what == "error":
                    self._errors[int(rank)] = channel.receive().decode()
                    channel.send(b"")
                else:
                    self._results[int(rank)] = channel.receive()
                    channel.send(b"")
        except (OSError, ValueError) as error:
            self._broken = text_of(error)

    def _outcome(self, status: int) -> list[Any]:
        import pickle

        if self._errors:
            # PeerError is what the others raise because of it.
            rank = min(self._errors, key=lambda rank: (self._errors[rank].startswith("PeerError"), rank))
            raise DcollError(f"run(): rank {rank}: {self._errors[rank]} (its output has the traceback)")
        missing = [rank for rank in range(self._ranks) if rank not in self._results]
        if missing:
            why = f"; a connection failed: {self._broken}" if self._broken else ""
            raise DcollError(
                f"run(): the job ended with exit status {status} without a result of "
                f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}{why}"
            )
        return [pickle.loads(self._results[rank]) for rank in range(self._ranks)]


def _listen(job: command_lines.Job) -> tuple[socket.socket, str]:
    """Where the ranks find this process: by an abstract name while all are here, else at a port of every interface."""
    if not job.remote:
        name = f"dcoll-run-{os.urandom(16).hex()}"  # no file: TMPDIR may be longer than a socket's name
        return socket.create_server(f"\0{name}", family=socket.AF_UNIX), f"@{name}"
    names = reachable_names([host.name for host in job.hosts if not is_local(host.name)])
    if not names:
        raise ArgumentError(
            "run(): this host has no name and no address but those of the loopback, under which the ranks of other "
            "hosts would find themselves; give it a host name that they can resolve"
        )
    both = socket.has_dualstack_ipv6()
    listener = socket.create_server(("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
    return listener, f"{','.join(names)}:{listener.getsockname()[1]}"
