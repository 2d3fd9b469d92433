"""How a collective of torch becomes a call of the core: at once on the caller's thread, or started."""

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from dcoll import _C
from dcoll.collectives.handle import Handles
from dcoll.collectives.tensors import kind_of
from dcoll.errors import ArgumentError, DcollError, text_of
from dcoll.torch.memory import Finish
from dcoll.torch.work import DONE, Done, Started, Work

_EMULATES = _C.emulates_device()
_c10d: Any = torch._C._distributed_c10d
_REGISTERS = not hasattr(_c10d.Backend, "all_gather_single")
"""Whether no code of torch's is around a group's methods, to note what wait_tensor() in a graph has to wait for."""

COLLECTIVES: dict[str, tuple[Any, str]] = {
    "allreduce": (_c10d.AllreduceOptions, "tensors|tensor opts|op timeout"),
    "allreduce_coalesced": (_c10d.AllreduceCoalescedOptions, "tensors opts"),
    "reduce": (_c10d.ReduceOptions, "tensors|tensor opts|root op timeout"),
    "broadcast": (_c10d.BroadcastOptions, "tensors|tensor opts|root timeout"),
    "allgather": (_c10d.AllgatherOptions, "output_tensors input_tensors|input_tensor opts|timeout"),
    "allgather_coalesced": (_c10d.AllgatherOptions, "output_lists input_list opts"),
    "all_gather_single": (_c10d.AllgatherOptions, "output input opts"),
    "all_gather_single_coalesced": (_c10d.AllgatherOptions, "outputs inputs opts"),
    "gather": (_c10d.GatherOptions, "output_tensors input_tensors|input_tensor opts|root timeout"),
    "gather_single": (_c10d.GatherOptions, "output input opts"),
    "scatter": (_c10d.ScatterOptions, "output_tensors|output_tensor input_tensors opts|root timeout"),
    "reduce_scatter": (_c10d.ReduceScatterOptions, "output_tensors|output input_tensors|input opts|op timeout"),
    "reduce_scatter_single": (_c10d.ReduceScatterOptions, "outputTensor inputTensor opts"),
    "reduce_scatter_single_coalesced": (_c10d.ReduceScatterOptions, "outputs inputs opts"),
    "alltoall": (_c10d.AllToAllOptions, "output_tensors input_tensors opts"),
    "all_to_all_single": (_c10d.AllToAllOptions, "output input output_split_sizes input_split_sizes opts|timeout"),
    "barrier": (_c10d.BarrierOptions, "opts|timeout"),
}
"""Of each collective the options that torch passes, and what its overloads call their parameters, in their order."""

OTHER_NAMES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
    "gather_into_tensor": "gather_single",
}
"""What torch called them before, and for some versions still."""

NO_TIME = timedelta(0)
"""Options whose timeout is not above it have none."""

_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def collective(name: str, call: Callable[..., Work]) -> Callable[..., Work]:
    """The method of a group. call(self, tensors..., opts) does it; torch's overloads with op, root and timeout in
    place of options are told apart here. What this rank refuses the others hear of, should they have made the call."""
    kind, text = COLLECTIVES[name]
    slots = [slot.split("|") for slot in text.split()]
    at = next(i for i, slot in enumerate(slots) if "opts" in slot)

    @functools.wraps(call)
    def method(self: "Calls", *args: Any, **kwargs: Any) -> Work:
        try:
            if kwargs or (len(args) > at and type(args[at]) is not kind and args[at] is not None):
                args = _with_options(name, kind, slots, at, args, kwargs)
            work = call(self, *args)
        except Exception as error:
            if isinstance(error, ArgumentError) or not isinstance(error, DcollError):
                self._comm.note_refused(text_of(error))
            raise
        opts = args[at] if len(args) > at else None
        if work is not DONE and opts is not None and opts.timeout > NO_TIME and not isinstance(work, Done):
            work._limit_s = opts.timeout.total_seconds()
        return work

    return method


def _with_options(
    name: str, kind: Any, slots: list[list[str]], at: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """The arguments of an overload as tensors and options."""
    given: dict[str, Any] = {}
    for slot, value in zip(slots, args, strict=False):
        plain = "opts" not in slot or value is None or type(value) is kind
        given[slot[0] if plain else slot[-1]] = value
    first = {parameter: slot[0] if slot[0] != "opts" else parameter for slot in slots for parameter in slot}
    unknown = [key for key in kwargs if key not in first or first[key] in given]
    missing = [slot[0] for slot in slots[:at] if not {*slot} & {*given, *kwargs} and "split" not in slot[0]]
    if unknown or missing or len(args) > len(slots):
        raise TypeError(
            f"{name} got {len(args)} arguments{''.join(f' and {key}=' for key in kwargs)}, but takes "
            f"{', '.join(' or '.join(slot) for slot in slots)}"
        )
    given.update({first[key]: value for key, value in kwargs.items()})
    opts = given.get("opts")
    if opts is None:
        opts = kind()
        for key, value in given.items():
            if key in _FIELDS and value is not None:
                setattr(opts, _FIELDS[key], value)
    return (*(given.get(slot[0], ()) for slot in slots[:at]), opts)


class Calls:
    """The communicator of a group, and what all its collectives share."""

    _comm: _C.Communicator
    _batch: list[Work] | None = None
    """The operations between _start_coalescing() and _end_coalescing()."""
    _sequence = 0

    def _on(self, tensor: torch.Tensor) -> Any:
        """What has the collectives for memory where the tensor lies."""
        return self._comm if tensor.is_cpu and not _EMULATES else kind_of(tensor).on(self._comm, tensor)

    def _at_once(self, opts: Any) -> bool:
        """Whether the call may run on this thread: async_op=False, and the group's deadline is the call's."""
        return opts is not None and not opts.asyncOp and opts.timeout <= NO_TIME

    def _root(self, what: str, opts: Any) -> int:
        root, size = 0 if opts is None else int(opts.rootRank), self._comm.size
        if not 0 <= root < size:
            raise ArgumentError(f"{what}: root rank {root} does not exist; allowed are 0 to {size - 1}")
        return root

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
        work = Work(Started(core, (memory, tensors), finish), tensors, order)
        if self._batch is not None:
            self._batch.append(work)
        if _REGISTERS and not messages and _c10d._allow_inflight_collective_as_graph_input():
            for tensor in tensors:
                _c10d._register_work(tensor, work)
        return work

    def _run(
        self, call: str, on: Any, args: Any, opts: Any, memory: Any, tensors: Sequence[torch.Tensor], finish: Finish
    ) -> Work:
        """The core's call of that name, at once or started."""
        if not self._at_once(opts):
            return self._start(getattr(on, call)(*args), memory, tensors, finish)
        done = getattr(on, f"{call}_sync")(*args)
        if finish is not None:
            finish(done)
        return DONE

    def _together(self, works: Sequence[Work], tensors: Sequence[torch.Tensor]) -> Work:
        """Several operations as one."""
        begun = [work for work in works if not isinstance(work, Done)]
        if not begun:
            return Done(tensors)
        return Work(Handles([one._handle for one in begun]), tensors)

    def _each(self, call: Callable[..., Work], outputs: Any, inputs: Any, opts: Any) -> Work:
        works = [call(output, input, opts) for output, input in zip(outputs, inputs, strict=True)]
        return self._together(works, list(outputs))

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._batch = []  # what an exception has left there is nobody's: torch's manager does not end after one

    def _end_coalescing(self, device: torch.device | None = None) -> Work:
        batch, self._batch = self._batch or [], None
        return self._together(batch, [tensor for work in batch for tensor in work._tensors])

    def barrier(self, opts: Any = None) -> Work:
        if self._at_once(opts):
            self._comm.barrier_sync()
            return DONE
        return self._start(self._comm.barrier(), None, ())

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """barrier() within `timeout`; the error names all ranks that did not come, whatever wait_all_ranks is."""
        limit = getattr(timeout, "timeout", timeout)  # options, or a time
        work = self._start(self._comm.barrier("monitored_barrier"), None, ())
        work.wait(limit if limit is not None and limit > NO_TIME else None)

    monitoredBarrier = monitored_barrier
