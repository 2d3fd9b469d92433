"""Memory that the ranks of a node share, of the CPU and of GPUs."""

import math
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, SupportsIndex, TypeVar

from dcoll import _C
from dcoll.collectives.tensors import KINDS, Kind, code_of, kind_of, library
from dcoll.errors import ArgumentError, DcollError
from dcoll.job.world import communicator

T = TypeVar("T")
_ALIGNMENT = 64  # bytes, of tensors side by side: what kernels read at once, and more
_told: set[str] = set()


def empty(shape: int | Sequence[int], dtype: Any = None, device: Any = None) -> Any:
    """A tensor, at first of zeros, in memory that the ranks of this node can read: collectives on it copy nothing.

    dtype: a torch.dtype (torch.float32 if it is None) gives a torch.Tensor, a NumPy dtype a numpy.ndarray.
    device: "cpu" if it is None. "cuda", "cuda:1" or the like: memory of that GPU, in which collectives work in place
        where the ranks' GPUs reach each other (docs/gpu.md).
    """
    sizes = (shape,) if isinstance(shape, SupportsIndex) else tuple(shape)
    torch = sys.modules.get("torch")
    if dtype is None:
        import torch as torch_module

        torch, dtype = torch_module, torch_module.float32
    if torch is not None and isinstance(dtype, torch.dtype):
        kind = library("torch")
    else:
        import numpy

        kind, dtype = library("numpy"), numpy.dtype(dtype)
    code_of(dtype)
    if device is not None and str(device).partition(":")[0] != "cpu":
        _check_is_cuda(kind, dtype, device)
    comm = communicator()  # not before init(), for any device
    if kind is library("torch"):
        like = torch.empty(0, dtype=dtype, device=device or "cpu")  # type: ignore[union-attr]
        if kind.on_device(like):
            return zeros_on_device(sizes, like)
    buffer = comm.alloc(math.prod(sizes) * dtype.itemsize)
    return kind.wrap(buffer, dtype, sizes)


def _check_is_cuda(kind: Kind, dtype: Any, device: Any) -> None:
    import torch

    if kind is not library("torch") or torch.device(device).type != "cuda":
        raise ArgumentError(
            f"dcoll.empty() got device {device} and dtype {dtype}, but has memory of the CPU and, for torch's dtypes, "
            'of CUDA: pass device="cpu" or "cuda"'
        )


def zeros_on_device(sizes: Sequence[int], like: Any) -> Any:
    """A tensor of the dtype and device of `like`, in memory of that device which other ranks can open."""
    nbytes = math.prod(sizes) * like.dtype.itemsize
    return _on_device(_buffer_for(like, nbytes), sizes, like).zero_() if nbytes else like.new_zeros(sizes)


def zeros_side_by_side(groups: Sequence[Sequence[Any]]) -> list[tuple[Any, list[Any]]]:
    """Such memory for tensors of one device, in groups of one dtype. Of each group all of it as one flat tensor, with
    some bytes between the tensors, and for each of them one of its shape and strides, with a storage of its own.

    Where there is no such memory, which a warning says once, flat tensors in torch's, whose storages the others share.
    Where torch has none either, it raises its OutOfMemoryError.
    """
    begins, end = [], 0
    for group in groups:
        begins.append(_begins_of(group, end))
        end += _length_of(begins[-1])
    try:
        buffer = _buffer_for(groups[0][0], end)
    except DcollError as error:
        tell_once("buckets of gradients on a device lie in torch's memory, out of which they are copied", str(error))
        return [zeros_in_torchs_memory(group) for group in groups]
    made = []
    for group, of in zip(groups, begins, strict=True):
        length = _length_of(of)
        flat = _on_device(buffer.part(of[0], length), (length // group[0].itemsize,), group[0]).zero_()
        pieces = []
        for tensor, begin in zip(group, of, strict=False):
            own = _on_device(buffer.part(begin, tensor.nbytes), (tensor.numel(),), tensor) if tensor.nbytes else tensor
            pieces.append(own.as_strided(tensor.shape, tensor.stride()).detach())
        made.append((flat, pieces))
    return made


def _begins_of(group: Sequence[Any], end: int) -> list[int]:
    """Of its tensors, from `end` on, and of what is behind them; in bytes."""
    return [*accumulate((-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in group), initial=end)]


def _length_of(begins: Sequence[int]) -> int:
    return max(begins[-1] - begins[0], _ALIGNMENT)  # so that a flat tensor has memory


def zeros_in_torchs_memory(group: Sequence[Any]) -> tuple[Any, list[Any]]:
    """One group as zeros_side_by_side() lays it out, in memory of torch's."""
    begins, size = _begins_of(group, 0), group[0].itemsize
    flat = group[0].new_zeros(_length_of(begins) // size)
    pairs = zip(group, begins, strict=False)
    return flat, [flat.as_strided(tensor.shape, tensor.stride(), begin // size) for tensor, begin in pairs]


def _buffer_for(like: Any, nbytes: int) -> _C.DeviceBuffer:
    import torch

    number = _C.EMULATED_DEVICE if _C.emulates_device() else like.get_device()
    try:
        return _C.DeviceBuffer(number, nbytes)
    except DcollError:  # torch may keep what it does not use
        torch.cuda.empty_cache()
        return _C.DeviceBuffer(number, nbytes)


def tell_once(what: str, why: str) -> None:
    """Log a warning, once in this process."""
    if what not in _told:
        _told.add(what)
        communicator().log("warning", f"{what}: {why}")


def _on_device(buffer: _C.DeviceBuffer, sizes: Sequence[int], like: Any) -> Any:
    import torch

    is_gpu = hasattr(buffer, "__cuda_array_interface__")
    flat = torch.as_tensor(buffer, device=like.device) if is_gpu else torch.frombuffer(buffer, dtype=torch.uint8)
    return like.new_empty(0).set_(flat.untyped_storage(), 0, tuple(sizes))


def empty_like(tensor: T) -> T:
    """As empty(), of the same kind, shape, dtype and device as `tensor`."""
    like: Any = tensor
    if type(tensor) not in KINDS:
        kind_of(tensor)  # or it raises
    out: T = empty(tuple(like.shape), like.dtype, getattr(like, "device", None))
    return out
