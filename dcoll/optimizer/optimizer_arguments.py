"""The arguments of DistributedOptimizer: what is allowed, and what it means."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dcoll import _C
from dcoll.errors import ArgumentError

Groups = Callable[[Sequence[torch.Tensor]], list[int]]


def find_duplicates(names: Iterable[Any]) -> set[Any]:
    """Those that are there more than once."""
    return {name for name, count in Counter(names).items() if count > 1}


class Names:
    """What to call a parameter in messages."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
    ) -> None:
        pairs = [] if named_parameters is None else list(named_parameters)
        if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
            raise ArgumentError("named_parameters should be pairs of name and parameter: model.named_parameters()")
        pairs = [(str(name), p) for name, p in pairs]  # enumerate(model.parameters()) will do
        duplicates = sorted(find_duplicates(name for name, _ in pairs))
        if duplicates:
            raise ArgumentError(
                f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
            )
        self._optimizer = optimizer  # whose list of groups load_state_dict() replaces
        self._given = {id(p): name for name, p in reversed(pairs)}  # of several names the first
        self._keep_alive = [p for _, p in pairs]  # an id is only a name while its object lives
        if named_parameters is None:
            for g, group in enumerate(optimizer.param_groups):
                self._given.update((id(p), f"param.{g}.{i}") for i, p in enumerate(group["params"]))
            return
        unnamed = [
            f"group {g} parameter {i} {list(p.shape)}"
            for g, group in enumerate(optimizer.param_groups)
            for i, p in enumerate(group["params"])
            if id(p) not in self._given
        ]
        if unnamed:
            raise ArgumentError(
                "named_parameters was specified, but one or more model parameters were not named: "
                f"{'; '.join(unnamed)}. Pass the names of all parameters of the optimizer, or none."
            )

    def __call__(self, param: torch.Tensor) -> str:
        given = self._given.get(id(param))
        if given is not None:
            return given
        for g, group in enumerate(self._optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if p is param:
                    return f"param.{g}.{i}"
        return f"param {list(param.shape)}"


def check_passes(passes: int) -> None:
    if passes < 1:
        raise ArgumentError(f"backward_passes_per_step is {passes}, but must be at least 1")


def groups_of(optimizer: torch.optim.Optimizer, num_groups: int, groups: Any) -> Groups | None:
    """The rule by which parameters are put into groups; None: by size."""
    if num_groups:
        warnings.warn("num_groups= is deprecated: pass groups=", DeprecationWarning, stacklevel=3)
        if groups is None:
            groups = num_groups
    if groups is None or (isinstance(groups, int) and groups == 0):
        return None
    if isinstance(groups, int) and groups > 0:
        return lambda params: _evenly(len(params), groups)
    if not isinstance(groups, list | tuple) or any(not isinstance(group, list | tuple) for group in groups):
        raise ArgumentError(
            f"groups is {groups!r}, but must be a non-negative number of groups or a list of lists of parameters"
        )
    listed = [p for group in groups for p in group]
    if any(not isinstance(p, torch.Tensor) for p in listed):
        raise ArgumentError("groups must consist of torch.Tensor, but has something else in a list")
    if find_duplicates(map(id, listed)):
        raise ArgumentError("a parameter can only appear once in groups, but one is there several times")
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(id(p) not in own for p in listed):
        raise ArgumentError("groups has a parameter that is not one of the optimizer's")
    group_of = {id(p): g for g, group in enumerate(groups) for p in group}
    keep_alive = listed

    def rule(params: Sequence[torch.Tensor]) -> list[int]:
        return [group_of.get(id(p), len(groups) + i) for i, p in enumerate(params)] if keep_alive else []

    return rule


def _evenly(count: int, groups: int) -> list[int]:
    """count // groups consecutive ones in each, and one more in the first count % groups."""
    each, more = divmod(count, groups)
    return [g for g in range(groups) for _ in range(each + (g < more))]


def bucket_settings(comm: _C.Communicator, on_gpus: bool) -> tuple[float, float]:
    """DCOLL_BUCKET_MB and DCOLL_FIRST_BUCKET_MB."""
    now = {name: float(value) for name, _, _, _, value in _C.settings() if name.endswith("BUCKET_MB")}
    bucket_mb = now["DCOLL_BUCKET_MB"]
    if bucket_mb < 0:
        # Small buckets are under way soon after backward begins, and little is left to do when it ends. Inside a node a
        # collective costs microseconds. Between nodes each of them sends a quarter of a MiB at a time, which is as fast
        # as more (docs/performance.md). NCCL over networks was never measured: 25 is what PyTorch's DDP has.
        between = 25.0 if on_gpus else min(max(4.0, comm.num_nodes / 4), 25.0)
        bucket_mb = 4.0 if comm.num_nodes == 1 else between
    return bucket_mb, now["DCOLL_FIRST_BUCKET_MB"]
