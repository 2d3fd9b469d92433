"""Starting all ranks from the same model and optimizer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from dcoll import _C
from dcoll.collectives import on_communicator
from dcoll.compression import residuals
from dcoll.errors import ArgumentError
from dcoll.job import objects, world

_PACK_BYTES = 4 << 20
"""Tensors up to a quarter of this travel together, in packs of about this size; larger ones by themselves, in place."""

_TAKES = "broadcast_parameters takes model.state_dict(), named_parameters(), parameters() or a model"


def broadcast_parameters(
    params: torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str | None, Any]] | Iterable[torch.Tensor],
    root_rank: int,
) -> None:
    """Overwrite the parameters of all ranks with those of rank `root_rank`.

    params: model.state_dict(), model.named_parameters(), model.parameters(), or the model; several of a name are all
        sent. Entries that are not tensors are left alone.
    """
    comm = world.communicator()
    given = params.state_dict() if isinstance(params, torch.nn.Module) else params
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        raise ArgumentError(f"{_TAKES}, but got {given!r}")
    pairs = sorted(given.items()) if isinstance(given, Mapping) else [_named(i, one) for i, one in enumerate(given)]
    tensors = [(name, t) for name, t in pairs if isinstance(t, torch.Tensor)]
    if pairs and not tensors and given is params:
        raise ArgumentError(
            f"{_TAKES}, but got {len(pairs)} entries of which none is a tensor: pass an optimizer to "
            "broadcast_optimizer_state(), and any other object to broadcast_object()"
        )
    broadcast_tensors(comm, tensors, root_rank)


def _named(place: int, entry: Any) -> tuple[str, Any]:
    if isinstance(entry, torch.Tensor):
        return f"tensor {place}", entry
    if not isinstance(entry, tuple) or len(entry) != 2:
        raise ArgumentError(f"{_TAKES}, but got a {type(entry).__name__} in entry {place}")
    name, value = entry
    return f"tensor {place}" if name is None else name, value


def broadcast_tensors(comm: _C.Communicator, tensors: Sequence[tuple[str, torch.Tensor]], root: int) -> None:
    """Overwrite the tensors with the root's, small ones together. Names are for messages."""
    layout = [f"{name}: {t.dtype} {list(t.shape)} on {t.device.type}" for name, t in tensors]
    objects.agree(comm, layout, "broadcast_parameters", "Build the same model on every rank.")
    for name, t in tensors:
        if t.layout is not torch.strided or not (t.is_cpu or t.is_cuda):
            raise ArgumentError(
                f"broadcast_parameters: {name} is {t.layout} on {t.device}, but must be dense, on the CPU or CUDA"
            )
        if t.is_quantized:
            raise ArgumentError(
                f"broadcast_parameters: {name} is quantized ({t.dtype}), and its scale would stay each rank's own: "
                "send it by broadcast_object()"
            )
    if comm.size > 1:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for _, t in tensors:
            by_device.setdefault(t.device, []).append(t)
        pending = [_Pack(comm, pack, root) for some in by_device.values() for pack in _packs(some)]
        for one in pending:
            one.finish()


def _packs(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    small: list[torch.Tensor] = []
    for t in tensors:
        if t.nbytes > _PACK_BYTES // 4:
            yield [t]
            continue
        small.append(t)
        if sum(one.nbytes for one in small) >= _PACK_BYTES:
            yield small
            small = []
    if small:
        yield small


class _Pack:
    """Tensors that are broadcast together, as bytes, so that every dtype will do."""

    def __init__(self, comm: _C.Communicator, tensors: list[torch.Tensor], root: int) -> None:
        self._tensors = tensors
        self._is_root = comm.rank == root
        self._dense = [t.detach().contiguous() for t in tensors]  # the tensor's own memory where it is row-major
        raw = [t.reshape(-1).view(torch.uint8) for t in self._dense]
        self._raw = raw
        self._packed = raw[0] if len(raw) == 1 else torch.cat(raw)
        self._handle = on_communicator.broadcast(comm, self._packed, root, "broadcast_parameters", in_place=True)

    def finish(self) -> None:
        self._handle.wait()
        if self._is_root:
            return
        parts = torch.split(self._packed, [one.numel() for one in self._raw])
        for tensor, dense, raw, part in zip(self._tensors, self._dense, self._raw, parts, strict=True):
            if len(parts) > 1:
                raw.copy_(part)
            if dense.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(dense)


@dataclass(frozen=True)
class _TensorMeta:
    """Stands for a tensor in the pickled optimizer state; the values follow as tensors."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str  # its kind: of several GPUs each rank has its own


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Overwrite the optimizer state of all ranks, learning rates included, with that of rank `root_rank`.

    Works before the first step too: ranks without state get the root's.
    model: so that ranks whose optimizers differ are told so by parameter names.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError(
            "cannot broadcast torch.optim.LBFGS state: it depends on the history of the loss. Start it on all ranks "
            "from the same parameters instead"
        )
    comm = world.communicator()
    names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
    groups = [f"group {i}: {len(group['params'])} parameters" for i, group in enumerate(optimizer.param_groups)]
    for group in optimizer.param_groups:
        groups += [f"{names[id(p)]}: {p.dtype} {list(p.shape)}" for p in group["params"] if id(p) in names]
    objects.agree(comm, groups, "broadcast_optimizer_state", "Make the same optimizer on every rank.")
    if comm.size == 1:
        return
    state: Any = residuals.shared(optimizer.state_dict()) if comm.rank == root_rank else None
    skeleton = tree_map_only(torch.Tensor, lambda t: _TensorMeta(t.dtype, tuple(t.shape), t.device.type), state)
    skeleton = objects.broadcast_object(comm, skeleton, root_rank, "optimizer state")
    if comm.rank != root_rank:
        state = tree_map_only(_TensorMeta, lambda t: torch.empty(t.shape, dtype=t.dtype, device=t.device), skeleton)
    tensors = [t for t in tree_leaves(state) if isinstance(t, torch.Tensor)]
    broadcast_tensors(comm, [(f"optimizer state {i}", t) for i, t in enumerate(tensors)], root_rank)
    if comm.rank != root_rank:
        optimizer.load_state_dict(state)
