"""What an asynchronous collective returns."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from dcoll import _C
from dcoll.errors import ArgumentError, DcollError


class Handle:
    """A collective under way. It keeps the tensors alive that the core works on."""

    __slots__ = ("_core", "_finish", "_memory", "_result", "_waited")

    def __init__(self, core: _C.Handle, memory: Any, finish: Callable[[_C.Handle], Any] | None, result: Any) -> None:
        """memory: what the core reads and writes; finish: makes the result once it is done (None: `result` is it)."""
        self._core = core
        self._memory = memory
        self._finish = finish
        self._result = result
        self._waited = False

    def poll(self) -> bool:
        """True when finished, successfully or not: the result is where it belongs, and wait() returns or raises at
        once."""
        if not self._core.poll():
            return False
        if self._finish is not None:
            with contextlib.suppress(Exception):  # wait() raises it
                self.wait()
        return True

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until finished and return the result; raise what the collective failed with.

        timeout: seconds. When it passes, dcoll.TimeoutError is raised and the collective goes on: wait again. None: no
        limit beyond the core's own (DCOLL_TIMEOUT).
        """
        self._core.wait(-1.0 if timeout is None else max(0.0, timeout))
        self._waited = True
        if self._finish is not None:
            self._result = self._finish(self._core)
            self._finish = None
        self._memory = None
        return self._result

    def then(self, change: Callable[[Any], Any]) -> "Handle":
        """This handle, whose result is from now on what `change` makes of it, where wait() is called."""
        finish, result = self._finish, self._result
        self._finish = lambda core: change(result if finish is None else finish(core))
        return self

    def ended(self) -> bool:
        """Whether the core is done, however it went. The result is made by wait() and poll() alone."""
        return self._core.poll()

    def wait_for_memory(self) -> None:
        """Wait for that."""
        with contextlib.suppress(DcollError):
            self._core.wait()

    def __del__(self) -> None:
        # Dropped without wait(), or failed with a message half there: the core still writes to the tensors, which must
        # outlive that.
        try:
            if self._waited or self._core.released():
                return
        except AttributeError:  # it was never made
            return
        for key, kept in list(_unfinished.items()):
            if kept[-1].released():
                _unfinished.pop(key, None)  # another thread may have done it
        _unfinished[id(self._core)] = (self._memory, self._result, self._core)


# By the core's handle. It is last in the tuple: Python lets go of its items from the last to the first, and the core's
# waits.
_unfinished: dict[int, tuple[Any, Any, _C.Handle]] = {}


class Handles:
    """Several handles as one."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles
        self.results: list[Any] = []

    def poll(self) -> bool:
        return all([handle.poll() for handle in self._handles])  # every one: it is what brings them on

    def wait(self, timeout: float | None = None, **how: bool) -> None:
        """timeout: of all together; None or negative: no limit. The first error, once all have ended: their memory is
        the caller's again only then, and who waits would come again at once."""
        left = None if timeout is None or timeout < 0 else timeout
        end = time.monotonic() + (left or 0.0)
        first: Exception | None = None
        results = []
        for handle in self._handles:
            try:
                results.append(handle.wait(left, **how))
            except Exception as error:
                if not handle.poll():
                    raise  # only the caller's patience ended
                first = first or error
            if left is not None:
                left = max(0.0, end - time.monotonic())
        if first is not None:
            raise first
        self.results = results

    @property
    def source(self) -> int:
        """Of messages: the rank that sent the last one."""
        return int(self._handles[-1].source)


def poll(handle: Handle) -> bool:
    """True when the handle's collective is finished: synchronize() then does not wait."""
    try:
        poll = handle.poll
    except AttributeError:
        raise _no_handle("poll", handle) from None
    return poll()


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous collective and return its result."""
    try:
        wait = handle.wait
    except AttributeError:
        raise _no_handle("synchronize", handle) from None
    return wait()


def _no_handle(what: str, given: object) -> ArgumentError:
    return ArgumentError(f"{what} takes what an asynchronous collective has returned, but got {given!r}")
