"""FSDP2 on CPUs: parameters are gathered while the program computes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dcoll.errors import ArgumentError


class _AllGather:
    """What FSDPModule.set_custom_all_gather() takes: one that FSDP2 waits for where it needs the parameters, and not
    where it begins. Its memory is the group's, as soon as the group is known."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._group is not None:
            backend = self._group._get_backend(device)
            if backend.supports_tensor_alloc(device):
                return backend.allocate_tensor(torch.Size(size).numel(), dtype=dtype, device=device)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._group = group
        asynchronous = async_op or output_tensor.is_cpu  # on GPUs it is behind a stream
        work: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=asynchronous)
        return work


def overlap_all_gathers(model: nn.Module) -> None:
    """Have FSDP2 gather the parameters of the next module while the present one computes, as it does on GPUs.

    On the CPU PyTorch waits for each gather of parameters where it begins it, so a model computes or communicates, and
    never both. After this call a gather is waited for where its parameters are needed: in backward, and, from the
    second forward on, in forward, in the order in which the modules of the first one ran. Reductions of gradients are
    waited for as before. The parameters of one more module are in memory meanwhile. It is for every backend of
    torch.distributed. It gains where there is time to hide: between nodes, where others carry the messages; inside a
    node the ranks themselves copy, and it changes little.

    Call it once, after fully_shard() and after set_allocate_memory_from_process_group_for_comm(), on every rank.

    Args:
        model: a module with modules that fully_shard() has made FSDP2's, or such a module itself.

    Raises:
        ArgumentError: no module of the model is FSDP2's.

    Example::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        dcoll.torch.overlap_all_gathers(model)
    """
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not shards:
        raise ArgumentError(
            f"overlap_all_gathers got a {type(model).__name__} without a module of FSDP2: call "
            "torch.distributed.fsdp.fully_shard on its blocks and on the model before"
        )
    ran: list[FSDPModule] = []

    def note(module: Any, _: Any) -> None:
        ran.append(module)

    def learned(*_: Any) -> None:
        for hook in hooks:
            hook.remove()
        for one, following in pairwise(dict.fromkeys(ran)):
            one.set_modules_to_forward_prefetch([following])

    hooks = [model.register_forward_hook(learned)]
    for module in shards:
        module.set_custom_all_gather(_AllGather())  # type: ignore[arg-type]  # no public base
        hooks.append(module.register_forward_pre_hook(note))
