"""Processes that have imported torch before they begin: python -IS preloaded.py SERVER SCRIPT ARGUMENTS...

`import torch` takes seconds of a core, and these tests start many hundred ranks. What a launcher starts in a rank's
place is a proxy: it hands its arguments, environment, working folder and standard streams to a server, which has torch
and forks the rank. The proxy ends as the rank ends; when the proxy is killed, so is the rank. Each number of a rank has
a server of its own, so that ranks differ as processes do that were started: in addresses and in the order of sets.
torchrun, which imports torch too, has one. SERVER is a socket, in which % stands for the rank's number.
"""

import json
import os
import random
import select
import signal
import socket
import struct
import sys

END_S = 5.0
"""How long a process has to end by itself when its proxy was ended."""
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
LENGTH = struct.Struct("!I")
STATUS = struct.Struct("!i")


def received(stream: socket.socket, size: int) -> bytes:
    """Fewer bytes: the other side has gone."""
    data = b""
    while len(data) < size and (more := stream.recv(size - len(data))):
        data += more
    return data


def proxy(path: str, *argv: str) -> None:
    path = path.replace("%", next((os.environ[name] for name in RANKS if name in os.environ), "?"))
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    wanted = json.dumps({"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}).encode()
    socket.send_fds(server, [LENGTH.pack(len(wanted))], [0, 1, 2])
    server.sendall(wanted)
    told = received(server, STATUS.size)
    if len(told) < STATUS.size:
        sys.exit(f"the server of preloaded processes at {path} has gone")
    (status,) = STATUS.unpack(told)
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(abs(status))


def serve(path: str) -> list[str]:
    """Until standard input ends. Returns in a process that it made, with its arguments."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers leave nothing
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.begun")
    listener.listen(64)
    os.rename(f"{path}.begun", path)  # now there is an answer to who connects
    while True:
        if sys.stdin in select.select([sys.stdin, listener], [], [])[0]:
            os._exit(0)
        stream, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return keep(stream)
        stream.close()


def keep(stream: socket.socket) -> list[str]:
    """Fork the process that a proxy asks for, and stay until one of the two has ended. Returns in that process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as mpirun starts ranks, however itself was started
    head, streams, *_ = socket.recv_fds(stream, LENGTH.size, 3)
    wanted = json.loads(received(stream, LENGTH.unpack(head)[0]))
    process = os.fork()
    if process == 0:
        stream.close()
        for to, source in enumerate(streams):
            os.dup2(source, to)
            os.close(source)
        os.environ.clear()
        os.environ.update(wanted["env"])
        os.chdir(wanted["cwd"])
        return wanted["argv"]
    for source in streams:
        os.close(source)
    ended = os.pidfd_open(process)
    if stream in select.select([stream, ended], [], [])[0]:
        os.kill(process, signal.SIGTERM)
        if not select.select([ended], [], [], END_S)[0]:
            os.kill(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    try:
        stream.sendall(STATUS.pack(status))
    finally:
        os._exit(0)


def run(script: str, *argv: str) -> int:
    """What python does with these words: `-m MODULE`, `-c CODE` or a file, and what is for them."""
    import runpy

    try:
        if script == "-m":
            sys.argv = list(argv)
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        elif script == "-c":
            sys.argv = ["-c", *argv[1:]]
            exec(compile(argv[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = [script, *argv]
            sys.path[0] = os.path.dirname(os.path.abspath(script))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return 1 if isinstance(end.code, str) else int(end.code or 0)
    return 0


def main(what: str, *argv: str) -> None:
    if what != "serve":
        return proxy(what, *argv)
    import atexit
    import importlib
    import threading

    import numpy as np

    for name in ("pytest", "torch.distributed.run", "torch._dynamo"):  # the last: what making an optimizer imports
        importlib.import_module(name)
    asked = serve(*argv)
    random.seed()
    np.random.seed()
    status = run(*asked)
    # What a normal end does for its callers, without taking torch's modules apart: in a forked process 2 s of a core.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
