"""A host that cannot be reached in the middle of an all-reduce: named by the others, or forgotten once it is back."""

import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import netlab
import pytest
from mpirun import HERE, Finished, launch

Hosts = Callable[[int], netlab.Lab]
pytestmark = pytest.mark.mpi

TIMEOUT_S = 5
"""DCOLL_TIMEOUT of the jobs."""
LIMIT_S = 40.0
"""How long a line of output may take, on a busy machine."""


class Job:
    """A job on the hosts of a lab, and its lines of output as they come."""

    def __init__(self, lab: netlab.Lab) -> None:
        self.lab = lab
        self.lines: queue.Queue[str] = queue.Queue()
        self.seen: list[str] = []
        command = [*lab.launcher("1"), sys.executable, str(Path(__file__).parent / "cut.py")]
        env = os.environ | {"DCOLL_TIMEOUT": str(TIMEOUT_S), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.rstrip())

    def expect(self, *parts: str) -> str:
        """The next line with all these parts."""
        end = time.monotonic() + LIMIT_S
        while True:
            try:
                line = self.lines.get(timeout=max(end - time.monotonic(), 0.01))
            except queue.Empty:
                pytest.fail(f"no line with {parts} came within {LIMIT_S} s; these did: {self.seen[-20:]}")
            self.seen.append(line)
            if all(part in line for part in parts):
                return line

    def skip_to_now(self) -> None:
        while not self.lines.empty():
            self.seen.append(self.lines.get())

    def link(self, what: str, host: str) -> None:
        assert netlab.main(["--lab", self.lab.name, what, host]) == 0


@contextmanager
def job(lab: netlab.Lab) -> Iterator[Job]:
    running = Job(lab)
    try:
        yield running
    finally:
        running.link("heal", "h2")
        running.process.terminate()  # mpirun ends its ranks, kill would leave them
        try:
            running.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            running.process.kill()


OWN_HOST = "of the 2 ranks of this node ranks 2, 3 have called dcoll.init(); ranks of other nodes have not, or"
RANK_1 = "rank 1 has not called dcoll.init(), or has ended or got stuck in it"


@pytest.mark.parametrize(
    ("kind", "ranks", "slots", "told"),
    [
        ("never", 3, "1", {0: RANK_1, 2: RANK_1}),
        # Of each host one rank asks the launcher.
        ("never", 4, "2", {0: RANK_1, 2: RANK_1, 3: OWN_HOST}),
        ("stops_in_it", 3, "1", {0: "ranks 1, 2 have not called dcoll.init(), or have ended or got stuck in it"}),
    ],
    ids=str,
)
def test_ranks_of_other_hosts_that_do_not_begin_are_named(
    hosts: Hosts, tmp_path: Path, kind: str, ranks: int, slots: str, told: dict[int, str]
) -> None:
    env = {"DCOLL_TIMEOUT": "5", "FAULT_FOLDER": str(tmp_path), "FAULT_SURVIVORS": str(len(told))}
    launcher = tuple(hosts(3 if slots == "1" else 2).launcher(slots))
    done = launch(ranks, str(HERE / "late.py"), kind, timeout=LIMIT_S, launcher=launcher, **env)
    assert done.returncode != 0, done.text
    for rank, text in told.items():
        pattern = rf"^\[{rank}\] TimeoutError after [0-9.]+ s: dcoll\.init\(\): {re.escape(text)}"
        assert re.search(pattern, done.stdout, re.MULTILINE), done.text


def killed(lab: netlab.Lab, ranks: int, slots: str, kind: str, folder: Path, **env: str) -> Finished:
    """Ends long before DCOLL_TIMEOUT, or the test fails."""
    settings = {"DCOLL_TIMEOUT": "300", "DCOLL_TRANSPORT": "mpi", "FAULT_FOLDER": str(folder)} | env
    launcher = (*lab.launcher(slots), "--continuous")
    return launch(ranks, str(HERE / "fault.py"), kind, timeout=LIMIT_S, launcher=launcher, **settings)


@pytest.mark.parametrize(("ranks", "slots"), [(3, "1"), (2, "1,1"), (3, "2,1")], ids=str)
@pytest.mark.parametrize("kind", ["killed", "killed_beside_its_child"])
def test_a_killed_rank_of_another_host_is_named_at_once(
    hosts: Hosts, tmp_path: Path, ranks: int, slots: str, kind: str
) -> None:
    """The only one of its host, or one of two. Open MPI lets the others live on where it is told to."""
    lab = hosts(3 if slots == "1" else 2)
    done = killed(lab, ranks, slots, kind, tmp_path, OMPI_MCA_mpi_ft_enable="1")
    for rank in range(ranks):
        if rank != 1:
            assert f"[{rank}] PeerError after" in done.stdout, done.text
    assert done.stdout.count("rank 1 died: its process ended without closing its communicator") >= ranks - 1, done.text


def test_a_killed_rank_of_another_host_ends_the_job_where_mpi_is_not_told_to_go_on(
    hosts: Hosts, tmp_path: Path
) -> None:
    killed(hosts(3), 3, "1", "killed", tmp_path)


def is_missed_at_once(
    kind: str, survivors: set[int], who: int, lab: netlab.Lab, slots: str, folder: Path, **env: str
) -> None:
    """All survivors name it, long before the deadline, or the test fails."""
    ranks = 4 if slots == "2" else 3
    env |= {"DCOLL_TIMEOUT": "300", "FAULT_FOLDER": str(folder), "FAULT_SURVIVORS": str(len(survivors))}
    env |= {"WHO": str(who)}
    launcher = (*lab.launcher(slots), "--continuous")
    done = launch(ranks, str(HERE / "late.py"), kind, timeout=LIMIT_S, launcher=launcher, **env)
    text = rf"dcoll\.init\(\): rank {who} died: its process has ended"
    for rank in survivors:
        assert re.search(rf"^\[{rank}\] PeerError after [0-9.]+ s: {text}", done.stdout, re.MULTILINE), done.text


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("how", [{"STATUS": "0"}, {}], ids=["ends", "killed"])
def test_a_rank_that_ended_before_init_is_named_by_all_hosts(
    hosts: Hosts, tmp_path: Path, who: int, how: dict[str, str]
) -> None:
    """Of the host where mpirun is, which hears of those that were killed, or of another one."""
    is_missed_at_once("ends_before", set(range(4)) - {who}, who, hosts(2), "2", tmp_path, **how)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_of_another_host_that_died_is_named_by_those_who_begin_again(
    hosts: Hosts, tmp_path: Path, who: int
) -> None:
    """The one that leads the start-up, or another one. MPI ends the job unless it is told to go on."""
    survivors = set(range(3)) - {who}
    is_missed_at_once("again_dead", survivors, who, hosts(3), "1", tmp_path, OMPI_MCA_mpi_ft_enable="1")


def test_a_rank_of_another_host_that_dies_in_init_is_named(hosts: Hosts, tmp_path: Path) -> None:
    """Where a third one never comes."""
    is_missed_at_once("dies_in_it", {0}, 1, hosts(3), "1", tmp_path)


def test_a_cut_in_the_middle(hosts: Hosts) -> None:
    with job(hosts(3)) as running:
        running.expect("right")
        # Healed in time: the all-reduces under way are completed, and right.
        running.link("cut", "h2")
        time.sleep(1)
        running.link("heal", "h2")
        running.skip_to_now()
        for _ in range(4):
            running.expect("right")
        # Not healed: who can still speak names the rank that cannot be reached.
        running.link("cut", "h2")
        for _ in range(2):
            line = running.expect("failed after")
            assert line.startswith(("[0]", "[1]")), line
            assert "TimeoutError" in line, line
            assert "waiting for rank 2 of 3" in line, line
        running.link("heal", "h2")
        running.expect("[2] failed after")
        assert not [line for line in running.seen if "wrong" in line]
