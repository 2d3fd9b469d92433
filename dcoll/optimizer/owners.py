"""Whose parameters are whose: a gradient is reduced by one GradientSync."""

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from dcoll.collectives.sparse import SparseGradients
from dcoll.collectives.tensors import code_of
from dcoll.errors import ArgumentError
from dcoll.optimizer.backward import stop_watching


class Owner(Protocol):
    """A GradientSync."""

    params: list[torch.Tensor]
    sparse: SparseGradients
    name_of: Callable[[torch.Tensor], str]

    def release(self) -> None: ...


_owners = WeakIdKeyDictionary()  # parameter -> weakref.ref of its Owner


def check(p: torch.Tensor, name_of: Callable[[torch.Tensor], str]) -> None:
    """Raise unless its gradient can be reduced."""
    if p.device.type not in ("cpu", "cuda"):
        raise ArgumentError(
            f"parameter {name_of(p)} is on device {p.device}, but DistributedOptimizer works on parameters of the CPU "
            "and of CUDA: move the model with .cpu() before making the optimizer"
        )
    try:
        code_of(p.dtype)
    except ArgumentError as error:
        raise ArgumentError(f"parameter {name_of(p)}: {error}") from None


def take_over(owner: Owner, params: Sequence[torch.Tensor]) -> None:
    """Two hooks on a parameter would reduce its gradient twice: a new owner must replace the old one altogether."""
    mine = {id(p) for p in params}
    for p in params:
        reference = _owners.get(p)  # type: ignore[no-untyped-call]
        before: Owner | None = reference() if reference is not None else None
        if before is None or before is owner:
            continue
        if any(id(q) not in mine for q in [*before.params, *before.sparse.params]):
            raise ArgumentError(
                f"parameter {owner.name_of(p)} already belongs to another DistributedOptimizer, which also has other "
                "parameters: give both optimizers separate parameters, or wrap one optimizer with parameter groups"
            )
        before.release()
        stop_watching(before)
    for p in params:
        _owners[p] = weakref.ref(owner)
