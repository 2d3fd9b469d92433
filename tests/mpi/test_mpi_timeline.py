"""Timelines of real jobs, Horovod's variables in them, and dcoll.run()."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from mpirun import find_mpirun, launch

import dcoll
from dcoll.job import timeline_merge

pytestmark = pytest.mark.mpi

SCRIPT = """
import os, signal, sys, torch
import dcoll as hvd
hvd.init()
model = torch.nn.Linear(64, 8)
sgd = torch.optim.SGD(model.parameters(), 0.1)
optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
for step in range(4):
    if step == 1:
        hvd.start_timeline(sys.argv[1], mark_cycles=True)
    if step == 3:
        hvd.stop_timeline()
    optimizer.zero_grad()
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
hvd.start_timeline(sys.argv[2])
hvd.allreduce(torch.ones(3), name="last")
hvd.shutdown()
"""


def operations(path: Path) -> Counter[str]:
    events = json.loads(path.read_text())
    return Counter(event["args"]["name"] for event in events if event.get("cat") == "operation")


def buckets(path: Path) -> int:
    return sum(count for name, count in operations(path).items() if name.startswith("bucket 0 of optimizer 0: "))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_job_writes_timelines(tmp_path: Path, n: int) -> None:
    done = launch(
        n, "-c", SCRIPT, str(tmp_path / "steps.{rank}.json"), str(tmp_path / "end.json"),
        HOROVOD_TIMELINE=str(tmp_path / "init.json"), HOROVOD_CYCLE_TIME="5", DCOLL_TIMOUT="3",
        preloaded=True,
    )  # fmt: skip
    assert done.returncode == 0, done.text
    assert done.stderr.count("Horovod's variables: read: HOROVOD_TIMELINE as DCOLL_TIMELINE=") == 1
    assert done.stderr.count("no setting of dcoll: DCOLL_TIMOUT (did you mean DCOLL_TIMEOUT?)") == 1
    files = [tmp_path / f"steps.{rank}.json" for rank in range(n)]
    for rank, file in enumerate(files):
        events = json.loads(file.read_text())
        assert buckets(file) == 2
        names = Counter(event["name"] for event in events)
        assert names["pack weight"] == names["pack bias"] == names["wait"] == 2
        assert [name for name in names if name.startswith("backward")] == ["backward 2", "backward 3"]
        assert {event["pid"] for event in events} == {rank}
    assert buckets(tmp_path / "init.json") == 1
    assert operations(tmp_path / "end.json") == {"last": 1}
    merged = timeline_merge.merge(files)
    assert {event["pid"] for event in merged} == set(range(n))
    # No rank knows that all have entered before the last one has; ranks of a machine share a clock.
    agreed = [timeline_merge.agreements(json.loads(file.read_text())) for file in files]
    for key in agreed[0]:
        spans = [one[key] for one in agreed]
        assert max(entered for entered, _ in spans) <= min(knew for _, knew in spans), (key, spans)
    assert all(one.keys() == agreed[0].keys() for one in agreed)


def test_a_killed_job_leaves_a_timeline_that_can_be_read(tmp_path: Path) -> None:
    code = (
        "import dcoll as hvd, numpy as np, os, time\nhvd.init()\n"
        "hvd.allreduce(np.ones(3), name='before')\n"
        "path = os.environ['DCOLL_TIMELINE']\n"
        "while hvd.rank() == 0 and 'before' not in open(path).read(): time.sleep(0.01)\n"
        "hvd.barrier()\nos.kill(os.getpid(), 9)\n"
    )
    launch(2, "-c", code, preloaded=True, DCOLL_TIMELINE=str(tmp_path / "t.json"))
    assert operations(tmp_path / "t.json")["before"] == 1


RUN = """
import sys
import dcoll

def work(base, step=1):
    import dcoll as hvd, numpy as np
    hvd.init()
    if step < 0 and hvd.rank() == 1:
        raise KeyError("no such thing")
    return hvd.rank(), float(hvd.allreduce(np.ones(2) * (base + step * hvd.rank()), op=hvd.Sum)[0])

if __name__ == "__main__":
    assert dcoll.run(work, (3,), {"step": 2}, num_proc=2) == [(0, 8.0), (1, 8.0)]
    assert not dcoll.is_initialized()
    try:
        dcoll.run(work, (3, -1), np=2)
    except dcoll.DcollError as error:
        print("got", error)
"""


def test_run_returns_results_and_names_the_rank_that_failed(tmp_path: Path) -> None:
    find_mpirun()
    script = tmp_path / "script.py"
    script.write_text(RUN)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "got run(): rank 1: KeyError: 'no such thing' (its output has the traceback)" in done.stdout


RUN_SPAWNED = """
import multiprocessing, sys
import dcoll

def work(base):
    import dcoll as hvd
    hvd.init()
    return base + hvd.rank()

def child(results):
    results.put(dcoll.run(work, (3,), np=2))

if __name__ == "__main__":
    spawning = multiprocessing.get_context("spawn")
    results = spawning.SimpleQueue()
    process = spawning.Process(target=child, args=(results,))
    process.start()
    process.join()
    print(*([] if results.empty() else results.get()))
"""


def test_run_in_a_process_that_was_spawned(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    find_mpirun()
    script = tmp_path / "script.py"
    script.write_text(RUN_SPAWNED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "3 4\n", done.stderr


def test_run_leaves_standard_input_to_the_program_and_needs_no_short_tmpdir(tmp_path: Path) -> None:
    find_mpirun()
    (folder := tmp_path / ("long" * 25)).mkdir()
    done = subprocess.run(
        [sys.executable, "-c", "import dcoll; print(dcoll.run(max, (3, 4), np=2), input())"],
        env=os.environ | {"TMPDIR": str(folder)},
        input="the program's\n", capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "[4, 4] the program's\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_num_proc": 2}, "leave min_num_proc out"),
        ({"host_discovery_script": "x"}, "leave host_discovery_script out"),
        ({"use_gloo": True}, "starts ranks with MPI's mpirun"),
        ({"num_proc": 0}, "at least 1 rank"),
        ({"hosts": "a:1", "hostfile": "b"}, "pass one of them"),
        ({"hosts": "a:", "num_proc": 1}, "write host:slots"),
    ],
)
def test_run_refuses_what_makes_no_sense(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(dcoll.ArgumentError, match=message):
        dcoll.run(print, **arguments)  # type: ignore[arg-type]


BY_NAME = """
import torch, dcoll as hvd
hvd.init()
x = torch.ones(300_000)
assert hvd.synchronize(hvd.allreduce_async_(x, name="by name", op=hvd.Sum)).eq(hvd.size()).all()
hvd.shutdown()
"""


def test_operations_by_name_go_on_two_levels(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    done = launch(4, "-c", BY_NAME, preloaded=True, DCOLL_TIMELINE=str(path), DCOLL_NODES="0,0,1,1")
    assert done.returncode == 0, done.text
    events = json.loads(path.read_text())
    assert [event["name"] for event in events if event.get("cat") == "algorithm"] == ["hierarchical"]
