"""Tensors as the memory that the core reads and writes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from dcoll.errors import ArgumentError

Finish = Callable[[Any], object] | None
"""What is left to do once the core is done; it gets the core's handle, or what its synchronous call returned."""


def dense(what: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its elements lie one behind the other in memory, else such a copy."""
    if tensor.layout is not torch.strided:
        raise ArgumentError(
            f"{what} got a tensor with layout {tensor.layout}, but takes dense ones: pass tensor.to_dense()"
        )
    if not (tensor.is_cpu or tensor.is_cuda):
        raise ArgumentError(
            f"{what} got a tensor on {tensor.device}, but the dcoll backend is for tensors of the CPU and of CUDA: "
            f'initialise with "cpu:dcoll,{tensor.device.type}:..." (PyTorch 2.14 or later), or pass tensor.cpu()'
        )
    if tensor.data_ptr() == 0 and tensor.numel() > 0:
        return dense(what, _wrapped(what, tensor))
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return tensor.detach().contiguous().resolve_neg().resolve_conj()


def _wrapped(what: str, tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor without memory of its own stands for, as functional collectives return it. From PyTorch 2.14 on
    its dispatcher has done so before."""
    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor.wait()
    raise ArgumentError(
        f"{what} got a {type(tensor).__name__}, which has no memory of its own: pass what it stands for, as "
        "DTensor.to_local() gives"
    )


def in_sequence(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors lie one behind the other, as the chunks of one do."""
    place = tensors[0].data_ptr()
    if place == 0:
        return False
    for tensor in tensors:
        if tensor.data_ptr() != place or not (tensor.is_contiguous() and tensor.layout is torch.strided):
            return False
        if tensor.is_neg() or tensor.is_conj():  # its memory has other values
            return False
        place += tensor.nbytes
    # Parts of one block of memory, so that whoever keeps the first keeps them all.
    storage = tensors[0].untyped_storage().data_ptr()
    return all(tensor.untyped_storage().data_ptr() == storage for tensor in tensors)


def one_behind_the_other(what: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors' elements in one piece of memory, copied only if they have to be."""
    if in_sequence(tensors):
        return tensors[0]
    return torch.cat([dense(what, tensor).reshape(-1) for tensor in tensors])


def spread(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Give the tensors, one after the other, what is in `flat`."""
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        if tensor.numel():
            tensor.detach().copy_(part.view(tensor.shape))


def copy_back(tensor: torch.Tensor, target: torch.Tensor) -> Finish:
    """How what the core writes into `target`, which is what dense() made of the tensor, comes into the tensor."""
    return None if target is tensor else lambda _: tensor.detach().copy_(target)


def room_for(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Finish]:
    """Where the core writes what belongs into the tensors, and how it comes there."""
    if in_sequence(tensors):
        return tensors[0], None
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    return flat, lambda _: spread(flat, tensors)


def one(what: str, tensors: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """The tensor of a list of one: torch passes those since it had several GPUs per process."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ArgumentError(f"{what} takes one tensor per rank, but got a list of {len(tensors)}")
    return tensors[0]


def one_per_rank(what: str, tensors: Any) -> list[torch.Tensor]:
    """Such a list, which torch passes in a list of one, for the same reason."""
    nested = len(tensors) > 0 and isinstance(tensors[0], (list, tuple))
    return list(one(what, tensors) if nested else tensors)


def same_kind(what: str, first: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
    for other in others:
        if other.get_device() != first.get_device():
            raise ArgumentError(f"{what} takes tensors on one device, but got {first.device} and {other.device}")
        if other.dtype != first.dtype:
            raise ArgumentError(f"{what} takes tensors of one dtype, but got {first.dtype} and {other.dtype}")
