"""The buckets of a GradientSync: which Reducer they are in, and the views that are the parameters' gradients."""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from dcoll import _C, gradient_errors
from dcoll.collectives import on_communicator
from dcoll.collectives.tensors import CODES, library
from dcoll.compression.codecs import NoneCompressor, PowerSGD, codec_for_buckets, codec_on_devices, wire_dtype_of
from dcoll.compression.residuals import Residuals, shaped_like
from dcoll.errors import JoinedError
from dcoll.job import objects
from dcoll.ops import ReduceOp
from dcoll.optimizer import power_sgd
from dcoll.optimizer.bucket_reducer import DeviceReducer
from dcoll.optimizer.compressed_reducer import CompressedReducer, PythonReducer, ReducerOptions
from dcoll.optimizer.host_reducer import HostReducer, has_streams

library("torch")  # gives its dtypes their codes


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


AnyReducer = _C.Reducer | PythonReducer | HostReducer
"""The core's Reducer, or one in Python with the same methods."""


@dataclass
class Layout:
    """How gradients are put together and what they are on their way: the options of every Reducer of an optimizer."""

    label: str
    op: ReduceOp
    bucket_bytes: int
    first_bucket_bytes: int
    predivide: float
    compression: Any
    group_of: Callable[[Sequence[torch.Tensor]], list[int]]
    """The group of each of the parameters, or nothing: put together by size."""
    _states: MutableMapping[torch.Tensor, power_sgd.MatrixState] = field(default_factory=WeakIdKeyDictionary)
    """Of parameters, for PowerSGD: Reducers come and go."""

    @property
    def scheduled(self) -> bool:
        """Whether what is sent depends on how many rounds there were."""
        return any(getattr(self.compression, steps, 0) for steps in ("start_step", "warmup_steps"))

    def reducer(self, comm: _C.Communicator, params: list[torch.Tensor], names: list[str]) -> AnyReducer:
        """A Reducer for the parameters. Collective: the same ones on every rank."""
        groups = self.group_of(params)
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
        sizes = self.bucket_bytes, self.first_bucket_bytes
        wire = wire_dtype_of(self.compression)
        codec = codec_for_buckets(self.compression)
        called = [f"{name} of {self.label}" for name in names]
        options = ReducerOptions(comm, params, called, self.op, pre, post, groups, *sizes, self.label)
        compression = self.compression
        has_float32 = any(p.dtype is torch.float32 for p in params)
        if isinstance(compression, PowerSGD) or (codec.get("codec") and has_float32):
            comm.tell_uncompressed()
        if isinstance(compression, PowerSGD):
            if comm.encodes:
                states = [
                    self._states.setdefault(p, power_sgd.MatrixState(n)) for n, p in zip(names, params, strict=True)
                ]
                power_sgd.agree_on_directions(comm, states)
                return power_sgd.PowerSGDReducer(options, compression, states)
            compression = NoneCompressor
        on_device = any(library("torch").on_device(p) for p in params)
        if on_device:
            encodes_none = wire is not None and not (has_float32 and comm.encodes)
            cast = "" if encodes_none else codec_on_devices(compression)
            if cast is not None:
                return DeviceReducer(options, compression, cast)
        if wire is None and not codec and compression is not NoneCompressor:
            return CompressedReducer(options, compression, names)
        core = _C.Reducer(
            comm,
            [p.numel() for p in params],
            [CODES[p.dtype] for p in params],
            names,
            self.op,
            *sizes,
            pre,
            post,
            wire,
            groups,
            self.label,
            **codec,
        )
        return HostReducer(core, params) if on_device else core


def agree_on_order(comm: _C.Communicator, reducer: AnyReducer, label: str, knows_none: bool) -> list[int] | None:
    """The order in which rank 0's gradients became ready. None: it had none, or a rank has joined. Collective."""
    order = torch.tensor(reducer.order(), dtype=torch.int64, device="cpu")
    if knows_none:
        order.fill_(-1)
    try:
        on_communicator.broadcast(comm, order, 0, f"bucket order of {label}", in_place=True).wait()
    except JoinedError:
        return None
    found: list[int] = order.tolist()
    return None if -1 in found else found


def views_of(reducer: AnyReducer, params: Sequence[torch.Tensor], which: Iterable[int]) -> list[torch.Tensor]:
    """For each of the parameters that are chosen the tensor, with a storage of its own, that is to be its gradient."""
    views = []
    for i in which:
        p = params[i]
        if not isinstance(reducer, _C.Reducer):
            views.append(reducer.gradients[i].detach())
        elif p.numel() == 0:
            views.append(torch.empty_like(p, requires_grad=False))
        else:
            buffer, start = reducer.gradient(i)
            flat = torch.frombuffer(buffer, dtype=p.dtype, count=p.numel(), offset=start)
            views.append(shaped_like(flat, p).detach())  # which keeps the storage and not `flat`
    return views


def first_lacking(reducer: AnyReducer, params: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The first parameter, in the order of buckets, whose gradient has not come in this backward."""
    missing = set(reducer.missing())
    listed = [params[i] for b in range(reducer.num_buckets()) for i in reducer.bucket_params(b) if i in missing]
    return next((p for p in listed if p.grad is None), listed[0] if listed else None)


_storage_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_tensor_uses: Callable[[torch.Tensor], int] | None = getattr(torch.Tensor, "_use_count", None)
"""Who has a tensor beside Python. Private; without the former, a view of a gradient or an array is not noticed."""


def copy_in(view: torch.Tensor, grad: torch.Tensor) -> None:
    """Copy a gradient into its place in a bucket; it may be let go of at once."""
    view.copy_(grad)
    if has_streams(grad):  # it may be another stream's, which would use its memory again before it is read
        grad.record_stream(torch.cuda.current_stream(grad.device))


class Views:
    """The gradients of a GradientSync's parameters, each a tensor over the memory in which it is reduced.

    Before that is written to again, those that the program still has are left to it: they keep their values. One whose
    .data the program has set lies elsewhere, and is replaced.
    """

    def __init__(self, scheduled: bool, name_of: Callable[[torch.Tensor], str]) -> None:
        """scheduled: as Layout tells."""
        self.tensors: list[torch.Tensor] = []
        """By the Reducer's numbers. Always the same list: the hooks have it, and nobody else keeps what is in it."""
        self.residuals = Residuals(scheduled)
        self.left = False
        """leave_kept() was called in this round."""
        self._name_of = name_of
        self._made: list[torch.Tensor] = []  # where and what each was when it was made
        self._addresses: list[int] = []
        self._storages: list[int] = []
        self._usual_uses: list[int] = []

    def make(self, reducer: AnyReducer, params: Sequence[torch.Tensor]) -> None:
        """Gradients that lay in former buckets move along, and what their compression has lost."""
        before = {id(view) for view in self.tensors}
        for p, view in zip(params, views := views_of(reducer, params, range(len(params))), strict=True):
            if p.grad is not None and id(p.grad) in before:
                p.grad = view.copy_(p.grad)
        self.tensors[:] = views
        self._made[:] = views
        self._addresses[:] = self._storages[:] = self._usual_uses[:] = [0] * len(views)
        for i in range(len(views)):
            self._note_uses(i)
        self.residuals.move(reducer, params)

    def fill(self, i: int, gradient: torch.Tensor, reducer: AnyReducer | None) -> None:
        """With a gradient that is elsewhere, as it is; a Reducer that is told so by mark_ready() may begin with it."""
        if not (isinstance(reducer, power_sgd.PowerSGDReducer) and reducer.take(i, gradient)):
            copy_in(self.tensors[i], gradient)

    def _note_uses(self, i: int) -> None:
        self._made[i] = self.tensors[i].detach()
        self._addresses[i] = self.tensors[i].data_ptr()
        self._storages[i] = self.tensors[i].untyped_storage()._cdata
        self._usual_uses[i] = 0 if _storage_uses is None else _storage_uses(self._storages[i])

    def leave_kept(self, reducer: AnyReducer, params: list[torch.Tensor]) -> None:
        """Before anything is written in a round. What is a .grad now is not left: torch, too, adds to it in place."""
        if self.left:
            return
        self.left = True
        reducer.settle()
        kept = _C.kept_gradients(
            self.tensors, params, self._addresses, self._storages, self._usual_uses, _tensor_uses, _storage_uses
        )
        if not kept:
            return
        for i in kept:
            made, now = self._made[i], self.tensors[i]
            if (made.dtype, made.shape, made.device) != (now.dtype, now.shape, now.device):
                raise gradient_errors.converted(self._name_of(params[i]), made, now)
        moved = reducer.move(kept)
        for i, view in zip(moved, views_of(reducer, self._made, moved), strict=True):
            p = params[i]
            if p.grad is self.tensors[i]:
                p.grad = view.copy_(p.grad)
            self.tensors[i] = view
            self._note_uses(i)
