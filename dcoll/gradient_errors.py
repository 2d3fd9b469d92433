"""What can be wrong with a gradient, in words."""

import torch

from dcoll import _C
from dcoll.errors import ArgumentError, DcollError


def ready_twice(name: str) -> DcollError:
    return DcollError(
        f"the gradient of parameter {name} became ready twice in one backward, after it may have been sent: with "
        "torch.utils.checkpoint pass use_reentrant=False"
    )


def summed_twice(name: str) -> DcollError:
    return DcollError(
        f"a second backward added to the gradient of parameter {name}, which is already the sum over all ranks and "
        "would be summed again: call step() or optimizer.zero_grad() in between (model.zero_grad(set_to_none=False) is "
        "not noticed), pass backward_passes_per_step=2 (the number of backwards per step), or use op=Average"
    )


def sparse_and_dense(name: str) -> DcollError:
    return DcollError(
        f"parameter {name} has a sparse gradient on one rank and a dense one on another: pass sparse_as_dense=True to "
        "DistributedOptimizer"
    )


def of_another_kind(name: str, grad: torch.Tensor, comm: _C.Communicator) -> DcollError:
    now, before = ("sparse", "dense") if grad.is_sparse else ("dense", "sparse")
    return DcollError(
        f"parameter {name} has a {now} gradient on rank {comm.job_ranks[comm.rank]}, but had a {before} one before: "
        "pass sparse_as_dense=True to DistributedOptimizer"
    )


def strange_layout(name: str, layout: torch.layout) -> ArgumentError:
    return ArgumentError(f"parameter {name} has a gradient with layout {layout}: pass sparse_as_dense=True")


def converted(name: str, before: torch.Tensor, now: torch.Tensor) -> DcollError:
    return DcollError(
        f"parameter {name} was {before.dtype} {list(before.shape)} on {before.device} when DistributedOptimizer was "
        f"made; its gradient is now {now.dtype} {list(now.shape)} on {now.device}: convert or move the model first, "
        "then make the optimizer"
    )
