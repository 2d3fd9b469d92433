"""What elastic training keeps over a failure: states of Python objects. Those of torch are in state.py."""

import copy
import queue
from collections.abc import Callable, Iterable
from enum import IntFlag
from typing import Any


class HostUpdate(IntFlag):
    """How the hosts of a job changed."""

    NONE = 0
    ADDED = 1
    REMOVED = 2


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job changed: training goes on, without going back, on the new ranks.

    skip_sync: the state need not be broadcast, because hosts were only removed.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class State:
    """State that is in sync over all ranks, can be saved and be gone back to.

    Subclasses give save(), restore(), sync() and reset(). `bcast_object` broadcasts a Python object from rank 0 and
    returns it; `get_rank` is accepted because Horovod's has it.
    """

    _commits_made = 0  # run() looks whether a failure let any happen

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call these after every reset, in this order: to scale the learning rate to the new size(), for example."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """What run() calls after it has joined the job anew: reset(), then the callbacks."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update: int) -> None:
        """Note that the hosts changed; the next commit() or check_host_updates() of all ranks acts on it."""
        self._host_messages.put((timestamp, int(update)))

    def commit(self) -> None:
        """save(), then check_host_updates(). Collective. Costs a copy of the state in memory: not after every batch."""
        self.save()
        self._commits_made += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, on all ranks alike, when rank 0 was told that the hosts changed. Collective."""
        last, update = self._last_updated_timestamp, HostUpdate.NONE
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > last:
                last, update = timestamp, update | HostUpdate(change)
        before, last, update = self._bcast_object((self._last_updated_timestamp, last, update))
        self._last_updated_timestamp = last
        if last > before:
            raise HostsUpdatedInterrupt(skip_sync=update == HostUpdate.REMOVED)

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was last saved, or to the beginning."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take the state of rank 0. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a changed number of ranks. Nothing to do by default."""


class ObjectState(State):
    """State made of Python objects, which are attributes: ObjectState(bcast_object, get_rank, epoch=0).epoch."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = copy.deepcopy(kwargs)
        self._set_attributes(kwargs)

    def save(self) -> None:
        """Keep a deep copy of every attribute that the constructor was given."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Set the attributes to what was last saved."""
        self._set_attributes(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Take the attributes of rank 0, and save them. Collective."""
        if self._saved_state:
            current = {name: getattr(self, name) for name in self._saved_state}
            self._set_attributes(self._bcast_object(current))
            ObjectState.save(self)

    def _set_attributes(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)
