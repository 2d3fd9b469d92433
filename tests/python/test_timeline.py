"""The timeline: a Chrome trace of what the operations spent their time on. Ranks are threads."""

import json
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import local_ranks
import numpy as np
import pytest

import dcoll
from dcoll import _C
from dcoll.collectives import on_communicator
from dcoll.job import timeline_merge

Event = dict[str, Any]


def read(path: Path) -> list[Event]:
    events: list[Event] = json.loads(path.read_text())
    check_spans(events)
    return events


def check_spans(events: list[Event]) -> None:
    """Every span lies inside the one around it on its track or beside it, and no track lacks a name."""
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append(event)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert tracks.keys() <= named
    for spans in tracks.values():
        spans.sort(key=lambda span: (span["ts"], -span["dur"]))
        open_until: list[float] = []
        for span in spans:
            while open_until and open_until[-1] <= span["ts"] + 1e-3:
                open_until.pop()
            end = span["ts"] + span["dur"]
            assert not open_until or end <= open_until[-1] + 1e-3, span
            open_until.append(end)


def operations(events: list[Event]) -> list[Event]:
    return [event for event in events if event.get("cat") == "operation"]


def phases(events: list[Event], name: str) -> list[str]:
    """What is inside the first operation of that name, in order."""
    whole = next(event for event in operations(events) if event["args"]["name"] == name)
    inside = [
        event
        for event in events
        if event["ph"] == "X"
        and event["tid"] == whole["tid"]
        and event is not whole
        and whole["ts"] <= event["ts"]
        and event["ts"] + event["dur"] <= whole["ts"] + whole["dur"] + 1e-3
    ]
    return [event["name"] for event in sorted(inside, key=lambda event: (event["ts"], event["dur"]))]


def test_every_operation_is_there_with_its_phases(tmp_path: Path) -> None:
    def body(comm: _C.Communicator) -> None:
        _C.start_timeline(comm, str(tmp_path / "{rank}.json"))
        small, large = np.ones(4, np.float32), np.ones(100_000, np.float32)
        for i in range(5):
            on_communicator.allreduce_sync(comm, small, dcoll.Sum, f"small {i % 2}", 1.0, 1.0)
        on_communicator.allreduce_sync(comm, large, dcoll.Average, "large", 1.0, 1.0)
        handles = [on_communicator.allreduce(comm, large, dcoll.Sum, f"async {i}", 1.0, 1.0) for i in range(3)]
        for handle in handles:
            handle.wait()
        on_communicator.broadcast_sync(comm, small, 0, "b")
        on_communicator.allgather_sync(comm, small, "g")
        on_communicator.alltoall_sync(comm, small, None, "")
        comm.barrier_sync("")
        _C.stop_timeline(comm)
        on_communicator.allreduce_sync(comm, small, dcoll.Sum, "after the end", 1.0, 1.0)

    local_ranks.run_ranks(2, body)
    for rank in range(2):
        events = read(tmp_path / f"{rank}.json")
        assert {event["pid"] for event in events} == {rank}
        found = operations(events)
        assert Counter(event["name"] for event in found) == {
            "allreduce": 9, "broadcast": 1, "allgather": 1, "alltoall": 1, "barrier": 1,
        }  # fmt: skip
        assert Counter(event["args"]["name"] for event in found)["small 0"] == 3
        assert sum(event["args"]["bytes"] for event in found) == 5 * 16 + 4 * 400_000 + 3 * 16
        numbers = [event["args"]["number"] for event in found]
        assert sorted(numbers) == list(range(numbers[0], numbers[0] + 13))
        assert phases(events, "small 0")[-2:] == ["negotiation", "inline"]
        assert phases(events, "large")[-2:] == ["negotiation", "staged"]
        assert phases(events, "async 2") == ["queue", "pack", "negotiation", "staged"]
        assert phases(events, "g")[-1] == "pull"
        moved = next(event for event in events if event["name"] == "staged")
        assert moved["args"] == {"bytes": 400_000, "dtype": "float32", "op": moved["args"]["op"]}
        tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert {"small 0", "large", "async 1", "alltoall", "barrier"} <= tracks
        end = next(event for event in events if event["name"] == "timeline ends")
        assert end["args"] == {"dropped": 0}


def test_schedules_show_their_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCOLL_TRANSPORT", "mpi")
    monkeypatch.setenv("DCOLL_ALGO", "ring")

    def body(comm: _C.Communicator) -> None:
        _C.start_timeline(comm, str(tmp_path / "{rank}.json"))
        on_communicator.allreduce_sync(comm, np.ones(1000, np.float32), dcoll.Sum, "grad", 1.0, 1.0)
        _C.stop_timeline(comm)

    local_ranks.run_ranks(3, body)
    assert phases(read(tmp_path / "2.json"), "grad") == ["queue", "negotiation", "pack", "ring"]


def test_it_can_be_started_again_and_elsewhere(tmp_path: Path) -> None:
    (comm,) = _C.connect_local(1)

    def reduce(name: str) -> None:
        on_communicator.allreduce_sync(comm, np.ones(4, np.float32), dcoll.Sum, name, 1.0, 1.0)

    def names(file: str) -> list[str]:
        return [event["args"]["name"] for event in operations(read(tmp_path / file))]

    for file in ("first.json", "second.json", "first.json"):
        _C.start_timeline(comm, str(tmp_path / file))
        reduce(file)
        _C.stop_timeline(comm)
        _C.stop_timeline(comm)
        reduce("between")
        assert names(file) == [file]
    _C.start_timeline(comm, str(tmp_path / "a.json"))
    _C.start_timeline(comm, str(tmp_path / "a.json"))  # goes on
    reduce("a")
    _C.start_timeline(comm, str(tmp_path / "b.json"))
    reduce("b")
    comm.close()
    _C.stop_timeline(comm)
    assert names("a.json") == ["a"]
    assert names("b.json") == ["b"]


def test_the_file_is_whole_while_it_is_written(tmp_path: Path) -> None:
    (comm,) = _C.connect_local(1)
    path = tmp_path / "t.json"
    _C.start_timeline(comm, str(path))
    name = 'quote " back \\ tab \t ü'
    on_communicator.allreduce_sync(comm, np.ones(1, np.int32), dcoll.Max, name, 1.0, 1.0)
    on_communicator.allreduce_sync(comm, np.ones(1, np.int32), dcoll.Max, "é" * 60, 1.0, 1.0)
    waited = threading.Event()
    for _ in range(500):
        if path.stat().st_size and len(operations(read(path))) == 2:
            break
        waited.wait(0.02)
    first, second = (event["args"]["name"] for event in operations(read(path)))
    assert first == name
    assert second == "é" * 47 + "?"
    assert not [event for event in read(path) if event["name"] == "timeline ends"]
    comm.close()
    _C.stop_timeline(comm)
    assert read(path)[-1]["name"] == "timeline ends"


def test_only_rank_0_writes_one_file(tmp_path: Path) -> None:
    def body(comm: _C.Communicator) -> None:
        _C.start_timeline(comm, str(tmp_path / "t.json"))
        comm.barrier_sync("meet")
        _C.stop_timeline(comm)

    local_ranks.run_ranks(3, body)
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    assert [event["pid"] for event in operations(read(tmp_path / "t.json"))] == [0]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (comm,) = _C.connect_local(1)
    with pytest.raises(dcoll.ArgumentError, match="cannot be written: No such file"):
        _C.start_timeline(comm, str(tmp_path / "missing" / "t.json"))
    with pytest.raises(dcoll.ArgumentError, match="cannot be written: No such file"):  # it is not taken to be on
        _C.start_timeline(comm, str(tmp_path / "missing" / "t.json"))
    comm.close()


def test_a_disk_that_is_full_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    (comm,) = _C.connect_local(1)
    _C.start_timeline(comm, "/dev/full")
    for _ in range(3):
        on_communicator.allreduce_sync(comm, np.ones(4, np.float32), dcoll.Sum, "", 1.0, 1.0)
        time.sleep(0.05)  # longer than the writer's pause
    _C.stop_timeline(comm)
    comm.close()
    said = capfd.readouterr().err
    assert said.count("'/dev/full' cannot be written any further (No space left on device)") == 1, said


def test_timeline_and_log_tell_which_copy_a_block_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DCOLL_LOG_LEVEL", "info")

    def body(comm: _C.Communicator) -> None:
        _C.start_timeline(comm, str(tmp_path / "t.json"))
        on_communicator.allgather_sync(comm, np.ones(2, np.float32), "inline")
        on_communicator.allgather_sync(comm, np.ones(300, np.float32), "slots")
        on_communicator.allgather_sync(comm, np.ones(300_007, np.float32), "kernel")
        _C.stop_timeline(comm)

    local_ranks.run_ranks(2, body)
    events = read(tmp_path / "t.json")
    assert phases(events, "inline")[-1] == "pull"
    assert phases(events, "slots")[-1] == "pull (slots)"
    said = capfd.readouterr().err
    if phases(events, "kernel")[-1] == "pull (slots)":
        assert said.count("read through slots, in two copies: the kernel does not let every rank") == 2, said
        pytest.skip("needs ptrace: the kernel lets nobody read a process here")
    assert phases(events, "kernel")[-1] == "pull (kernel)"
    assert said.count("read by the kernel (process_vm_readv), in one copy") == 2, said  # ranks


def test_before_init_there_is_no_timeline() -> None:
    for call in (lambda: dcoll.start_timeline("t.json"), dcoll.stop_timeline):
        with pytest.raises(ValueError, match="has not been initialized"):
            call()


def test_buckets_show_gradients_and_steps(tmp_path: Path) -> None:
    def body(comm: _C.Communicator) -> None:
        grads = [np.full(300, comm.rank, np.float32) for _ in range(4)]
        reducer = _C.Reducer(comm, [300] * 4, [_C.FLOAT32] * 4, [f"p{i}" for i in range(4)], _C.SUM, 2048, 2048)
        _C.start_timeline(comm, str(tmp_path / "{rank}.json"), True)
        for _ in range(3):
            for i in reversed(range(4)):
                reducer.mark_ready(i, grads[i].ctypes.data)
            reducer.finish()
        _C.stop_timeline(comm)

    local_ranks.run_ranks(2, body)
    events = read(tmp_path / "1.json")
    names = Counter(event["name"] for event in events)
    assert [names[f"pack p{i}"] for i in range(4)] == [3] * 4
    assert [names[f"backward {i}"] for i in (1, 2, 3)] == [1, 1, 1]
    assert names["wait"] == 3
    assert names["allreduce"] >= 6
    bucket = next(event["tid"] for event in events if event["name"] == "thread_name" and "bucket 0" in str(event))
    assert {event["name"] for event in events if event["ph"] == "X" and event["tid"] == bucket} >= {
        "pack p3", "allreduce", "queue", "negotiation", "two-shot",
    }  # fmt: skip


def test_a_failed_operation_says_so(tmp_path: Path) -> None:
    def body(comm: _C.Communicator) -> None:
        _C.start_timeline(comm, str(tmp_path / "{rank}.json"))
        with pytest.raises(dcoll.MismatchError):
            comm.barrier_sync(f"rank {comm.rank}")
        _C.stop_timeline(comm)

    local_ranks.run_ranks(2, body)
    (barrier,) = operations(read(tmp_path / "0.json"))
    assert barrier["args"]["failed"]


def node_file(path: Path, node: int, skew: float, entered: list[float], agreed: list[float]) -> None:
    def event(**fields: Any) -> Event:
        return {"ph": "X", "pid": node, "tid": 1} | fields

    events = [event(ph="i", name="timeline begins", ts=skew, args={"node": node})]
    for number, (begin, end) in enumerate(zip(entered, agreed, strict=True)):
        args = {"communicator": 0, "number": number, "name": "x"}
        events.append(event(cat="operation", name="allreduce", ts=begin + skew, dur=end - begin, args=args))
        events.append(event(cat="negotiation", name="negotiation", ts=begin + skew, dur=end - begin))
    path.write_text(json.dumps(events))


def test_merging_brings_the_clocks_of_nodes_together(tmp_path: Path) -> None:
    files = [tmp_path / "0.json", tmp_path / "1.json"]
    node_file(files[0], 0, 0.0, [100.0, 220.0], [111.0, 231.0])
    node_file(files[1], 1, 5000.0, [110.0, 200.0], [111.0, 230.0])
    merged = timeline_merge.merge(files)
    begins = [event["ts"] for event in merged if event.get("cat") == "operation" and event["pid"] == 1]
    assert begins == pytest.approx([110.0, 200.0], abs=10.1)
    out = tmp_path / "all.json"
    timeline_merge.write(out, files)
    assert len(json.loads(out.read_text())) == 10
    # Clocks that may be right are left alone.
    node_file(files[1], 1, 0.5, [110.0, 200.0], [111.0, 230.0])
    assert next(event["ts"] for event in timeline_merge.merge(files) if event["pid"] == 1) == 0.5
    with pytest.raises(SystemExit, match="cannot be read"):
        timeline_merge.merge([tmp_path / "missing.json"])
