"""One rank of one engine: waits for its turn, makes the calls of the turn, answers with their times.

Started by the coordinator. Needs only NumPy and the engine itself. While it is not its turn it sleeps in recv().
"""

import argparse
import importlib
import json
import os
import select
import sys
import threading
import time
import traceback
from typing import Any

from protocol import Channel, Closed, connect, rank_from_environment


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--socket", required=True)
    add("--job", required=True)
    add("--adapter", required=True, help="module.Class")
    add("--ranks", type=int, required=True)
    add("--cpus", default="", help="one CPU per rank, like 0,1; empty: no pinning")
    add("--options", type=json.loads, default={}, help="what the adapter reads of its arguments, as JSON")
    return parser.parse_args()


def pin(cpus: str, rank: int) -> None:
    """Before anything starts threads, which inherit it. By us, because every launcher pins differently."""
    if cpus:
        os.sched_setaffinity(0, {int(cpus.split(",")[rank])})


def leave_with(channel: Channel) -> None:
    """End this process when the coordinator is gone, also in the middle of a call that would wait for ever."""

    def watch() -> None:
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLRDHUP)
        while not any(event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR) for _, event in poll.poll()):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Idle:
    """How much CPU this process, all threads, used between its turns: others were measured meanwhile."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        self.cpu_s = self.wall_s = 0.0

    def turn_begins(self) -> None:
        self.cpu_s += time.process_time() - self._cpu
        self.wall_s += time.perf_counter() - self._wall

    def turn_ends(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()


def serve(channel: Channel, adapter: Any) -> None:
    idle = Idle()
    while True:
        request = channel.receive()
        idle.turn_begins()
        if request["do"] == "stop":
            channel.send({"idle_cpu_s": idle.cpu_s, "idle_wall_s": idle.wall_s})
            return
        answer = adapter.answer(request)
        channel.send(answer)
        idle.turn_ends()


def main() -> int:
    args = parse()
    rank = rank_from_environment()
    pin(args.cpus, rank)
    channel = connect(args.socket)
    channel.send({"job": args.job, "rank": rank, "pid": os.getpid()})
    leave_with(channel)

    def share(value: Any) -> Any:
        """Rank 0's value, on every rank. The coordinator passes it on."""
        if rank == 0:
            channel.send({"share": value})
            return value
        return channel.receive()["share"]

    try:
        module, name = args.adapter.split(".")
        adapter = getattr(importlib.import_module(module), name)(args, rank, share)
        channel.send({"ready": adapter.info()})
        serve(channel, adapter)
        adapter.close()
    except Closed:
        return 1
    except BaseException as error:
        traceback.print_exc()
        channel.send({"failed": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)
