"""Operands in memory of both sorts, at any alignment, between guards that nobody may overwrite."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import dcoll

_GUARD_BYTES = 128
_GUARD = 0xA5


class Pool:
    """Memory that is used again and again, as a training loop does: stale bytes of an earlier operation lie in it."""

    _KEPT = 6

    def __init__(self) -> None:
        self._free: dict[bool, list[torch.Tensor]] = {True: [], False: []}

    def take(self, nbytes: int, mapped: bool, dice: random.Random) -> torch.Tensor:
        fitting = [block for block in self._free[mapped] if block.numel() >= nbytes]
        if fitting and dice.random() < 0.7:
            block = dice.choice(fitting)
            self._free[mapped] = [other for other in self._free[mapped] if other is not block]
            return block
        return dcoll.empty(nbytes, torch.uint8) if mapped else torch.empty(nbytes, dtype=torch.uint8)

    def give(self, block: torch.Tensor, mapped: bool) -> None:
        self._free[mapped] = [block, *self._free[mapped]][: self._KEPT]


@dataclass(frozen=True)
class Place:
    """How an operand lies in memory; drawn for every rank by the same dice."""

    mapped: bool
    offset: int  # elements
    stride: int  # 1: dense
    numpy: bool


@dataclass
class Operand:
    """A tensor or array to pass to a collective, and the block it lies in."""

    array: Any
    tensor: torch.Tensor  # the same memory as a one-dimensional torch.Tensor
    block: torch.Tensor
    start: int  # bytes of the block
    end: int
    mapped: bool

    def release(self, pool: Pool) -> None:
        """After the operation: check the guards, and let the memory be used again."""
        for name, guard in (
            ("before", self.block[: self.start]),
            ("behind", self.block[self.end : self.end + _GUARD_BYTES]),
        ):
            assert bool((guard == _GUARD).all()), f"bytes {name} the operand were overwritten"
        pool.give(self.block, self.mapped)


def place(pool: Pool, values: torch.Tensor, where: Place, dice: random.Random) -> Operand:
    """The one-dimensional `values` in memory as `where` says."""
    size, count = values.itemsize, values.numel()
    extent = ((count - 1) * where.stride + 1) * size if count else 0
    start = _GUARD_BYTES + where.offset * size
    block = pool.take(start + extent + _GUARD_BYTES, where.mapped, dice)
    block[:start] = _GUARD
    block[start + extent : start + extent + _GUARD_BYTES] = _GUARD
    tensor = block[start : start + extent].view(values.dtype)[:: where.stride]
    tensor.copy_(values)
    use_numpy = where.numpy and values.dtype is not torch.bfloat16  # which NumPy does not have
    return Operand(tensor.numpy() if use_numpy else tensor, tensor, block, start, start + extent, where.mapped)


def as_tensor(result: Any) -> torch.Tensor:
    return torch.from_numpy(result) if isinstance(result, np.ndarray) else result
