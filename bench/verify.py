"""Inputs whose reduction is known exactly, so that results are compared without tolerance."""

import math

import torch

# The pattern repeats with a prime, so that a chunk that landed in the wrong place shows whatever the chunk size is.
PERIOD = 4099
BLOCK = 16 * PERIOD
MAX_VALUE = 3
# Every integer up to this is exact (the 8-bit integers: does not wrap).
EXACT_UP_TO = {torch.int8: 127, torch.uint8: 255, torch.bfloat16: 256, torch.float16: 2048}


def max_ranks(op: str, dtype: torch.dtype) -> float:
    """Up to how many ranks any partial result of the pattern is exact: sums grow with the ranks."""
    return EXACT_UP_TO.get(dtype, 1 << 24) // MAX_VALUE if op in ("sum", "avg") else math.inf


def contribution(op: str, rank: int, size: int) -> torch.Tensor:
    """What `rank` puts in: one block of small integers that vary with the index and the rank."""
    index = torch.arange(BLOCK) % PERIOD
    if op == "prod":  # at any index at most one rank has a factor 2, and one a factor 3: products stay in 1, 2, 3, 6
        twos = torch.where(index % (size + 1) == rank, 2, 1)
        threes = torch.where(index // 7 % (size + 1) == rank, 3, 1)
        return twos * threes
    # Mixed, not added: over 4 ranks the sum of (hash(index) + rank) % 4 would be the same at every index.
    mixed = (index * 2654435761 + rank * 40503) & 0x7FFFFFFF
    mixed = ((mixed ^ mixed >> 15) * 2246822519) & 0x7FFFFFFF
    return (mixed ^ mixed >> 13) % (MAX_VALUE + 1)


def reduce_exactly(op: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """The naive reduction of one block, in 64-bit integers."""
    result = contribution(op, 0, size)
    for rank in range(1, size):
        other = contribution(op, rank, size)
        if op in ("sum", "avg"):
            result += other
        elif op == "prod":
            result *= other
        else:
            result = torch.minimum(result, other) if op == "min" else torch.maximum(result, other)
    if op != "avg":
        return result.to(dtype)
    if not dtype.is_floating_point:
        return torch.div(result, size, rounding_mode="trunc").to(dtype)
    # The core's definition: one multiplication by 1/size in float32 (float64 for float64), then one rounding.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (result.to(wide) * torch.tensor(1.0 / size, dtype=wide)).to(dtype)


class Pattern:
    """The input of one rank and the result all ranks must get, for any count."""

    def __init__(self, dtype: torch.dtype, op: str, rank: int, size: int) -> None:
        self.input = contribution(op, rank, size).to(dtype)
        self.result = reduce_exactly(op, size, dtype)

    def fill(self, tensor: torch.Tensor) -> None:
        for part in torch.split(tensor, BLOCK):
            part.copy_(self.input[: len(part)])

    def count_wrong_results(self, tensor: torch.Tensor) -> int:
        return self._count_different(tensor, self.result)

    def count_changed_inputs(self, tensor: torch.Tensor) -> int:
        """Out of place, the input must come out as it went in."""
        return self._count_different(tensor, self.input)

    @staticmethod
    def _count_different(tensor: torch.Tensor, block: torch.Tensor) -> int:
        return sum(int(torch.count_nonzero(part != block[: len(part)])) for part in torch.split(tensor, BLOCK))
