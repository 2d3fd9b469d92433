"""Sparse gradients (torch.nn.Embedding(sparse=True)): summed by gathering every rank's indices and values.

A sum of sparse tensors in COO form is their entries one after the other, so nothing is reduced on the wire.
"""

from collections.abc import Callable, Sequence

import torch

from dcoll import _C
from dcoll.collectives import on_communicator
from dcoll.errors import ArgumentError
from dcoll.gradient_errors import summed_twice
from dcoll.ops import Average, Max, ReduceOp, Sum, wrong_op


def agree_on_sparse(comm: _C.Communicator, grads: list[torch.Tensor | None]) -> list[int]:
    """For every gradient its number of sparse dimensions on any rank, 0 where no rank has a sparse gradient."""
    dims = torch.tensor([g.sparse_dim() if g is not None and g.is_sparse else 0 for g in grads], dtype=torch.int32)
    on_communicator.allreduce_sync_(comm, dims, Max, "sparse gradients", 1.0, 1.0)
    found: list[int] = dims.tolist()
    return found


def agree_on_kinds(
    comm: _C.Communicator, grads: Sequence[torch.Tensor | None], sparse_as_dense: bool
) -> list[tuple[int, int]]:
    """For every gradient whether it is dense on any rank, and its number of sparse dimensions on any."""
    kinds = [
        (0, 0) if g is None else (0, g.sparse_dim()) if g.is_sparse and not sparse_as_dense else (1, 0) for g in grads
    ]
    found = torch.tensor(kinds, dtype=torch.int32)
    on_communicator.allreduce_sync_(comm, found, Max, "new gradients", 1.0, 1.0)
    return [(dense, dim) for dense, dim in found.tolist()]


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
    handles = [on_communicator.allgather(comm, part, name) for part in (indices, values)]
    all_indices, all_values = (handle.wait() for handle in handles)
    return torch.sparse_coo_tensor(all_indices.t(), all_values, param.shape, check_invariants=False).coalesce()


class SparseGradients:
    """The parameters of an optimizer whose gradients are sparse."""

    def __init__(self) -> None:
        self.params: list[torch.Tensor] = []
        self._dims: list[int] = []
        self._sums: list[torch.Tensor] = []

    def add(self, found: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Parameters with the number of sparse dimensions of their gradients."""
        self.params += [p for p, _ in found]
        self._dims += [dim for _, dim in found]

    def find(self, comm: _C.Communicator, params: Sequence[torch.Tensor]) -> bool:
        """Take those that have a sparse gradient on any rank. False: there are none."""
        dims = agree_on_sparse(comm, [p.grad for p in params])
        found = [(p, dim) for p, dim in zip(params, dims, strict=True) if dim]
        self.add(found)
        return bool(found)

    def gather(
        self,
        comm: _C.Communicator,
        op: ReduceOp,
        name_of: Callable[[torch.Tensor], str],
        among: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Give each of them that any rank used its reduced gradient. among: only some, the others having theirs."""
        chosen = None if among is None else {id(p) for p in among}
        some = [(p, d) for p, d in zip(self.params, self._dims, strict=True) if chosen is None or id(p) in chosen]
        if chosen is None:
            self._sums = []
        if not some:
            return
        used = agree_on_sparse(comm, [p.grad for p, _ in some])
        for (p, dim), anywhere in zip(some, used, strict=True):
            if anywhere:
                p.grad = reduced = allreduce_sparse(comm, p, dim, op, name_of(p))
                if op is Sum:
                    self._sums.append(reduced)

    def note(self, made: Sequence[torch.Tensor], op: ReduceOp) -> None:
        """Gradients that were reduced in another way."""
        if op is Sum:
            self._sums += made

    def is_sum(self, grad: torch.Tensor | None) -> bool:
        """Whether this is a sum over the ranks, perhaps with something added by a backward."""
        return any(grad is one for one in self._sums)

    def refuse_sums(self, name_of: Callable[[torch.Tensor], str]) -> None:
        """Nothing may be summed that is a sum already."""
        for p in self.params:
            if self.is_sum(p.grad):
                raise summed_twice(name_of(p))


class SparseAsDense:
    """sparse_as_dense=True: gradients that are sparse for the program, and dense while they are reduced."""

    def __init__(self) -> None:
        self._here: dict[int, int] = {}  # by the parameter's id: sparse dimensions of what this rank's backward brought
        self._dims: dict[int, int] = {}  # ... of its gradient on any rank, 0 where it is dense on all

    def to_dense(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        if grad.is_sparse:
            self._here[id(p)] = grad.sparse_dim()
        return grad.to_dense()

    def restore(
        self, comm: _C.Communicator, params: Sequence[torch.Tensor], reduced: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return those that are sparse again. Collective until every parameter has had a gradient on any rank."""
        unknown = [p for p in params if id(p) not in self._dims]
        if unknown:
            dims = torch.tensor([-1 if p.grad is None else self._here.get(id(p), 0) for p in unknown])
            on_communicator.allreduce_sync_(comm, dims, Max, "sparse gradients", 1.0, 1.0)
            self._dims.update((id(p), dim) for p, dim in zip(unknown, dims.tolist(), strict=True) if dim >= 0)
        made = []
        for p, grad in zip(params, reduced, strict=True):
            dim = self._dims.get(id(p), 0)
            if dim and p.grad is grad:
                p.grad = grad.to_sparse(dim)
                made.append(p.grad)
        return made


def start_allreduce(
    comm: on_communicator.Lane, tensor: torch.Tensor, name: str, op: ReduceOp
) -> Callable[[], torch.Tensor]:
    """Start the sum or average of tensors in COO form; the result waits for it."""
    if op not in (Average, Sum) or type(op) is not ReduceOp:
        raise wrong_op(op, (Average, Sum))
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        raise ArgumentError("sparse_allreduce_async takes a torch tensor in COO form: pass tensor.to_sparse()")
    entries = tensor.detach().coalesce()  # fewer to send
    values = entries.values() / comm.size if op is Average else entries.values()
    indices = entries.indices().t().contiguous()
    handles = [
        on_communicator.allgather(comm, part, f"{name}.{what}")
        for part, what in ((indices, "indices"), (values, "values"))
    ]

    def finish() -> torch.Tensor:
        all_indices, all_values = (handle.wait() for handle in handles)
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=False).coalesce()

    return finish
