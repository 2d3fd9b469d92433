"""Which backward is running: what autograd knows, and tells only in private."""

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from dcoll.errors import text_of

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Hooked")

graph_task = torch._C._current_graph_task_id
"""The number of the backward that runs on this thread."""

NO_TASK = -1  # outside of any backward

_run_backward = torch.autograd.graph._engine_run_backward.__code__


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """torch.compile calls it instead of looking into it, also from a compiled training step."""
    disabled: Callable[P, R] = torch._disable_dynamo(function)  # type: ignore[attr-defined]  # a microsecond a call

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (disabled if torch.compiler.is_dynamo_compiling() else function)(*args, **kwargs)

    return call


class Hooked(Protocol):
    """Whose hooks autograd calls."""

    hook_lock: threading.RLock


def hook(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """untraced, and one at a time: of a model on several devices autograd calls hooks on several threads at once."""

    @functools.wraps(function)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.hook_lock:
            return function(self, *args, **kwargs)

    return untraced(call)


def is_nested() -> bool:
    """True inside a backward that runs inside another one on this thread."""
    # On a thread of autograd's, which has one for each GPU, the outer one runs on the thread that waits for this one.
    depth = int(isinstance(threading.current_thread(), threading._DummyThread))
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        depth += frame.f_code is _run_backward
    return depth > 1


class Watcher(Protocol):
    """Who is told of every backward, on any thread, but for nested ones."""

    def before_backward(self) -> None: ...
    def after_backward(self) -> None: ...
    def backward_failed(self, failure: "Failure") -> None: ...


class _Running(threading.local):
    number = 0


_running = _Running()
_newest = [0]  # of all threads


def running() -> int:
    """The number of the backward that this thread runs, or has run last, of those that watchers are told of.

    On a thread of autograd's, which begins none: the newest.
    """
    return _running.number or _newest[0]


class Failure:
    """A backward that raised, or what a watcher did after it."""

    def __init__(self, error: BaseException, roots: Sequence[Any], leaves: Sequence[Any]) -> None:
        self.number = running()
        self.reason = f"its backward raised {text_of(error)}"
        self._roots = roots
        self._leaves = leaves

    @functools.cached_property
    def _reached(self) -> set[int]:
        """The ids of the tensors whose gradients it would have brought, were it only for those that the graph shows."""
        if self._leaves:
            return {id(one) for one in self._leaves}
        found: set[int] = set()
        seen: set[Any] = set()
        roots = [root for root in self._roots if getattr(root, "requires_grad", True)]  # tensors, or GradientEdges
        left = [
            (root if hasattr(root, "node") else torch.autograd.graph.get_gradient_edge(root)).node for root in roots
        ]
        while left:
            node = left.pop()
            if node in seen:
                continue
            seen.add(node)
            found.add(id(getattr(node, "variable", None)))
            left += [following for following, _ in node.next_functions if following is not None]
        return found

    def reaches(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether the backward was of any of them. Slow: it walks through the graph."""
        return any(id(p) in self._reached for p in params)


# In the order in which they called watch(): what they do at the end of a backward is collective, so it must not depend
# on addresses, as the order of a set does.
_watchers: weakref.WeakValueDictionary[int, Watcher] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_installing = threading.Lock()  # two threads would each take the other's probe for a failure of their own
_engine: list[Any] = []  # torch's function, once watch() has put _run_and_tell in its place; None: that did not work


def watch(watcher: Watcher) -> bool:
    """Tell it of backward passes from now on. False: this version of torch runs them in a way not known here.

    torch has a hook for the end of one backward, to be called while it runs, but none for all of them.
    """
    with _installing:
        if not _engine:
            _install()
    if _engine[0] is None:
        return False
    if all(one is not watcher for one in _alive()):
        _watchers[next(_numbers)] = watcher
    return True


def stop_watching(watcher: object) -> None:
    """Whose parameters another one has now: it is told of nothing any more."""
    with _installing:
        for number in [number for number, one in _watchers.items() if one is watcher]:
            del _watchers[number]


def _alive() -> list[Watcher]:
    """A copy: other threads may make optimizers meanwhile."""
    return [watcher for reference in _watchers.valuerefs() if (watcher := reference()) is not None]


def _install() -> None:
    torchs = getattr(torch.autograd, "_engine_run_backward", None)
    _engine.append(torchs)
    if torchs is None:
        return
    torch.autograd._engine_run_backward = _run_and_tell  # type: ignore[attr-defined]
    probe = _Probe()
    _watchers[next(_numbers)] = probe
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).neg().backward()  # type: ignore[no-untyped-call]
    if probe.told != ["before", "after"]:
        torch.autograd._engine_run_backward = torchs  # type: ignore[attr-defined]
        _engine[0] = None


class _Probe:
    def __init__(self) -> None:
        self.told: list[str] = []
        self._thread = threading.get_ident()

    def before_backward(self) -> None:
        self._note("before")

    def after_backward(self) -> None:
        self._note("after")

    def _note(self, what: str) -> None:
        if threading.get_ident() == self._thread:
            self.told.append(what)

    def backward_failed(self, failure: Failure) -> None:
        pass


@untraced
def _run_and_tell(*args: Any, **kwargs: Any) -> Any:
    if not _watchers or not kwargs.get("accumulate_grad") or graph_task() != NO_TASK:
        return _engine[0](*args, **kwargs)
    told = _alive()
    _running.number = _newest[0] = next(_numbers)
    for watcher in told:
        watcher.before_backward()
    try:
        result = _engine[0](*args, **kwargs)
        for watcher in told:
            watcher.after_backward()
    except BaseException as error:
        failure = Failure(error, args[0], args[4] if len(args) > 4 else ())
        for watcher in told:
            watcher.backward_failed(failure)
        raise
    return result
