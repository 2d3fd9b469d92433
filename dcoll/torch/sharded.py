"""FSDP1's sharded state on machines without GPUs: PyTorch asks CUDA for devices there, unless the backend is Gloo."""

import functools
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")


def is_of_cpus(group: Any, backend: str) -> bool:
    """Whether that backend has the whole group, and there is no GPU that it could mean."""
    return bool(dist.get_backend(group) == backend) and not torch.cuda.is_available()


def settle_devices(backend: str) -> None:
    """For groups of that backend: where a ShardedTensor is on a rank without a shard, and what collects its shards."""
    try:
        from torch.distributed._shard.sharded_tensor.api import _SHARDED_OPS, ShardedTensor
    except ImportError:  # a part of PyTorch that it would rather be rid of
        return

    of_device: Any = torch.Tensor.device.__get__
    device, preferred = _SHARDED_OPS[of_device], ShardedTensor._get_preferred_device

    @functools.wraps(device)
    def device_of(types: Any, args: Any = (), kwargs: Any = None, group: Any = None) -> Any:
        is_known = bool(args[0]._local_shards) or not is_of_cpus(group, backend)
        return device(types, args, kwargs, group) if is_known else CPU

    @functools.wraps(preferred)
    def preferred_device(self: Any) -> Any:
        return CPU if is_of_cpus(self._process_group, backend) else preferred(self)

    _SHARDED_OPS[of_device] = device_of
    ShardedTensor._get_preferred_device = preferred_device  # type: ignore[method-assign]
