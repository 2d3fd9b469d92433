"""Sparse gradients (torch.nn.Embedding(sparse=True)): which parameters have them, and their sums."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from dcoll import _C
from dcoll.collectives import on_communicator, sparse_exchange
from dcoll.collectives.sparse_exchange import Rows
from dcoll.errors import ArgumentError
from dcoll.gradient_errors import of_another_kind, sparse_and_dense, summed_twice
from dcoll.ops import Average, Max, ReduceOp, Sum, wrong_op

NameOf: TypeAlias = Callable[[torch.Tensor], str]


def agree_on_kinds(
    comm: _C.Communicator, params: Sequence[torch.Tensor], name_of: NameOf, sparse_as_dense: bool = False
) -> list[tuple[int, int]]:
    """Of every parameter's gradient whether it is dense on any rank, and its number of sparse dimensions on any. An
    error on all ranks where it is both.
    """
    grads = [p.grad for p in params]
    kinds = [
        (0, 0) if g is None else (0, g.sparse_dim()) if g.is_sparse and not sparse_as_dense else (1, 0) for g in grads
    ]
    found = torch.tensor(kinds, dtype=torch.int32, device="cpu")
    on_communicator.allreduce_sync(comm, found, Max, "new gradients", in_place=True)
    agreed = [(dense, dim) for dense, dim in found.tolist()]
    for p, (dense, dim) in zip(params, agreed, strict=True):
        if dense and dim:
            raise sparse_and_dense(name_of(p))
    return agreed


class _Way:
    """How the rows of a parameter travel. Rank 0 chooses for the next step by what this one had, and tells the others
    with the numbers that they exchange anyway; so the ranks need not have learnt the same of their links.
    """

    def __init__(self, universe: int, line_bytes: int) -> None:
        self.universe = universe
        self._line_bytes = line_bytes
        self._seen = (-1, -1)
        self.proposed = sparse_exchange.GATHER

    def note(self, comm: _C.Communicator, sent: int, different: int) -> None:
        """So many rows were sent by all, so many different ones."""
        rounded = sent.bit_length(), different.bit_length()
        if comm.rank == 0 and comm.size > 1 and rounded != self._seen:
            self._seen = rounded
            self.proposed = sparse_exchange.fastest(comm, self.universe, self._line_bytes, sent, different)


class SparseGradients:
    """The parameters of an optimizer whose gradients are sparse."""

    def __init__(self) -> None:
        self.params: list[torch.Tensor] = []
        self._dims: list[int] = []
        self._ways: list[_Way] = []
        self._sums: list[torch.Tensor] = []

    def add(self, found: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Parameters with the number of sparse dimensions of their gradients."""
        self.params += [p for p, _ in found]
        self._dims += [dim for _, dim in found]
        self._ways += [_Way(p.shape[:dim].numel(), 8 + p.shape[dim:].numel() * p.itemsize) for p, dim in found]

    def find(self, comm: _C.Communicator, params: Sequence[torch.Tensor], name_of: NameOf) -> bool:
        """Take those that have a sparse gradient on any rank. False: there are none."""
        kinds = agree_on_kinds(comm, params, name_of)
        found = [(p, dim) for p, (_, dim) in zip(params, kinds, strict=True) if dim]
        self.add(found)
        return bool(found)

    def gather(
        self,
        comm: _C.Communicator,
        op: ReduceOp,
        name_of: NameOf,
        among: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Give each of them that any rank used its reduced gradient. among: only some, the others having theirs."""
        chosen = None if among is None else {id(p) for p in among}
        parts = zip(self.params, self._dims, self._ways, strict=True)
        some = [one for one in parts if chosen is None or id(one[0]) in chosen]
        if chosen is None:
            self._sums = []
        if not some:
            return
        mine = [Rows.of(p.grad, p, dim) for p, dim, _ in some]
        agreed = self._agree(comm, some, mine)
        exchanges, used = [], []
        for (p, dim, way), rows, (anywhere, sent, proposed, present) in zip(some, mine, agreed, strict=True):
            if not anywhere:
                continue
            if op is Average:
                rows.values = rows.values / comm.size
            # A rank that has joined owns nothing.
            how = proposed if present == comm.size else sparse_exchange.GATHER
            exchanges.append(sparse_exchange.start(how, comm, rows, way.universe, name_of(p)))
            used.append((p, dim, way, sent))
        for (p, dim, way, sent), rows in zip(used, sparse_exchange.together(exchanges), strict=True):
            p.grad = reduced = rows.tensor(p.shape, dim)
            way.note(comm, sent, len(rows.keys))
            if op is Sum:
                self._sums.append(reduced)

    @staticmethod
    def _agree(
        comm: _C.Communicator, some: Sequence[tuple[torch.Tensor, int, _Way]], mine: Sequence[Rows]
    ) -> list[list[int]]:
        """For each on how many ranks it has a gradient, their rows, the way they go, and how many ranks there are."""
        told = torch.tensor(
            [
                [p.grad is not None, len(rows.keys), way.proposed if comm.rank == 0 else 0, 1]
                for (p, _, way), rows in zip(some, mine, strict=True)
            ],
            device="cpu",
        )
        on_communicator.allreduce_sync(comm, told, Sum, "sparse gradients", in_place=True)
        agreed: list[list[int]] = told.tolist()
        return agreed

    def note(self, made: Sequence[torch.Tensor], op: ReduceOp) -> None:
        """Gradients that were reduced in another way."""
        if op is Sum:
            self._sums += made

    def is_sum(self, grad: torch.Tensor | None) -> bool:
        """Whether this is a sum over the ranks, perhaps with something added by a backward."""
        return any(grad is one for one in self._sums)

    def refuse_dense(self, comm: _C.Communicator, name_of: NameOf) -> None:
        """The other ranks know these as sparse."""
        for p in self.params:
            if p.grad is not None and not p.grad.is_sparse:
                raise of_another_kind(name_of(p), p.grad, comm)

    def refuse_sums(self, name_of: NameOf) -> None:
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
            here = [-1 if p.grad is None else self._here.get(id(p), 0) for p in unknown]
            dims = torch.tensor(here, device="cpu")
            on_communicator.allreduce_sync(comm, dims, Max, "sparse gradients", in_place=True)
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
    sparse_dim = tensor.sparse_dim()
    rows = Rows.of(tensor.detach(), tensor, sparse_dim)
    if op is Average:
        rows.values = rows.values / comm.size
    shape = "x".join(str(length) for length in tensor.shape)
    of = f"{op.name.lower()} of {str(tensor.dtype).removeprefix('torch.')} {shape}, sparse in {sparse_dim}"
    handle = on_communicator.allgather(comm, rows.packed(), f"{name}.rows", of)

    def finish() -> torch.Tensor:
        found = rows.unpack(handle.wait()).added_up(tensor.shape[:sparse_dim].numel())
        return found.tensor(tensor.shape, sparse_dim)

    return finish
