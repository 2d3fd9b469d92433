"""What a collective returns: torch's Work, and its Future."""

import atexit
import bisect
import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dcoll.collectives.handle import Handle, Handles

_SLICE_S, _SHORT_SLICE_S = 0.05, 0.002
_LONG_CALLBACK_S = 0.05
"""So long a callback may keep other futures waiting: it may be one of them that it waits for."""
_NUMBERS = itertools.count()


class Started(Handle):
    """A handle that several threads may wait for: the program and the one that completes futures.

    The current stream of each waits for the core, and for what `finish` has copied on that of the first.
    """

    __slots__ = ("_copied", "_in_inference")

    def __init__(self, core: Any, memory: tuple[Any, Sequence[torch.Tensor]], finish: Any) -> None:
        """memory: what the core reads and writes, and the tensors that belong to it."""
        super().__init__(core, memory, finish, None)
        self._copied: Any = None
        self._in_inference = finish is not None and torch.is_inference_mode_enabled()

    def wait(self, timeout: float | None = None, spins: bool = True) -> Any:
        self._core.wait(-1.0 if timeout is None else max(0.0, timeout), spins)
        if self._finish is not None:
            with _FINISHING:
                if self._finish is not None:
                    # The mode is the thread's, and another one may be the first that waits.
                    with torch.inference_mode() if self._in_inference else contextlib.nullcontext():
                        self._finish(self._core)
                    self._copied = _copied(self._memory[1])
                    self._finish = None
        if self._copied is not None:
            torch.cuda.current_stream(self._copied.device).wait_event(self._copied)
        self._waited = True
        self._memory = None
        return self._result

    @property
    def source(self) -> int:
        """Of a message: the rank that sent it."""
        return self._core.source


_FINISHING = threading.Lock()


def devices_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The GPUs that they are on."""
    return list(dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda))


def _copied(tensors: Sequence[torch.Tensor]) -> Any:
    """What other streams wait for before they read what the current one has just copied to the tensors; None: of the
    CPU."""
    devices = devices_of(tensors)
    return torch.cuda.current_stream(devices[0]).record_event() if devices else None


class Work(dist.Work):
    """A collective under way."""

    def __init__(self, handle: Any, tensors: Sequence[torch.Tensor], order: object = None) -> None:
        """handle: of one (Started) or of several (Handles).

        order: those that have the same one end in the order in which they were started; None: nothing is known.
        """
        super().__init__()
        self._handle: Any = handle
        self._tensors = tensors
        self._limit_s: float | None = None  # of a wait() that is not told how long it may take
        self._order = order
        self.number = next(_NUMBERS)
        self._future: Any = None
        self._begun: Any = None
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._error is not None:
            raise self._error
        try:
            self._handle.wait(self._limit_s if not timeout else timeout.total_seconds())
        except Exception as error:
            if self._handle.poll():
                self._error = error
            raise
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return bool(self._handle.poll())

    def is_success(self) -> bool:
        return self.exception() is None

    def exception(self) -> Exception | None:
        """What it failed with; None while it is under way and when it went well."""
        if self._error is None and self._handle.poll():
            try:
                self._handle.wait()
            except Exception as error:
                self._error = error
        return self._error

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return list(self._tensors)

    def source_rank(self) -> int:
        return int(self._handle.source)

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future that is done when this is, with the list of the tensors."""
        with COMPLETIONS.lock:  # for whichever of several threads asks first
            if self._future is None:
                # The outcome is that of a callback: C++, as in DDP, does not see what Future.set_exception() was given.
                self._begun = torch.futures.Future(devices=devices_of(self._tensors))
                future = self._begun.then(self._outcome)
                if self._handle.poll():
                    self._complete()
                else:
                    COMPLETIONS.add(self)
                self._future = future
            return self._future

    def _outcome(self, _: Any) -> list[torch.Tensor]:
        error = self.exception()
        if error is not None:
            raise error
        return list(self._tensors)

    def _complete(self) -> None:
        begun, self._begun = self._begun, None
        begun.set_result(None)


class Done(Work):
    """What ended before it was returned."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(Handles(()), tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


DONE = Done()
"""Of calls with async_op=False, whose Work nobody sees."""


class Completions:
    """One thread that completes futures, in the order in which their operations were started. It sleeps in the core,
    without the interpreter's lock.

    Mostly it shares its core with the thread that computes, so it neither spins nor comes back sooner than it must.

    A callback may wait for another future. So when it asks for one, a new thread takes over, and the callback's ends
    with it; likewise when it takes long, and others are pending.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._pending: list[Work] = []
        self._thread: threading.Thread | None = None
        self._stops = False
        self._in_callback_since: float | None = None
        self._watch_again = threading.Condition(self.lock)
        self._watcher: threading.Thread | None = None
        self._watches = False

    def add(self, work: Work) -> None:
        """Raises what the system says when it gives no thread: then nothing is added, and the next call tries again."""
        with self._changed:
            if self._thread is None:
                self._take_over()
                atexit.register(self._stop)
            elif self._thread is threading.current_thread():
                self._take_over()
            bisect.insort(self._pending, work, key=lambda work: work.number)
            self._changed.notify()
            if len(self._pending) > 1:
                self._watch_over()

    def _take_over(self) -> None:
        # It looks at self._thread only when it has the lock, which its starter holds.
        thread = threading.Thread(target=self._run, name="dcoll futures", daemon=True)
        thread.start()
        self._in_callback_since = None
        self._thread = thread

    def _watch_over(self) -> None:
        if self._watcher is None:
            watcher = threading.Thread(target=self._watch, name="dcoll callbacks", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread to be had: only long callbacks hold others up
                watcher.start()
                self._watcher, self._watches = watcher, True
        elif not self._watches:
            self._watches = True
            self._watch_again.notify()

    def _watch(self) -> None:
        with self._watch_again:
            while not self._stops:
                self._watches = bool(self._pending)
                self._watch_again.wait(_LONG_CALLBACK_S if self._watches else None)
                since = self._in_callback_since
                if since is not None and self._pending and time.monotonic() - since > _LONG_CALLBACK_S:
                    with contextlib.suppress(RuntimeError):  # no thread to be had: later
                        self._take_over()

    def _run(self) -> None:
        mine = threading.current_thread()
        while True:
            with self._changed:
                while not self._pending and not self._stops and self._thread is mine:
                    self._changed.wait()
                if self._stops or self._thread is not mine:
                    return
            self._complete_some(mine)  # whose variables end with it: nothing keeps the last one's tensors

    def _complete_some(self, mine: threading.Thread) -> None:
        with self._changed:
            works = list(self._pending)
        # The oldest is mostly the first that ends. Were it the only one looked at, then a future of another group would
        # wait for this one's other ranks, which may themselves wait for what its callback does.
        order = works[0]._order
        alone = len(works) == 1 or (order is not None and all(work._order is order for work in works))
        with contextlib.suppress(Exception):  # it has not ended, or _complete() says how
            works[0]._handle.wait(_SLICE_S if alone else _SHORT_SLICE_S, spins=False)
        # Looked at from the last to the first: if it has ended, so have those before it in its order.
        for work in [work for work in reversed(works) if work._handle.poll()][::-1]:
            with self._changed:
                if self._thread is not mine:
                    return
                self._pending.remove(work)
                self._in_callback_since = time.monotonic()
            work._complete()
            with self._changed:
                if self._thread is mine:
                    self._in_callback_since = None

    def _stop(self) -> None:
        """Before the interpreter ends, which a thread that comes back from the core would not survive."""
        with self._changed:
            self._stops = True
            self._changed.notify()
            self._watch_again.notify()
        if self._thread is not None:
            self._thread.join(1.0)


COMPLETIONS = Completions()
