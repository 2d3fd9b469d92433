"""bench/peers.py: its arguments, its protocol, engines that fail in every way, and one whole small run."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import peers
from interleaved import engines, machine
from interleaved.coordinator import Coordinator, Launch
from interleaved.protocol import Channel, Closed, connect, rank_from_environment

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--engines", "dcoll,nccl"], ["nccl", "allowed are dcoll, mpi4py"]),
        (["--engines", ","], ["no name", "allowed are"]),
        (["-b", "1K", "-e", "64"], ["-b 1K is more than -e 64"]),
        (["-b", "0"], ["-b 0 is less than one float32", "at least 4"]),
        (["-b", "4", "-t", "double"], ["less than one float64", "at least 8"]),
        (["--ranks", "0"], ["'0' is not valid", "at least 1"]),
        (["--rounds", "x"], ["'x' is not valid"]),
        (["-t", "complex64"], ["'complex64' is not a data type"]),
    ],
)
def test_bad_arguments_say_what_is_allowed(argv, said, capsys):
    with pytest.raises(SystemExit):
        peers.parse(argv)
    message = capsys.readouterr().err
    assert [text for text in said if text not in message] == []


def test_arguments_have_the_conventions_of_all_reduce():
    args = peers.parse(["-b", "1K", "-e", "64K", "-f", "8", "--engines", "gloo,dcoll,gloo"])
    assert peers.message_sizes(args) == [1024, 8192, 65536]
    assert args.engines == ["gloo", "dcoll"]
    assert peers.message_sizes(peers.parse([]))[-1] == 64 << 20


def pair():
    one, other = socket.socketpair()
    return one, Channel(one), Channel(other)


def test_messages_arrive_whole_and_in_order():
    raw, here, there = pair()
    here.send({"a": 1})
    raw_message = json.dumps({"b": [1.5, None]}).encode()
    raw.sendall(raw_message[:4])
    assert there.receive() == {"a": 1}
    later = threading.Timer(0.05, lambda: raw.sendall(raw_message[4:] + b"\n"))
    later.start()
    assert there.receive(time.monotonic() + DEADLINE_S) == {"b": [1.5, None]}
    later.join()


def test_messages_that_came_together_are_told():
    raw, _, there = pair()
    raw.sendall(b'{"a": 1}\n{"b": 2}\n{"c')
    assert not there.has_message()
    assert there.receive() == {"a": 1}
    assert there.has_message()
    assert there.receive() == {"b": 2}
    assert not there.has_message()


def test_receive_has_a_deadline_and_notices_the_end():
    _, here, there = pair()
    with pytest.raises(TimeoutError):
        there.receive(time.monotonic() + 0.05)
    here.send({"still": "fine"})
    assert there.receive() == {"still": "fine"}
    here.close()
    with pytest.raises(Closed):
        there.receive()
    there.close()
    with pytest.raises(Closed):
        there.receive(time.monotonic() + DEADLINE_S)


@pytest.mark.parametrize("name", ["BENCH_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_rank_comes_from_any_launcher(name, monkeypatch):
    for other in ("BENCH_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
        monkeypatch.delenv(other, raising=False)
    with pytest.raises(RuntimeError, match="no rank"):
        rank_from_environment()
    monkeypatch.setenv(name, "3")
    assert rank_from_environment() == 3


def test_ranks_get_separate_cores_before_second_threads():
    siblings = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2,6"}
    assert machine.spread_over_cores([0, 1, 2, 4, 5], siblings.get) == [0, 1, 2, 4, 5]
    assert machine.spread_over_cores([0, 4, 5], siblings.get) == [0, 5, 4]
    allowed = os.sched_getaffinity(0)
    assert set(machine.cores_for(len(allowed))) == allowed
    assert machine.cores_for(len(allowed) + 1) == ()


def fake(adapter):
    """An engine whose adapter is in fake_engines.py; started without a launcher."""

    def launch(engine, setup):
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        return engines.by_itself(engines.worker(engine, setup, sys.executable), setup.ranks, PYTHONPATH=path)

    return engines.Engine(adapter, f"fake_engines.{adapter}", {adapter: "plain"}, "fake", ("float32",), launch)


def run_fakes(monkeypatch, tmp_path, names, *more):
    monkeypatch.setattr(peers, "ENGINES", {name: fake(name) for name in names})
    target = tmp_path / "out.json"
    argv = ["--engines", ",".join(names), "-b", "4", "-e", "64", "-f", "16", "--rounds", "2", "--turn-ms", "1"]
    status = peers.main([*argv, "--json", str(target), *more])
    return status, json.loads(target.read_text())


def test_engines_that_fail_are_reported_and_the_others_go_on(monkeypatch, tmp_path, capfd):
    names = ["Exact", "FailsAtStart", "DiesWhenCalled", "RaisesWhenCalled"]
    status, document = run_fakes(monkeypatch, tmp_path, names)
    assert status == 0
    left_out = document["left_out"]
    assert sorted(left_out) == sorted(names[1:])
    assert "no such fabric" in left_out["FailsAtStart"]
    assert "rank 0 ended during 'check' (variant=plain bytes=4) (status 7)" in left_out["DiesWhenCalled"]
    assert "something about a segment" in left_out["DiesWhenCalled"]
    assert "rank 1 in 'check' (variant=plain bytes=4): ValueError: unsupported today" in left_out["RaisesWhenCalled"]
    assert all(row["columns"]["Exact"]["rounds"] == 2 for row in document["rows"])
    report = capfd.readouterr().out
    assert [name for name in names[1:] if f"- {name}: left out: " not in report] == []


def test_wrong_results_are_counted_and_fail_the_run(monkeypatch, tmp_path, capfd):
    status, document = run_fakes(monkeypatch, tmp_path, ["Exact", "Wrong"])
    assert status == 1
    assert document["wrong"] == {"Wrong": {"4": 1, "64": 1}}
    assert "- Wrong: WRONG RESULTS: 1 elements at 4 bytes" in capfd.readouterr().out


def test_an_unsupported_type_is_a_reason(monkeypatch, tmp_path, capfd):
    with pytest.raises(SystemExit, match="no engine is left"):
        run_fakes(monkeypatch, tmp_path, ["Exact"], "-t", "float64", "-b", "8")
    assert "Exact: left out: no float64: it has float32" in capfd.readouterr().err


def test_a_missing_environment_is_a_reason(tmp_path):
    setup = engines.Setup(2, (), "float32", 64, 0, "unused", tmp_path, tmp_path)
    for name in ("mpich", "intelmpi", "deepspeed", "oneccl"):
        with pytest.raises(engines.Unavailable, match="make bench-peers"):
            engines.ENGINES[name].launch(engines.ENGINES[name], setup)


@pytest.mark.parametrize("name", ["intelmpi", "oneccl"])
def test_waiting_ranks_yield_where_there_are_more_than_cores(name, tmp_path, monkeypatch):
    python = tmp_path / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(engines, "compiled", lambda *_: "library.so")
    for cpus in ((0, 1), ()):
        setup = engines.Setup(2, cpus, "float32", 64, 0, "unused", tmp_path, tmp_path)
        (environment,) = engines.ENGINES[name].launch(engines.ENGINES[name], setup).environments
        assert environment.get("I_MPI_THREAD_YIELD") == (None if cpus else "2")
        if name == "oneccl":
            waiting = (environment["CCL_WORKER_OFFLOAD"], environment.get("CCL_YIELD"))
            assert waiting == (("0", None) if cpus else ("1", "sched_yield"))


def test_a_job_that_never_connects_is_reported():
    with Coordinator() as coordinator:
        says = [sys.executable, "-c", "import sys; print('cannot find the fabric'); sys.exit(3)"]
        coordinator.launch("ends", 1, Launch([says], [dict(os.environ)]))
        coordinator.launch("missing", 1, Launch([["/nonexistent/mpiexec"]], [dict(os.environ)]))
        coordinator.wait_ready(DEADLINE_S)
        assert coordinator.failures["ends"] == "ended before it connected (status 3): cannot find the fabric"
        assert "could not start" in coordinator.failures["missing"]
        assert coordinator.jobs == {}


def test_files_that_an_engine_leaves_are_removed(tmp_path):
    left, never_made = tmp_path / "segment_0", tmp_path / "segment_1"
    left.touch()
    with Coordinator() as coordinator:
        launch = Launch([[sys.executable, "-c", "pass"]], [dict(os.environ)], leaves=(left, never_made))
        coordinator.launch("leaves", 1, launch)
        assert left.exists()
    assert not left.exists()


def start_fake(coordinator, adapter, tmp_path):
    setup = engines.Setup(2, (), "float32", 64, 0, coordinator.socket_path, tmp_path, tmp_path)
    engine = fake(adapter)
    coordinator.launch(adapter, 2, engine.launch(engine, setup))


def test_an_engine_that_hangs_in_a_call_is_ended_and_reported(tmp_path):
    with Coordinator() as coordinator:
        start_fake(coordinator, "HangsWhenCalled", tmp_path)
        coordinator.wait_ready(3 * DEADLINE_S)
        job = coordinator.jobs["HangsWhenCalled"]
        request = {"do": "turn", "variant": "plain", "bytes": 64, "warm": 0, "calls": 1, "batch": 1}
        assert coordinator.ask(job.name, request, 2.0) is None
        said = coordinator.failures[job.name]
        assert said.startswith(
            "hung: no answer to 'turn' (variant=plain bytes=64 warm=0 calls=1 batch=1) from rank(s) 1 within 2 s"
        )
        assert all(process.poll() is not None for process in job.processes)
        assert coordinator.ask(job.name, request, 2.0) is None  # nobody is asked any more


def test_an_engine_that_hangs_at_the_start_is_ended_and_reported(tmp_path):
    with Coordinator() as coordinator:
        start_fake(coordinator, "HangsAtStart", tmp_path)
        job = coordinator.jobs["HangsAtStart"]
        coordinator.wait_ready(3.0)
        said = coordinator.failures["HangsAtStart"]
        assert said.startswith("hung: rank(s)")
        assert "1 not ready within 3 s" in said
        assert all(process.poll() is not None for process in job.processes)


def sleeping_job(coordinator, name):
    """A job of two ranks that this test speaks for."""
    coordinator.launch(name, 2, Launch([[sys.executable, "-c", "import time; time.sleep(60)"]], [dict(os.environ)]))


def say_hello(coordinator, job, rank):
    channel = connect(coordinator.socket_path)
    channel.send({"job": job, "rank": rank, "pid": coordinator.jobs[job].processes[0].pid})
    return channel


def test_ranks_that_fail_at_once_end_their_job_alone():
    class Both(Coordinator):
        """Of "fails" both ranks say so when both are known: the selector tells of them together."""

        def _greet(self, selector, deadline):
            super()._greet(selector, deadline)
            if len(self.jobs["fails"].channels) == 2:
                for channel in channels:
                    channel.send({"failed": "no such fabric"})

    with Both() as coordinator:
        sleeping_job(coordinator, "fails")
        channels = [say_hello(coordinator, "fails", rank) for rank in range(2)]
        coordinator.wait_ready(DEADLINE_S)
        assert coordinator.failures["fails"].endswith(": no such fabric")
        assert coordinator.jobs == {}


def test_a_job_may_get_the_files_of_one_that_failed():
    with Coordinator() as coordinator:
        sleeping_job(coordinator, "fails")
        sleeping_job(coordinator, "works")
        channels = [say_hello(coordinator, "fails", rank) for rank in (1, 0)]
        channels[1].send({"failed": "no such fabric"})
        for rank in range(2):
            channels.append(say_hello(coordinator, "works", rank))
            channels[-1].send({"ready": {}})
        coordinator.wait_ready(DEADLINE_S)
        assert coordinator.failures == {"fails": "rank 0: no such fabric"}
        assert sorted(coordinator.jobs["works"].ready) == [0, 1]


def test_leaving_the_coordinator_ends_the_processes(tmp_path):
    with Coordinator() as coordinator:
        start_fake(coordinator, "Exact", tmp_path)
        coordinator.wait_ready(3 * DEADLINE_S)
        assert coordinator.failures == {}
        job = coordinator.jobs["Exact"]
        assert all(process.poll() is None for process in job.processes)
    assert all(process.poll() is not None for process in job.processes)
    assert not Path(coordinator.socket_path).exists()


@pytest.mark.parametrize(("ranks", "dtype"), [(1, "float32"), (2, "int8"), (3, "float64"), (4, "int32")])
def test_the_bare_loop_sums_exactly(ranks, dtype, tmp_path, capfd):
    target = tmp_path / "bare.json"
    argv = ["--engines", "bare", "--ranks", str(ranks), "-t", dtype, "-b", "8", "-e", "40000", "-f", "70"]
    status = peers.main([*argv, "--rounds", "1", "--turn-ms", "1", "--rotate", "--json", str(target)])
    document = json.loads(target.read_text())
    if "compiler" in document["left_out"].get("bare", ""):
        pytest.skip(f"needs compiler: {document['left_out']['bare']}")
    assert (status, document["wrong"], document["left_out"]) == (0, {}, {})
    assert [row["size"] for row in document["rows"]] == [8, 560, 39200]


@pytest.mark.mpi
def test_a_whole_run_of_dcoll_mpi4py_and_gloo(tmp_path):
    files = {name: tmp_path / f"out.{name}" for name in ("json", "markdown", "plot")}
    files["plot"] = tmp_path / "out.png"
    command = [sys.executable, str(ROOT / "bench/peers.py"), "--engines", "dcoll,mpi4py,gloo", "-b", "4", "-e", "64K"]
    command += ["-f", "16384", "--rounds", "2", "--turn-ms", "5", "--deadline", "60"]
    command += [text for name, file in files.items() for text in (f"--{name}", str(file))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(files["json"].read_text())
    assert (document["left_out"], document["wrong"]) == ({}, {})
    assert [row["size"] for row in document["rows"]] == [4, 65536]
    for row in document["rows"]:
        assert all(row["columns"][name]["rounds"] == 2 for name in ("dcoll mapped", "dcoll plain", "mpi4py", "gloo"))
        assert row["fastest_peer"] in ("mpi4py", "gloo")
        assert set(row["peer_over"]["dcoll mapped"]) == {"mpi4py", "gloo"}
    assert document["environment"]["ranks"] == 2
    assert "Every engine ran, and every result was exact." in files["markdown"].read_text()
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
