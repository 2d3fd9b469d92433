"""`torch.distributed` learns the name "dcoll"."""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dcoll.errors import ArgumentError
from dcoll.torch import start
from dcoll.torch.compiler import left_alone
from dcoll.torch.process_group import (
    BACKENDS_IN_PYTHON,
    DEVICE_TYPES,
    GIVE_WORK,
    NAME,
    DcollBackend,
    DcollProcessGroup,
    TorchBackend,
    gathered_to_one,
    given_back,
    opened,
    split_by_members,
)
from dcoll.torch.work import Done, Work


def create(made: Any, options: Any = None) -> Any:
    """What init_process_group() and new_group() call."""
    if not isinstance(options, (type(None), TorchBackend.Options)):  # of several backends all get those of one
        raise ArgumentError(
            f"init_process_group or new_group got pg_options={options!r}, but the dcoll backend has none: leave it out"
        )
    if not BACKENDS_IN_PYTHON:
        return DcollProcessGroup(made)
    backend = DcollBackend(made.group_rank, made.group_size)
    opened(backend, made)
    return backend


def not_wrapped(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """What TORCH_DISTRIBUTED_DEBUG=DETAIL does to backends, but not to ours.

    PyTorch's wrapper calls methods in C++ that a backend written in Python cannot have: every collective fails then.
    The core compares the ranks' calls in any case.
    """

    @functools.wraps(wrap)
    def wrapper(wrapped_pg: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapped_pg if isinstance(wrapped_pg, DcollBackend) else wrap(wrapped_pg, *args, **kwargs)

    return wrapper


def monitored(call: Callable[..., None]) -> Callable[..., None]:
    """torch.distributed.monitored_barrier() of a version that knows Gloo's alone."""

    @functools.wraps(call)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        own = dist.group.WORLD if group is None else group
        if not isinstance(own, DcollProcessGroup):
            return call(group, timeout, wait_all_ranks)
        limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        own.monitored_barrier(limit, wait_all_ranks)

    return monitored_barrier


def replace(place: Any, name: str, change: Callable[..., Any]) -> None:
    if hasattr(place, name):
        setattr(place, name, change(getattr(place, name)))


def register() -> None:
    """The entry point: torch calls it where somebody names the backend before importing dcoll.torch."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=list(DEVICE_TYPES))
        start.install()
        if BACKENDS_IN_PYTHON:
            replace(distributed_c10d, "_create_process_group_wrapper", not_wrapped)
            for name in ("gather_single", "gather_into_tensor"):
                replace(dist.ProcessGroup, name, gathered_to_one)
            for name in (*GIVE_WORK, "_end_coalescing"):
                replace(dist.ProcessGroup, name, given_back)
            replace(dist.ProcessGroup, "split_group", split_by_members)
        else:
            for place in (dist, distributed_c10d):
                replace(place, "monitored_barrier", monitored)
        left_alone(DcollBackend, DcollProcessGroup, Work, Done)
