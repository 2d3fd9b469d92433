"""Memory that the ranks of a node share."""

import math
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from dcoll.collectives.tensors import KINDS, code_of, kind_of, library
from dcoll.job.world import communicator

T = TypeVar("T")


def empty(shape: int | Sequence[int], dtype: Any = None) -> Any:
    """A tensor, at first of zeros, in memory that the ranks of this node can read: collectives on it copy nothing.

    dtype: a torch.dtype (torch.float32 if it is None) gives a torch.Tensor, a NumPy dtype a numpy.ndarray.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
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
    buffer = communicator().alloc(math.prod(sizes) * dtype.itemsize)
    return kind.wrap(buffer, dtype, sizes)


def empty_like(tensor: T) -> T:
    """As empty(), of the same kind, shape and dtype as `tensor`."""
    kind = KINDS.get(type(tensor)) or kind_of(tensor)
    like: Any = tensor
    code_of(like.dtype)
    out: T = kind.wrap(communicator().alloc(int(like.nbytes)), like.dtype, tuple(like.shape))
    return out
