"""Processes that a rank starts: forked ones, on one node and between nodes, where its sockets are theirs too; and
spawned ones, which run its script again.
"""

from pathlib import Path

import checks_fork
import pytest
from mpirun import TORCHRUN, expect, launch, names_of_checks, run_checks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("check", names_of_checks(checks_fork))
@pytest.mark.parametrize(("n", "nodes"), [(2, ""), (3, "0,1,1")], ids=str)
def test_forked_processes(n: int, nodes: str, check: str) -> None:
    expect(run_checks("checks_fork", n, (("DCOLL_NODES", nodes),)), check)


SPAWNS = """
import multiprocessing
import numpy
import dcoll as hvd
hvd.init()

def work():
    pass

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        worker = multiprocessing.get_context(method).Process(target=work)
        worker.start()
        worker.join(30)
        assert worker.exitcode == 1
        assert hvd.allreduce(numpy.ones(3), op=hvd.Sum).tolist() == [2.0] * 3
    hvd.shutdown()
    hvd.init()
    print("went on")
"""


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["mpirun", "torchrun"])
def test_a_spawned_worker_does_not_take_the_place_of_its_rank(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """A script that calls init() above `if __name__ == "__main__":`."""
    script = tmp_path / "script.py"
    script.write_text(SPAWNS)
    done = launch(2, str(script), launcher=launcher)
    assert done.returncode == 0, done.text
    assert done.stdout.count("went on") == 2, done.text
    assert done.stderr.count("init() was called in a process that multiprocessing started from one of the") == 4
