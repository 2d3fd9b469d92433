"""Buckets of DistributedDataParallel moved into memory that the ranks of a node share.

PyTorch makes DDP's buckets with malloc(); the core would copy each into shared memory and back. Their tensors and views
are PyTorch's and stay, but the storage beneath them moves twice: UntypedStorage._share_fd_cpu_() gives it a mapping of
whole pages, and Buffer.appear_at() puts pages of the core's shared memory in place of those.
"""

import os
import sys
from types import CodeType

import torch

from dcoll import _C
from dcoll.errors import DcollError

LEAST_ELEMENTS = 16 << 10
"""Smaller buckets are not worth pages of their own."""

_BACKWARD: CodeType | None = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
_HERE = os.path.dirname(__file__) + os.sep
_SHM = "/dev/shm"  # where PyTorch's shared memory is, of which containers have 64 MiB

KEY = "_dcoll_bucket"
"""An attribute of a storage, which PyTorch keeps as long as the memory: absent, then SEEN, and after the second call
STAYS, or where the storage is and the memory whose pages it has."""
SEEN, STAYS = "seen", "stays"


def called_by_backward() -> bool:
    """Whether it is backward() itself that has called the backend, as DDP's C++ calls a group: no program has that
    tensor, as it has those that it passes to torch.distributed.all_reduce."""
    caller = sys._getframe(1).f_back
    while caller is not None and caller.f_code.co_filename.startswith(_HERE):
        caller = caller.f_back
    return caller is not None and caller.f_code is _BACKWARD


def place_of(comm: _C.Communicator, bucket: torch.Tensor) -> int:
    """The address at which the core finds a bucket: that of memory of its own, from the second time on."""
    address, storage = bucket.data_ptr(), bucket.untyped_storage()
    known = getattr(storage, KEY, None)
    if isinstance(known, tuple):
        return known[1].address if known[0] == address else address  # elsewhere: a program gave it other memory
    if known is STAYS or storage.data_ptr() != address or storage.is_shared() or not storage.resizable():
        return address
    if known is None:  # what DDP keeps comes again
        setattr(storage, KEY, SEEN)
        return address
    setattr(storage, KEY, STAYS)  # whatever becomes of it: a try costs files and memory
    return _move(comm, storage)


def _move(comm: _C.Communicator, storage: torch.UntypedStorage) -> int:
    before, nbytes = storage.data_ptr(), storage.nbytes()
    try:
        memory = comm.alloc(nbytes)
        if not memory.mapped:
            return before
        room = os.statvfs(_SHM)
        if room.f_bavail * room.f_frsize <= nbytes:
            raise OSError(f"{_SHM} has no room")  # PyTorch would leave an open file behind
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            file, _ = storage._share_fd_cpu_()
            memory.appear_at(storage.data_ptr(), nbytes)
            # The file is torch's way to hand the storage to other processes, which would not get these pages: an error
            # there.
            os.dup2(nothing, file, inheritable=False)
        finally:
            os.close(nothing)
    except (DcollError, RuntimeError, OSError) as error:  # no room in the arena or in /dev/shm, no more files
        comm.log("info", f"a bucket of {nbytes} bytes of DistributedDataParallel stays where it is: {error}")
        return storage.data_ptr()
    setattr(storage, KEY, (storage.data_ptr(), memory))
    return memory.address
