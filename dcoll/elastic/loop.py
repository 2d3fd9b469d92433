"""The loop around a training function."""

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, cast

from dcoll.elastic.base_state import HostsUpdatedInterrupt, HostUpdate, State
from dcoll.errors import HorovodInternalError
from dcoll.job import world

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)

MAX_RESETS_WITHOUT_COMMIT = 10
"""A failure that comes back this often, with no commit in between, is one that trying again does not heal."""

_listeners: "weakref.WeakSet[State]" = weakref.WeakSet()
_listeners_lock = threading.Lock()


def notify_hosts_updated(update: int = HostUpdate.ADDED) -> None:
    """Tell the states of this process's running functions that the job's hosts changed.

    For whoever manages the hosts; may be called from any thread, and counts on rank 0. All ranks raise
    HostsUpdatedInterrupt at their next commit() or check_host_updates().
    """
    with _listeners_lock:
        for state in list(_listeners):
            state.on_hosts_updated(time.time(), update)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a training function, whose first argument is a State, so that it goes on after a failure.

    The function is called after state.sync(). When a collective fails (HorovodInternalError), the state goes back to
    the last commit; when the hosts changed (HostsUpdatedInterrupt), it stays. In both cases all ranks then join the job
    anew (shutdown(), init()), the state's reset callbacks run, and the function is called again. Every other exception
    ends the job, and so does a failure that comes MAX_RESETS_WITHOUT_COMMIT times with no commit in between.
    """

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        world.init()
        with _listeners_lock:
            _listeners.add(state)
        skip_sync = False
        failures_in_a_row, commits_before = 0, -1
        try:
            while True:
                try:
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError as error:
                    failures_in_a_row = 1 if state._commits_made > commits_before else failures_in_a_row + 1
                    commits_before = state._commits_made
                    if failures_in_a_row > MAX_RESETS_WITHOUT_COMMIT:
                        raise
                    _tell(error)
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync
                world.shutdown()
                world.init()
                state.on_reset()
        finally:
            with _listeners_lock:
                _listeners.discard(state)

    return cast(Callable[Concatenate[S, P], R], wrapper)


def _tell(error: Exception) -> None:
    if world.rank() == 0:
        print(f"dcoll.elastic: going back to the last commit after: {error}", file=sys.stderr, flush=True)
