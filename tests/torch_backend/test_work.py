"""A Work of tensors on a GPU that several threads wait for, each with a stream of its own; without a GPU."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

import dcoll.torch.work as works


class Core:
    """What the core gives for a collective that is done."""

    def wait(self, timeout: float, spins: bool) -> None: ...

    def released(self) -> bool:
        return True


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> Any:
        self.log.append(f"{self.name} records")
        return SimpleNamespace(of=self.name, device="cuda:1")

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits for {event.of}")


def started(on_cuda: bool, log: list[str]) -> works.Started:
    tensor: Any = SimpleNamespace(is_cuda=on_cuda, device="cuda:1")
    core: Any = Core()
    return works.Started(core, (None, [tensor]), lambda _: log.append("copies"))


def test_other_streams_wait_for_what_the_first_has_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    current = [Stream("first", log)]

    def current_stream(device: str) -> Stream:
        assert device == "cuda:1"
        return current[0]

    monkeypatch.setattr(works.torch.cuda, "current_stream", current_stream)
    handle = started(True, log)
    handle.wait()
    assert log == ["copies", "first records", "first waits for first"]
    current[0] = Stream("second", log)
    handle.wait()
    assert log[3:] == ["second waits for first"]


def test_tensors_of_the_cpu_need_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(works.torch.cuda, "current_stream", None)
    log: list[str] = []
    started(False, log).wait()
    assert log == ["copies"]
    assert works.devices_of([]) == []


class Unfinished:
    """A collective that is done once it was waited for."""

    def __init__(self) -> None:
        self.done = False

    def wait(self, timeout: float | None = None, spins: bool = True) -> None:
        self.done = True

    def poll(self) -> bool:
        return self.done


def test_several_operations_have_one_limit() -> None:
    given: list[float] = []

    def wait(timeout: float | None) -> None:
        given.append(-1.0 if timeout is None else timeout)
        time.sleep(0.02)

    operations = works.Handles([SimpleNamespace(wait=wait)] * 3)
    operations.wait(0.05)
    assert all(0 <= limit <= 0.05 - 0.02 * before for before, limit in enumerate(given))
    operations.wait()
    assert given[3:] == [-1.0] * 3


def test_the_first_error_of_several_operations_is_raised_once_all_have_ended() -> None:
    class Fails(Unfinished):
        def wait(self, timeout: float | None = None, spins: bool = True) -> None:
            super().wait()
            raise ValueError("the first")

    last = Unfinished()
    operations = works.Handles([Fails(), Fails(), last])
    with pytest.raises(ValueError, match="the first"):
        operations.wait()
    assert last.done


def test_threads_that_ask_at_once_get_one_future(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(works, "COMPLETIONS", works.Completions())

    class Late(Unfinished):
        def poll(self) -> bool:
            time.sleep(0.1)
            return super().poll()

    handle: Any = Late()
    work = works.Work(handle, [])
    futures: list[Any] = []
    threads = [threading.Thread(target=lambda: futures.append(work.get_future())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert futures[0] is futures[1]
    assert futures[0].wait() == []


def test_where_there_is_no_thread_a_future_is_refused_and_the_next_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(works, "COMPLETIONS", works.Completions())
    refused: list[str] = []
    start = threading.Thread.start

    def start_later(thread: threading.Thread) -> None:
        if not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    handle: Any = Unfinished()
    work = works.Work(handle, [])
    with pytest.raises(RuntimeError, match="new thread"):
        work.get_future()
    assert refused == ["dcoll futures"]
    assert work.get_future().wait() == []
