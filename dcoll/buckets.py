"""The buckets of a GradientSync: which Reducer they are in, and the views that are the parameters' gradients."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from dcoll import _C, collective, objects
from dcoll.compressed_reducer import CompressedReducer
from dcoll.compression import NoneCompressor, wire_dtype_of
from dcoll.errors import JoinedError
from dcoll.ops import ReduceOp
from dcoll.tensors import CODES, library

_TORCH = library("torch")


_labels = [0]  # given so far in this process


def new_label(comm: _C.Communicator) -> str:
    """A name for an optimizer in what ranks compare, so that one's gradients are not taken for another's. Collective.

    The same on every rank, and no other optimizer's on any of them, even if they made different ones before.
    """
    number = _labels[0]
    if comm.size > 1:
        data = bytearray(number.to_bytes(8, "little"))
        number = max(int.from_bytes(one, "little") for one in objects.allgather_bytes(comm, data, "optimizers so far"))
    _labels[0] = max(_labels[0], number + 1)
    return f"optimizer {number}"


class AnyReducer(Protocol):
    """The core's Reducer, or one in Python with the same methods."""

    def num_buckets(self) -> int: ...
    def bucket_params(self, bucket: int) -> list[int]: ...
    def mark_ready(self, param: int, gradient_ptr: int = 0) -> bool: ...
    def finish(self) -> list[int]: ...
    def missing(self) -> list[int]: ...
    def order(self) -> list[int]: ...
    def rebuild(self, order: Sequence[int]) -> None: ...
    def wait_seconds(self) -> float: ...


class Layout:
    """How gradients are put together and what they are on their way: the options of every Reducer of an optimizer."""

    def __init__(
        self,
        label: str,
        op: ReduceOp,
        bucket_bytes: int,
        first_bucket_bytes: int,
        predivide: float,
        compression: Any = NoneCompressor,
        group_of: Callable[[Sequence[torch.Tensor]], list[int]] = lambda _: [],
    ) -> None:
        """group_of: the group of each of the parameters, or nothing: put together by size."""
        self.label = label
        self.op = op
        self.predivide = predivide
        self._bucket_bytes = bucket_bytes
        self._first_bucket_bytes = first_bucket_bytes
        self._compression = compression
        self._group_of = group_of

    def reducer(self, comm: _C.Communicator, params: list[torch.Tensor], names: list[str]) -> AnyReducer:
        """A Reducer for the parameters. Collective: the same ones on every rank."""
        groups = self._group_of(params)
        layout = [
            f"{n}: {p.dtype} {list(p.shape)} strides {p.stride()}" + (f" group {groups[i]}" if groups else "")
            for i, (n, p) in enumerate(zip(names, params, strict=True))
        ]
        objects.agree(
            comm,
            [*layout, self.label],
            "DistributedOptimizer's parameters",
            "Build the same model with the same options everywhere.",
        )
        pre, post = 1.0 / self.predivide, self.predivide
        wire = wire_dtype_of(self._compression)
        if wire is None and self._compression is not NoneCompressor:
            called = [f"{name} of {self.label}" for name in names]
            return CompressedReducer(comm, params, called, self.op, self._compression, pre, post, groups)
        return _C.Reducer(
            comm,
            [p.numel() for p in params],
            [CODES[p.dtype] for p in params],
            names,
            self.op,
            self._bucket_bytes,
            self._first_bucket_bytes,
            pre,
            post,
            wire,
            groups,
            self.label,
        )


def agree_on_order(comm: _C.Communicator, reducer: AnyReducer, label: str, knows_none: bool) -> list[int] | None:
    """The order in which rank 0's gradients became ready. None: it had none, or a rank has joined. Collective."""
    order = torch.tensor(reducer.order(), dtype=torch.int64)
    if knows_none:
        order.fill_(-1)
    try:
        collective.broadcast_(comm, order, 0, f"bucket order of {label}").wait()
    except JoinedError:
        return None
    found: list[int] = order.tolist()
    return None if -1 in found else found


def views_of(reducer: AnyReducer, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each parameter the tensor in its bucket that is to be its gradient."""
    if isinstance(reducer, CompressedReducer):
        return reducer.gradients
    assert isinstance(reducer, _C.Reducer)
    buckets = [
        _TORCH.wrap(buffer, torch.uint8, (buffer.nbytes,))
        for buffer in map(reducer.bucket_buffer, range(reducer.num_buckets()))
    ]
    views = []
    for i, p in enumerate(params):
        start = reducer.offset_bytes(i)
        flat = buckets[reducer.bucket_of(i)][start : start + p.nbytes].detach().view(p.dtype)
        views.append(shaped_like(flat, p))
    return views


def shaped_like(flat: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """The flat tensor with the parameter's shape, and its strides (channels_last) if they fit its memory."""
    probe = torch.empty_like(p, device="meta")  # keeps the strides of a dense tensor, and only of one
    return flat.as_strided(p.shape, p.stride()) if probe.stride() == p.stride() else flat.view(p.shape)
