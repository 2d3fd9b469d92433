"""`torch.distributed` learns the name "dcoll"."""

import functools
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from dcoll.errors import ArgumentError
from dcoll.torch import start
from dcoll.torch.compiler import alone, left_alone
from dcoll.torch.process_group import (
    BACKENDS_IN_PYTHON,
    DEVICE_TYPES,
    GIVE_WORK,
    NAME,
    Collectives,
    DcollBackend,
    DcollProcessGroup,
    TorchBackend,
    gathered_to_one,
    given_back,
    opened,
    split_by_members,
)
from dcoll.torch.sharded import settle_devices
from dcoll.torch.work import Done, Work


def create(made: Any, options: Any = None) -> Any:
    """What init_process_group() and new_group() call."""
    if not isinstance(options, (type(None), TorchBackend.Options)):  # of several backends all get those of one
        raise ArgumentError(
            f"init_process_group or new_group got pg_options={options!r}, but the dcoll backend has none: leave it out"
        )
    if getattr(made, "enable_reconfigure", False):  # of 2.15
        raise ArgumentError(
            "init_process_group got enable_reconfigure=True, but the dcoll backend cannot exchange the ranks of a "
            "group: leave it out. For ranks that come and go there are dcoll.elastic and torchrun --max-restarts"
        )
    if not BACKENDS_IN_PYTHON:
        return DcollProcessGroup(made)
    record_if_asked()
    backend = DcollBackend(made.group_rank, made.group_size)
    opened(backend, made)
    return backend


def record_if_asked() -> None:
    """The flight recorder of PyTorch 2.15: a record takes longer than a small call, so it has dcoll's calls only where
    the environment says how many it keeps. It passes over the backends that this set names."""
    passed_over: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    asked = any(os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"))
    (passed_over.discard if asked else passed_over.add)(NAME)


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


def keeping_work(call: Callable[..., None]) -> Callable[..., None]:
    """What DDP's join() hands to its reducer in C++, which waits for it in backward() but keeps no object of Python's
    alive: of one that is gone it would call torch's own wait(), which never ends."""
    kept: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @functools.wraps(call)
    def method(self: Any, work: Any, *args: Any, **kwargs: Any) -> None:
        kept[self] = work
        call(self, work, *args, **kwargs)

    return method


def halves_by_python(register_hook: Callable[..., None]) -> Callable[..., None]:
    """DDP's _register_builtin_comm_hook(): its hook of float16 in C++ takes a future's value to be C++'s list of
    tensors, which it is not where Python has made the future."""

    @functools.wraps(register_hook)
    def method(self: Any, comm_hook_type: Any) -> None:
        own = isinstance(self.process_group._get_backend(self.device), Collectives)
        if own and comm_hook_type == torch._C._distributed_c10d.BuiltinCommHookType.FP16_COMPRESS:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            self.register_comm_hook(self.process_group, fp16_compress_hook)
        else:
            register_hook(self, comm_hook_type)

    return method


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
                replace(dist.ProcessGroup, name, lambda call: alone(given_back(call)))
            replace(dist.ProcessGroup, "split_group", split_by_members)
        else:
            for place in (dist, distributed_c10d):
                replace(place, "monitored_barrier", monitored)
        replace(torch._C._distributed_c10d.Reducer, "_set_forward_pass_work_handle", keeping_work)
        replace(DistributedDataParallel, "_register_builtin_comm_hook", halves_by_python)
        settle_devices(NAME)
        left_alone(DcollBackend, DcollProcessGroup, Work, Done)
