"""Memory that the ranks of a node share, and memory of a GPU, which they do not."""

import math
import sys
from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeVar

from dcoll.collectives.tensors import KINDS, Kind, code_of, kind_of, library
from dcoll.errors import ArgumentError
from dcoll.job.world import communicator

T = TypeVar("T")


def empty(shape: int | Sequence[int], dtype: Any = None, device: Any = None) -> Any:
    """A tensor, at first of zeros, in memory that the ranks of this node can read: collectives on it copy nothing.

    dtype: a torch.dtype (torch.float32 if it is None) gives a torch.Tensor, a NumPy dtype a numpy.ndarray.
    device: "cpu" if it is None. "cuda", "cuda:1" or the like: memory of that GPU, out of torch's allocator, which other
        ranks cannot read yet: collectives on it go through host memory, as on any tensor there.
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
        return _on_gpu(kind, sizes, dtype, device)
    buffer = communicator().alloc(math.prod(sizes) * dtype.itemsize)
    return kind.wrap(buffer, dtype, sizes)


def _on_gpu(kind: Kind, sizes: tuple[int, ...], dtype: Any, device: Any) -> Any:
    import torch

    if kind is not library("torch") or torch.device(device).type != "cuda":
        raise ArgumentError(
            f"dcoll.empty() got device {device} and dtype {dtype}, but has memory of the CPU and, for torch's dtypes, "
            'of CUDA: pass device="cpu" or "cuda"'
        )
    communicator()  # not before init(), as on the CPU
    return torch.zeros(sizes, dtype=dtype, device=device)


def empty_like(tensor: T) -> T:
    """As empty(), of the same kind, shape, dtype and device as `tensor`."""
    like: Any = tensor
    if type(tensor) not in KINDS:
        kind_of(tensor)  # or it raises
    out: T = empty(tuple(like.shape), like.dtype, getattr(like, "device", None))
    return out
