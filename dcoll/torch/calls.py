"""How a collective of torch becomes a call of the core: at once on the caller's thread, or started."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch

from dcoll import _C
from dcoll.collectives.tensors import kind_of
from dcoll.errors import ArgumentError
from dcoll.torch.memory import Finish
from dcoll.torch.work import DONE, Done, Handles, Started, Work

_EMULATES = _C.emulates_device()


class Calls:
    """The communicator of a group, and what all its collectives share."""

    _comm: _C.Communicator
    _limit_s: float | None = None
    """How long an operation may take, where that is less than the core's own deadline."""
    _batch: list[Work] | None = None
    """The operations between _start_coalescing() and _end_coalescing()."""
    _sequence = 0

    def _on(self, tensor: torch.Tensor) -> Any:
        """What has the collectives for memory where the tensor lies."""
        return self._comm if tensor.is_cpu and not _EMULATES else kind_of(tensor).on(self._comm, tensor)

    def _at_once(self, opts: Any) -> bool:
        """Whether the call may run on this thread: async_op=False, and the core's deadline is the group's."""
        return opts is not None and not opts.asyncOp and self._limit_s is None

    def _start(
        self,
        core: _C.Handle,
        memory: Any,
        tensors: Sequence[torch.Tensor],
        finish: Finish = None,
        messages: bool = False,
    ) -> Work:
        """core: what was started. memory: what it reads and writes, beside `tensors`. messages: between two ranks."""
        self._sequence += 1
        order = None if messages else self._comm
        work = Work(Started(core, (memory, tensors), finish), tensors, self._limit_s, order)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _together(self, works: Sequence[Work], tensors: Sequence[torch.Tensor], opts: Any) -> Work:
        """Several operations as one."""
        begun = [work for work in works if not isinstance(work, Done)]
        if not begun:
            return Done(tensors)
        work = Work(Handles([one._handle for one in begun]), tensors, self._limit_s)
        if opts is not None and not opts.asyncOp:
            work.wait()
        return work

    def _refuse(self, what: str) -> NoReturn:
        """This rank cannot make the call. The others, should they have made it, hear why."""
        self._comm.note_refused(what)
        raise ArgumentError(what)

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        if self._batch is not None:
            raise ArgumentError("a coalescing manager was entered inside another one of the same group")
        self._batch = []

    def _end_coalescing(self, device: torch.device | None = None) -> Work:
        batch, self._batch = self._batch or [], None
        return self._together(batch, [tensor for work in batch for tensor in work._tensors], None)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        limit = timeout if timeout is not None else opts.timeout if opts is not None else None
        if limit is not None and limit > timedelta(0):
            work = self._start(self._comm.barrier(), None, ())
            work._limit_s = limit.total_seconds()
            if opts is not None and not opts.asyncOp:
                work.wait()
            return work
        if self._at_once(opts):
            self._comm.barrier_sync()
            return DONE
        return self._start(self._comm.barrier(), None, ())

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """barrier() within `timeout`; the error names all ranks that did not come, whatever wait_all_ranks is."""
        limit = getattr(timeout, "timeout", timeout)  # options, or a time
        work = self._start(self._comm.barrier("monitored_barrier"), None, ())
        work.wait(limit if limit is not None and limit > timedelta(0) else None)

    monitoredBarrier = monitored_barrier
