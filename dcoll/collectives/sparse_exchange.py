"""How sparse gradients are summed: gathered, through owners of the rows, or as dense ones, as is predicted fastest.

gather: everybody's rows go to everybody, who adds them up. owners: the sparse reduce-scatter and all-gather of Ok-Topk
(Li and Hoefler, 2022): a row goes to its owner, who adds up and passes one sum on, so rows that many ranks have travel
once, not once for each. Rows are dealt to owners by a hash, so the load is even whichever rows are in use, and nothing
has to be agreed on. dense: all rows, zeros too, in one all-reduce, with a flag for each.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from dcoll import _C
from dcoll.collectives import on_communicator
from dcoll.collectives.handle import Handle
from dcoll.ops import Max, Sum

GATHER, OWNERS, DENSE = WAYS = range(3)
Steps: TypeAlias = Generator[Handle, Any, "Rows"]
"""What has to be waited for, one after the other; returns the sum."""

_KEY_BYTES = 8
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio (D. Knuth, TAOCP 3, section 6.4)


@dataclass
class Rows:
    """Rows of a tensor: their numbers, each once and ascending, and their values, (rows, values of a row)."""

    keys: torch.Tensor
    values: torch.Tensor

    @staticmethod
    def of(grad: torch.Tensor | None, param: torch.Tensor, sparse_dim: int) -> "Rows":
        width = param.shape[sparse_dim:].numel()
        if grad is None:
            return Rows(torch.empty(0, dtype=torch.int64, device=param.device), param.new_empty(0, width))
        grad = grad.coalesce()
        keys = torch.zeros(grad.indices().shape[1], dtype=torch.int64, device=grad.device)
        for numbers, length in zip(grad.indices(), param.shape[:sparse_dim], strict=True):
            keys = keys * length + numbers
        return Rows(keys, grad.values().reshape(len(keys), width))

    def tensor(self, shape: torch.Size, sparse_dim: int) -> torch.Tensor:
        indices, left = [], self.keys
        for length in reversed(shape[:sparse_dim]):
            indices.append(left % length)
            left = left // length
        values = self.values.view(len(self.keys), *shape[sparse_dim:])
        size = list(shape)
        return torch.sparse_coo_tensor(
            torch.stack(indices[::-1]), values, size, check_invariants=False, is_coalesced=True
        )

    def packed(self) -> torch.Tensor:
        """A line of bytes for each: its number and its values, so that both travel in one message."""
        keys = _fresh(self.keys).view(torch.uint8).view(len(self.keys), _KEY_BYTES)
        return torch.cat([keys, _fresh(self.values).view(torch.uint8)], 1) if self.values.shape[1] else keys

    def unpack(self, lines: torch.Tensor) -> "Rows":
        """Rows of this width and dtype."""
        keys = _fresh(lines[:, :_KEY_BYTES]).view(torch.int64).flatten()
        values = _fresh(lines[:, _KEY_BYTES:])
        width = self.values.shape[1]
        return Rows(keys, values.view(self.values.dtype) if width else self.values.new_empty(len(keys), 0))

    def added_up(self, universe: int) -> "Rows":
        """Each row once: the sum, in the order they are in."""
        size = (universe, self.values.shape[1])
        one = torch.sparse_coo_tensor(self.keys[None], self.values, size, check_invariants=False).coalesce()
        return Rows(one.indices()[0], one.values())


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """With the strides that view(dtype) wants; contiguous() leaves those of lengths 0 and 1 as they are."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def owners_of(keys: torch.Tensor, owners: int) -> torch.Tensor:
    return (keys * _SPREAD >> 33 & 0x7FFFFFFF) % owners


def gathered(comm: _C.Communicator, rows: Rows, universe: int, name: str) -> Steps:
    lines = yield on_communicator.allgather(comm, rows.packed(), name)
    return rows.unpack(lines).added_up(universe)


def by_owners(comm: _C.Communicator, rows: Rows, universe: int, name: str) -> Steps:
    owners = owners_of(rows.keys, comm.size)
    order = torch.argsort(owners, stable=True)
    splits = torch.bincount(owners, minlength=comm.size).tolist()
    mine = Rows(rows.keys[order], rows.values[order]).packed()
    lines, _ = yield on_communicator.alltoall(comm, mine, splits, f"{name}, to owners")
    sums = rows.unpack(lines).added_up(universe)
    lines = yield on_communicator.allgather(comm, sums.packed(), f"{name}, from owners")
    found = rows.unpack(lines)
    order = torch.argsort(found.keys)
    return Rows(found.keys[order], found.values[order])


def densely(comm: _C.Communicator, rows: Rows, universe: int, name: str) -> Steps:
    values = rows.values.new_zeros(universe, rows.values.shape[1])
    values[rows.keys] = rows.values
    used = torch.zeros(universe, dtype=torch.uint8, device=rows.keys.device)
    used[rows.keys] = 1
    flags = on_communicator.allreduce(comm, used, Max, f"{name}, rows in use", in_place=True)
    yield on_communicator.allreduce(comm, values, Sum, name, in_place=True)
    yield flags
    keys = used.nonzero().flatten()
    return Rows(keys, values[keys])


_STEPS = {GATHER: gathered, OWNERS: by_owners, DENSE: densely}


def start(way: int, comm: _C.Communicator, rows: Rows, universe: int, name: str) -> Steps:
    return _STEPS[way](comm, rows, universe, name)


def together(exchanges: Sequence[Steps]) -> list[Rows]:
    """Their sums. Each makes its next call when the others have made theirs, so their messages overlap."""
    sums: dict[int, Rows] = {}
    waiting = {i: next(steps) for i, steps in enumerate(exchanges)}
    while waiting:
        for i, handle in list(waiting.items()):
            try:
                waiting[i] = exchanges[i].send(handle.wait())
            except StopIteration as end:
                sums[i] = end.value
                del waiting[i]
    return [sums[i] for i in range(len(exchanges))]


def fastest(comm: _C.Communicator, universe: int, line_bytes: int, sent: int, different: int) -> int:
    """The way that the cost model predicts to be fastest where all ranks send so many rows together, and so many
    different ones are among them. Of lines of so many bytes, out of `universe` rows.
    """
    constants, nodes = comm.constants(), comm.nodes

    def us(collective: str, nbytes: float) -> float:
        found = _C.plan.select(collective, 1 << max(int(nbytes) - 1, 0).bit_length(), nodes, constants=constants)
        return float(found["candidates"][0][1])

    cpu = 4 * float(constants["gamma_us_per_byte"])  # of a byte that is sorted, added up and written
    row_bytes, each = line_bytes - _KEY_BYTES, sent / comm.size
    times = {
        GATHER: us("all_gather", sent * line_bytes) + sent * line_bytes * cpu,
        OWNERS: us("all_to_all", each * line_bytes)
        + us("all_gather", different * line_bytes)
        + (each + different) * line_bytes * cpu,
        DENSE: us("all_reduce", universe * row_bytes) + us("all_reduce", universe) + universe * row_bytes * cpu,
    }
    return min(times, key=lambda way: times[way])
