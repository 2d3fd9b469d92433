"""Buckets of DistributedDataParallel moved into memory that the ranks of a node share.

PyTorch makes DDP's buckets with malloc(); the core would copy each into shared memory and back. Their tensors and views
are PyTorch's and stay, but the storage beneath them moves twice: UntypedStorage._share_fd_cpu_() gives it a mapping of
whole pages, and Buffer.appear_at() puts pages of the core's shared memory in place of those.
"""

import os
import sys
from types import CodeType
from typing import Any

import torch
from torch.multiprocessing import reductions

from dcoll import _C
from dcoll.errors import DcollError

LEAST_ELEMENTS = 16 << 10
"""Smaller buckets are not worth pages of their own."""

_WeakStorage: Any = reductions.StorageWeakRef
_BACKWARD: CodeType | None = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)

_seen: dict[int, Any] = {}
"""Weak references to storages that were reduced once, by their address in C++, which nothing else gets as long
as there is the reference. What DDP keeps comes again."""

MOVED: dict[int, tuple[Any, _C.Buffer]] = {}
"""By where a tensor has its storage: a weak reference to that, and the memory whose pages it has, which has to live as
long."""


def called_by_backward() -> bool:
    """Whether the caller's caller is backward() itself, which is how DDP's C++ calls a group: no program has that
    tensor, as it has those that it passes to torch.distributed.all_reduce."""
    caller = sys._getframe(1).f_back
    return caller is not None and caller.f_code is _BACKWARD


def place_of(comm: _C.Communicator, bucket: torch.Tensor) -> int:
    """The address at which the core finds a bucket: that of memory of its own, from the second time on."""
    address = bucket.data_ptr()
    moved = MOVED.get(address)
    if moved is not None and not moved[0].expired():
        return moved[1].address
    storage = bucket.untyped_storage()
    if storage.data_ptr() != address or storage.is_shared() or not storage.resizable():
        return address
    if _seen.pop(storage._cdata, None) is not None:
        return _move(comm, storage)
    for key, kept in list(_seen.items()):  # a list: threads may train models of their own
        if kept.expired():
            _seen.pop(key, None)
    _seen[storage._cdata] = _WeakStorage(storage)
    return address


def _move(comm: _C.Communicator, storage: torch.UntypedStorage) -> int:
    for address, (kept, _) in list(MOVED.items()):
        if kept.expired():
            MOVED.pop(address, None)
    before, nbytes = storage.data_ptr(), storage.nbytes()
    try:
        memory = comm.alloc(nbytes)
        if not memory.mapped:
            return before
        file, _ = storage._share_fd_cpu_()
        memory.appear_at(storage.data_ptr(), nbytes)
    except (DcollError, RuntimeError) as error:  # no room in the arena, or in /dev/shm
        comm.log("info", f"a bucket of {nbytes} bytes of DistributedDataParallel stays where it is: {error}")
        return storage.data_ptr()
    MOVED[storage.data_ptr()] = _WeakStorage(storage), memory
    # The file is torch's way to hand the storage to other processes, which would not get these pages: an error there.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, file, inheritable=False)
    os.close(nothing)
    return memory.address
