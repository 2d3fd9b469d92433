"""What compressing an optimizer's gradients has lost so far, and is to give later: kept by parameter, saved with it."""

import math
import secrets
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dcoll import _C

KEY = "dcoll_residuals"
"""Of an optimizer's state_dict(), where something is kept."""

_SHARED = ("q",)
"""What is kept alike on all ranks: the directions of PowerSGD."""

_PROCESS = secrets.token_hex(8)


class Residuals:
    """Moves them from a Reducer to the one that takes its place, and in and out of state dicts.

    So it does with the number of rounds, where the compression has a schedule.
    """

    def __init__(self, scheduled: bool) -> None:
        _all.add(self)
        self._scheduled = scheduled
        self._reducer: Any = None  # with rounds(), set_rounds(), kept() and keep()
        self._params: list[torch.Tensor] = []

    def move(self, reducer: Any, params: Sequence[torch.Tensor]) -> None:
        """`params` are in `reducer` from now on. New ones have lost nothing."""
        if reducer is self._reducer:
            return  # which has built its buckets anew, and kept them itself
        kept = self._kept()
        if self._reducer is not None:
            reducer.set_rounds(self._reducer.rounds())
        self._reducer, self._params = reducer, list(params)
        self._keep(kept)

    def _kept(self) -> dict[int, dict[str, Any]]:
        """By the parameter's id. The core has it flat, as the gradient lies in memory; here it has its shape."""
        if self._reducer is None:
            return {}
        found = {id(p): kept for i, p in enumerate(self._params) if (kept := self._reducer.kept(i))}
        if not self._in_core():
            return found
        params = {id(p): p for p in self._params}
        return {
            key: {name: shaped_like(torch.as_tensor(values), params[key]) for name, values in kept.items()}
            for key, kept in found.items()
        }

    def _keep(self, kept: dict[int, dict[str, Any]]) -> None:
        in_core = self._in_core()
        for i, p in enumerate(self._params):
            if (values := kept.get(id(p))) is None:
                continue
            self._reducer.keep(i, {name: _flat(one, p) for name, one in values.items()} if in_core else values)

    def _in_core(self) -> bool:
        return isinstance(_core_of(self._reducer), _C.Reducer)

    def save(self, state: dict[str, Any], groups: Iterable[dict[str, Any]], rank: int) -> None:
        """Add what this rank's compression has lost, and where its schedule is, to an optimizer's state_dict(); nothing
        where nothing is kept.
        """
        kept = self._kept()
        numbers = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
        lost = {
            numbers[key]: {name: torch.as_tensor(values) for name, values in one.items()} for key, one in kept.items()
        }
        rounds = self._reducer.rounds() if self._scheduled else 0
        if lost or rounds:
            state[KEY] = {"rank": rank, "process": _PROCESS, "lost": lost, "rounds": rounds}

    def load(self, state: dict[str, Any], groups: Iterable[dict[str, Any]], rank: int) -> None:
        """What save() added on this rank, or in this process. Of another rank's, what is the same on all.

        What is missing begins anew, the schedule too: the parameters go back as well. Of shared(): of what is not the
        same on all this rank keeps its own.
        """
        saved = state.get(KEY, {"rank": rank, "lost": {}})
        self._reducer.set_rounds(saved.get("rounds", 0))
        own = saved["rank"] == rank or saved.get("process") == _PROCESS
        lost = saved["lost"] if own else shared(state)[KEY]["lost"]
        kept = self._kept()
        for i, p in enumerate(p for group in groups for p in group["params"]):
            before = {name: values for name, values in kept.get(id(p), {}).items() if name not in _SHARED}
            if saved["rank"] is not None:
                before = {name: torch.zeros_like(values) for name, values in before.items()}
            kept[id(p)] = before | lost.get(i, {})
        self._keep(kept)

    def norms(self) -> dict[str, float]:
        """Of each bucket that keeps anything."""
        core = _core_of(self._reducer)
        if not isinstance(core, _C.Reducer):
            return {} if core is None else core.norms()
        found = {}
        for bucket in range(core.num_buckets()):
            kept = [core.kept(i).get("error") for i in core.bucket_params(bucket)]
            if all(error is not None for error in kept):
                norms = [float(torch.as_tensor(error).norm()) for error in kept]
                found[core.bucket_name(bucket)] = math.hypot(*norms)
        return found


def _core_of(reducer: Any) -> Any:
    """What keeps what is lost: of a HostReducer the core's."""
    return getattr(reducer, "core", reducer)


def shaped_like(flat: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """The flat tensor with the parameter's shape, and its strides (channels_last) if they fit its memory."""
    probe = torch.empty_like(p, device="meta")  # keeps the strides of a dense tensor, and only of one
    return flat.as_strided(p.shape, p.stride()) if probe.stride() == p.stride() else flat.view(p.shape)


def _flat(values: Any, p: torch.Tensor) -> torch.Tensor:
    """In the CPU's memory, as the core's Reducer has it: in the order in which the parameter's gradient lies there.

    What has no more than one dimension is in that order: checkpoints once had it so.
    """
    given = torch.as_tensor(values).detach().to("cpu", torch.float32)
    if given.dim() < 2 or given.numel() != p.numel():
        return given
    flat = torch.empty(p.numel(), device="cpu")
    shaped_like(flat, p).copy_(given.reshape(p.shape))
    return flat


_all: weakref.WeakSet[Residuals] = weakref.WeakSet()


def norms() -> dict[str, float]:
    """By the buckets of all optimizers: how much is kept for later."""
    return {name: norm for one in list(_all) for name, norm in one.norms().items()}


def shared(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state_dict() without what is its rank's alone."""
    all_lost = state[KEY]["lost"] if KEY in state else {}
    lost = {i: {name: one[name] for name in _SHARED if name in one} for i, one in all_lost.items()}
    rounds = state.get(KEY, {}).get("rounds", 0)
    return state | {KEY: {"rank": None, "process": "", "lost": lost, "rounds": rounds}}
