"""Sparse gradients (torch.nn.Embedding(sparse=True)): summed by gathering every rank's indices and values.

A sum of sparse tensors in COO form is their entries one after the other, so nothing is reduced on the wire.
"""

import torch

from dcoll import _C, collective
from dcoll.ops import Average, Max, ReduceOp


def agree_on_sparse(comm: _C.Communicator, grads: list[torch.Tensor | None]) -> list[int]:
    """For every gradient its number of sparse dimensions on any rank, 0 where no rank has a sparse gradient."""
    dims = torch.tensor([g.sparse_dim() if g is not None and g.is_sparse else 0 for g in grads], dtype=torch.int32)
    collective.allreduce_sync_(comm, dims, Max, "sparse gradients", 1.0, 1.0)
    found: list[int] = dims.tolist()
    return found


def allreduce_sparse(
    comm: _C.Communicator, param: torch.Tensor, sparse_dim: int, op: ReduceOp, name: str
) -> torch.Tensor:
    """The reduced gradient of `param`, whose .grad here is sparse or None."""
    grad = param.grad
    if grad is None:
        indices = torch.empty(0, sparse_dim, dtype=torch.int64)
        values = torch.empty(0, *param.shape[sparse_dim:], dtype=param.dtype)
    else:
        grad = grad.coalesce()  # fewer entries to send
        indices, values = grad.indices().t(), grad.values()
    if op is Average:
        values = values / comm.size
    handles = [collective.allgather(comm, part, name) for part in (indices, values)]
    all_indices, all_values = (handle.wait() for handle in handles)
    return torch.sparse_coo_tensor(all_indices.t(), all_values, param.shape, check_invariants=False).coalesce()
