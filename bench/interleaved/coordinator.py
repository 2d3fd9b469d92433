"""Jobs that are all alive and run one at a time: starting them, giving turns, ending those that do not answer."""

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from interleaved.protocol import Channel, Closed

STOP_S = 10.0  # for a job to end by itself when it is told to


class JobFailed(Exception):
    """A job did not start, ended early, hung or answered with an error. The text says which."""


@dataclass(frozen=True)
class Launch:
    """How a job is started: one launcher process, or one process per rank with its own environment."""

    commands: list[list[str]]
    environments: list[dict[str, str]]
    shared_fd: int = -1
    leaves: tuple[Path, ...] = ()  # files that the engine never removes; the coordinator does, after the job


@dataclass
class Job:
    """A job and its channels, by rank."""

    name: str
    ranks: int
    log: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    channels: dict[int, Channel] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    ready: dict[int, dict[str, Any]] = field(default_factory=dict)
    shared: dict[str, Any] | None = None  # from rank 0, for the others, which may connect after it

    def ask(self, message: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Send the message to every rank and return the answers by rank."""
        deadline, answers = time.monotonic() + timeout_s, {}
        for rank in range(self.ranks):
            try:
                self.channels[rank].send(message)
            except Closed:
                raise JobFailed(f"rank {rank} ended before '{message['do']}'{self.last_words()}") from None
        for rank in range(self.ranks):
            try:
                answers[rank] = self.channels[rank].receive(deadline)
            except TimeoutError:
                silent = [rank, *(r for r in range(rank + 1, self.ranks) if not self._has_answer(r))]
                raise JobFailed(f"hung: no answer to {describe(message)} from rank(s) {', '.join(map(str, silent))} "
                                f"within {timeout_s:g} s") from None  # fmt: skip
            except Closed:
                raise JobFailed(f"rank {rank} ended during {describe(message)}{self.last_words()}") from None
            if "failed" in answers[rank]:
                raise JobFailed(f"rank {rank} in {describe(message)}: {answers[rank]['failed']}")
        return [answers[rank] for rank in range(self.ranks)]

    def _has_answer(self, rank: int) -> bool:
        try:
            self.channels[rank].receive(time.monotonic())
        except (TimeoutError, Closed):
            return False
        return True

    def last_words(self) -> str:
        """The end of what the job printed, for messages."""
        time.sleep(0.1)  # the system may need a moment to tell how it ended
        ended = [process.returncode for process in self.processes if process.poll()]
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        status = f" (status {ended[0]})" if ended else ""
        return status + (": " + " | ".join(lines[-3:]) if lines else "")

    def kill(self) -> None:
        """End every process of the job, by its number: those we started and those that said hello."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()  # a launcher passes it on
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for channel in self.channels.values():
            channel.close()


def describe(message: dict[str, Any]) -> str:
    detail = " ".join(f"{key}={value}" for key, value in message.items() if key != "do")
    return f"'{message['do']}'" + (f" ({detail})" if detail else "")


class Coordinator:
    """Owns the socket, the jobs and the folder of their logs. Use as a context: leaving it ends every job."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.failures: dict[str, str] = {}
        self._left_over: list[Path] = []
        self._folder = Path(tempfile.mkdtemp(prefix="bench-"))  # for this user only, so the socket needs no secret
        self.socket_path = str(self._folder / "socket")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.socket_path)
        self._server.listen(1024)

    def __enter__(self) -> "Coordinator":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for job in self.jobs.values():
            job.kill()
        for path in self._left_over:
            path.unlink(missing_ok=True)
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def launch(self, name: str, ranks: int, launch: Launch) -> None:
        """Start the processes of a job; wait_ready() waits for them."""
        self._left_over += launch.leaves
        job = Job(name, ranks, self._folder / f"{name}.log")
        with job.log.open("wb") as log:
            for command, environment in zip(launch.commands, launch.environments, strict=True):
                keep = (launch.shared_fd,) if launch.shared_fd >= 0 else ()
                try:
                    # Its own session: control-C reaches the coordinator, which ends the jobs in order.
                    job.processes.append(subprocess.Popen(
                        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                        start_new_session=True, pass_fds=keep,
                    ))  # fmt: skip
                except OSError as error:
                    self.failures[name] = f"could not start: {error}"
                    job.kill()
                    return
        self.jobs[name] = job

    def wait_ready(self, timeout_s: float) -> None:
        """Until every rank of every job is ready. Jobs that fail or are late move to `failures`."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            while waiting := [job for job in self.jobs.values() if len(job.ready) < job.ranks]:
                for key, _ in selector.select(timeout=0.2):
                    if key.fileobj is self._server:
                        self._greet(selector, deadline)
                    elif key.data[0].name in self.jobs:  # else it failed just before, and its channels are closed
                        self._hear(selector, *key.data, deadline)
                for job in waiting:
                    self._check_start(selector, job, timeout_s, time.monotonic() > deadline)

    def _greet(self, selector: selectors.BaseSelector, deadline: float) -> None:
        channel = Channel(self._server.accept()[0])
        try:
            hello = channel.receive(deadline)
        except (Closed, TimeoutError):
            channel.close()
            return
        job = self.jobs.get(hello["job"])
        if job is None:  # its job failed meanwhile
            channel.close()
            return
        job.channels[hello["rank"]], job.pids[hello["rank"]] = channel, hello["pid"]
        if job.shared is not None:
            with contextlib.suppress(Closed):
                channel.send(job.shared)
        selector.register(channel, selectors.EVENT_READ, (job, hello["rank"], channel))
        if channel.has_message():
            self._hear(selector, job, hello["rank"], channel, deadline)

    def _hear(self, selector: selectors.BaseSelector, job: Job, rank: int, channel: Channel, deadline: float) -> None:
        try:
            message = channel.receive(deadline)
        except (Closed, TimeoutError):
            self._fail_start(selector, job, f"rank {rank} ended while starting{job.last_words()}")
            return
        if "share" in message:
            job.shared = message
            for other in job.channels.values():
                if other is not channel:
                    with contextlib.suppress(Closed):  # noticed when that rank is heard
                        other.send(message)
            if channel.has_message():
                self._hear(selector, job, rank, channel, deadline)
            return
        if "failed" in message:
            self._fail_start(selector, job, f"rank {rank}: {message['failed']}")
        else:
            selector.unregister(channel)
            job.ready[rank] = message["ready"]

    def _check_start(self, selector: selectors.BaseSelector, job: Job, timeout_s: float, late: bool) -> None:
        if job.name not in self.jobs or len(job.ready) == job.ranks:
            return
        ended = any(process.poll() is not None for process in job.processes)
        if late:
            missing = [str(rank) for rank in range(job.ranks) if rank not in job.ready]
            reason = f"hung: rank(s) {', '.join(missing)} not ready within {timeout_s:g} s{job.last_words()}"
            self._fail_start(selector, job, reason)
        elif ended and not job.channels:
            self._fail(job, f"ended before it connected{job.last_words()}")

    def _fail_start(self, selector: selectors.BaseSelector, job: Job, reason: str) -> None:
        """The selector forgets the job's channels before they are closed: another's may get their numbers."""
        for rank in set(job.channels) - set(job.ready):
            selector.unregister(job.channels[rank])
        self._fail(job, reason)

    def _fail(self, job: Job, reason: str) -> None:
        self.failures[job.name] = reason
        job.kill()
        self.jobs.pop(job.name, None)

    def ask(self, name: str, message: dict[str, Any], timeout_s: float) -> list[dict[str, Any]] | None:
        """The answers of a job's ranks; None when it fails, now or before, which ends it and is kept in `failures`."""
        job = self.jobs.get(name)
        if job is None:
            return None
        try:
            return job.ask(message, timeout_s)
        except JobFailed as error:
            self._fail(job, str(error))
            return None

    def stop(self) -> dict[str, list[dict[str, Any]]]:
        """Ask every job to end, and return what its ranks said last."""
        last = {}
        for name in list(self.jobs):
            answers = self.ask(name, {"do": "stop"}, STOP_S)
            if answers is not None:
                last[name] = answers
        for job in self.jobs.values():
            for process in job.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
        return last
