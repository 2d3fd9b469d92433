"""The backend as PyTorch takes it: a ProcessGroup of its own up to 2.13, a Backend from 2.14 on."""

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dcoll.errors import ArgumentError, text_of
from dcoll.job.lifecycle import GROUPS
from dcoll.job.world import shutdown
from dcoll.torch import groups
from dcoll.torch.calls import COLLECTIVES, OTHER_NAMES, collective
from dcoll.torch.messages import Messages
from dcoll.torch.movement import Movement
from dcoll.torch.reductions import Reductions

NAME = "dcoll"
CPU = torch.device("cpu")
LEAST_TIMEOUT_S = 0.001
"""In place of none at all."""
DEVICE_TYPES = ("cpu", "cuda") if torch.version.cuda is not None else ("cpu",)
TorchBackend: Any = torch._C._distributed_c10d.Backend
TorchProcessGroup: Any = dist.ProcessGroup  # whose methods are overloads, here they take the union
BACKENDS_IN_PYTHON = hasattr(TorchBackend, "all_gather_single")
"""Whether torch calls the methods of a Backend that is written in Python: from 2.14 on."""


class Collectives(Reductions, Movement, Messages):
    """All collectives of a group, and its life, under the names of both."""

    _leaves_job = False
    # Of torch's own properties of that name, 2.15's ends in itself where a class written in Python has none.
    supports_coalescing = supports_time_estimate = _supports_time_estimate = supports_shrinking = False
    supports_reconfigure = supports_window = False

    def _open(self, store: Any, ranks: Sequence[int], rank: int, size: int, timeout: timedelta) -> None:
        """Makes the communicator: collective over the group. ranks: numbers in the job; none: all."""
        is_job = not ranks or groups.is_first(size)
        if is_job:
            # A rank's number in the job is torch's, whatever order new_group(sort_ranks=False) has for this group.
            in_job = dist.get_rank() if ranks else rank
            self._comm, self._leaves_job = groups.world(store, in_job, size, timeout, beside=bool(ranks))
        if not is_job or list(ranks) != sorted(ranks):
            self._comm = groups.subgroup(ranks)
        self._store = store
        self._options = TorchBackend.Options(NAME, timeout)
        self._timeout_before_s = self._comm.timeout_s
        if groups.is_limited_by(timeout, self._comm):
            self.set_timeout(timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long an operation may make no progress, on every rank of the group."""
        self._options = TorchBackend.Options(NAME, timeout)
        self._comm.timeout_s = max(timeout.total_seconds(), LEAST_TIMEOUT_S)

    _set_default_timeout = set_timeout

    @property
    def options(self) -> Any:
        return self._options

    def getBackendName(self) -> str:
        return NAME

    _get_backend_name = name = getBackendName

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        """How many operations were started here so far; those with async_op=False are not counted."""
        return self._sequence

    def _wait_for_pending_works(self) -> None:
        """There are no hooks that could be pending."""

    # --- memory that the ranks of a node share

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return isinstance(device, torch.device) and device.type == "cpu"  # DDP's reducer in C++ hands over a number

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype = torch.float32, device: torch.device = CPU
    ) -> torch.Tensor:
        if device.type != "cpu":
            raise ArgumentError(
                f"allocate_tensor got device {device}, but the dcoll backend has memory of the CPU alone"
            )
        if size == 0:
            return torch.empty(0, dtype=dtype)
        # FSDP2 takes and frees its buffers in every step: out of a pool, or each would be paged in again.
        return torch.frombuffer(self._comm.scratch(size * dtype.itemsize), dtype=dtype, count=size)

    # --- the end

    def abort(self) -> None:
        """Whatever is under way fails, here and on the other ranks of the group."""
        self._comm.fail("the process group was aborted")
        if self._comm in GROUPS:  # torch mostly forgets the group now, without shutdown()
            groups.close(self._comm)

    def shutdown(self) -> None:
        """Finish what is queued and say goodbye. Waits for the other ranks where the job ends with the group."""
        if self._leaves_job:
            self._tell_of_error(self._comm, *GROUPS)
            shutdown()
        elif self._comm in GROUPS:
            self._tell_of_error(self._comm)
            groups.close(self._comm)
        else:  # the program's own job, which goes on, or a group that was aborted
            self._comm.timeout_s = self._timeout_before_s

    def _tell_of_error(self, *comms: Any) -> None:
        """Who still calls something then hears why this rank left: destroy_process_group() stands in many a finally."""
        error = sys.exc_info()[1]
        if error is not None:
            for comm in comms:
                comm.note_refused(text_of(error))


for _name in COLLECTIVES:
    setattr(Collectives, _name, collective(_name, getattr(Collectives, _name)))
for _other, _name in OTHER_NAMES.items():
    setattr(Collectives, _other, getattr(Collectives, _name))


def opened(group: Any, made: Any) -> None:
    """made: what torch has to say about the group."""
    group._open(made.store, list(made.global_ranks_in_group), made.group_rank, made.group_size, made.timeout)


class DcollBackend(Collectives, TorchBackend):
    """For PyTorch 2.14 and later: the backend of torch's own ProcessGroup."""

    def __init__(self, rank: int, size: int) -> None:
        TorchBackend.__init__(self, rank, size)

    @property
    def supports_splitting(self) -> bool:
        return True

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> Any:
        """A part of this group. ranks: numbers in it."""
        made = DcollBackend(list(ranks).index(self._comm.rank), len(ranks))
        job = self._comm.job_ranks
        made._open(store, [job[rank] for rank in ranks], made.rank(), len(ranks), opts._timeout)
        return made

    def perform_nocolor_split(self, device: torch.device) -> None:
        """This rank is not in a group that others split off, which involves them alone."""

    allreduce_sparse = Collectives.allreduce
    start_coalescing = Collectives._start_coalescing
    end_coalescing = Collectives._end_coalescing


class _Asked(threading.local):
    works: list[Any] | None = None


_ASKED = _Asked()
"""Where a backend puts the Work that it returns to torch's C++, while Python waits for it on this thread. Python gets
one of torch's own in its place, which knows wait() and get_future() alone: it never completes, and cannot tell who sent
a message."""


def _kept(call: Callable[..., Any]) -> Callable[..., Any]:
    """A method of DcollBackend, which C++ calls."""

    @functools.wraps(call)
    def method(*args: Any, **kwargs: Any) -> Any:
        work = call(*args, **kwargs)
        if _ASKED.works is not None:
            _ASKED.works.append(work)
        return work

    return method


def given_back(call: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch's ProcessGroup, which Python calls: dcoll's Work where a backend of dcoll's has made one."""

    @functools.wraps(call)
    def method(*args: Any, **kwargs: Any) -> Any:
        made: list[Any] = []
        _ASKED.works = made
        try:
            work = call(*args, **kwargs)
        finally:
            _ASKED.works = None
        return made[-1] if made else work

    return method


GIVE_WORK = (*COLLECTIVES, *OTHER_NAMES, "send", "recv", "recv_anysource")
for _name in (*GIVE_WORK, "end_coalescing"):
    setattr(DcollBackend, _name, _kept(getattr(DcollBackend, _name)))


def gathered_to_one(call: Callable[..., Any]) -> Callable[..., Any]:
    """gather_single() of torch's ProcessGroup, which has none for backends that are written in Python."""

    @functools.wraps(call)
    def method(self: Any, output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        backend = self._get_backend(input.device)
        own = isinstance(backend, DcollBackend)
        return (backend.gather_single if own else functools.partial(call, self))(output, input, *args, **kwargs)

    return method


def split_by_members(call: Callable[..., Any]) -> Callable[..., Any]:
    """split_group() of torch's ProcessGroup: a rank that is in no part has nothing to do for those that are."""

    @functools.wraps(call)
    def method(self: Any, ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        backends = [self._get_backend(device) for device in self._device_types]
        outside = self.rank() not in ranks and all(isinstance(one, DcollBackend) for one in backends)
        return None if outside else call(self, ranks, *args, **kwargs)

    return method


class DcollProcessGroup(Collectives, TorchProcessGroup):
    """For PyTorch before 2.14, where a Backend cannot be written in Python: the group itself."""

    def __init__(self, made: Any) -> None:
        TorchProcessGroup.__init__(self, made.group_rank, made.group_size)
        opened(self, made)
        self._name, self._desc = str(made.group_id), ""

    def rank(self) -> int:
        return self._comm.rank

    getRank = rank

    def size(self) -> int:
        return self._comm.size

    getSize = size

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type not in DEVICE_TYPES:
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in DEVICE_TYPES]

    def get_group_store(self) -> Any:
        return self._store

    def split_group(self, ranks: Sequence[int], **options: Any) -> Any:
        raise ArgumentError(
            "split_group is not there for CPUs in this version of PyTorch: call torch.distributed.new_group(ranks)"
        )

    supports_splitting = False

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    def getGroupName(self) -> str:
        return self._name

    group_name = property(getGroupName)

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupDesc = _set_group_desc

    def getGroupDesc(self) -> str:
        return self._desc

    group_desc = property(getGroupDesc)

    def _has_hooks(self) -> bool:
        return False
