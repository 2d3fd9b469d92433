"""Whose parameters are whose: a gradient is reduced by one GradientSync, of which several optimizers may make use."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from dcoll.collectives.tensors import code_of
from dcoll.errors import ArgumentError
from dcoll.optimizer.backward import stop_watching

if TYPE_CHECKING:
    from dcoll.optimizer.gradients import GradientSync

_OF_ANOTHER = (
    "already belongs to another DistributedOptimizer, which also has other parameters: make both with the same options "
    "and process set, or give them separate parameters, or delete that one first"
)

_owners = WeakIdKeyDictionary()  # parameter -> weakref.ref of its owner, a GradientSync
_heirs: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # owner -> who replaced it
_users: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # owner -> how many optimizers
_options: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()  # owner -> the optimizer's it is of


def _owner_of(p: torch.Tensor) -> Any:
    reference = _owners.get(p)  # type: ignore[no-untyped-call]
    return None if reference is None else reference()


def is_nobodys(p: torch.Tensor) -> bool:
    """Whether nobody reduces its gradients."""
    return _owner_of(p) is None


def now_of(owner: Any) -> Any:
    """Who reduces its gradients now: itself, unless another one has taken them over."""
    while (heir := _heirs.get(owner)) is not None:
        owner = heir
    return owner


def _keepers(params: Sequence[torch.Tensor]) -> list[Any]:
    mine = {id(p) for p in params}
    found = {id(owner): owner for owner in map(_owner_of, params) if owner is not None}
    return [one for one in found.values() if any(id(p) not in mine for p in (*one.params, *one.sparse.params))]


def shared_with(
    params: Sequence[torch.Tensor], options: Sequence[Any], name_of: Callable[[torch.Tensor], str]
) -> tuple[list[Any], list[torch.Tensor]]:
    """The owners of some of the parameters that have others as well, and the parameters that they do not have."""
    found = _keepers(params)
    if found:
        gc.collect()  # what nobody has any more is gone on every rank
        found = _keepers(params)
    for owner in found:
        if _options.get(owner) != list(options):
            name = name_of(next(p for p in params if _owner_of(p) is owner))
            raise ArgumentError(f"parameter {name} {_OF_ANOTHER}")
    return found, [p for p in params if all(_owner_of(p) is not owner for owner in found)]


def use(owner: Any, others: Sequence[Any], options: Sequence[Any]) -> None:
    """An optimizer begins to: its own, with such options, and those that keep some of its parameters."""
    _options[owner] = list(options)
    for one in (owner, *others):
        _users[one] = _users.get(one, 0) + 1


def leave(owners: Sequence[Any]) -> None:
    """An optimizer ends. The gradients that were reduced for it alone are no longer reduced."""
    for owner in map(now_of, owners):
        _users[owner] -= 1
        if not _users[owner]:
            owner.release()


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


def take_over(owner: "GradientSync", params: Sequence[torch.Tensor]) -> None:
    """Two hooks on a parameter would reduce its gradient twice: a new owner must replace the old one altogether."""
    mine = {id(p) for p in params}
    for p in params:
        before: GradientSync | None = _owner_of(p)
        if before is None or before is owner:
            continue
        if any(id(q) not in mine for q in [*before.params, *before.sparse.params]):
            raise ArgumentError(f"parameter {owner.name_of(p)} {_OF_ANOTHER}")
        before.release()
        stop_watching(before)
        _heirs[before] = owner
        _users[owner] = _users.get(owner, 0) + _users.pop(before, 0)
    for p in params:
        _owners[p] = weakref.ref(owner)
