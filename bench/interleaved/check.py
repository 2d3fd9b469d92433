"""Small integers whose sum over the ranks is exact in every data type. NumPy only; bfloat16 as the bits it has."""

from typing import Any

import numpy as np

NUMPY_NAMES = {"bfloat16": "uint16"}  # NumPy has no bfloat16 of its own
# Values repeat with a prime number of elements, so that a chunk in the wrong place shows at every chunk size.
PERIOD = 4099
BLOCK = 16 * PERIOD
MAX_VALUE = 3


def numpy_dtype(name: str) -> Any:
    return np.dtype(NUMPY_NAMES.get(name, name))


def encode(values: Any, dtype: str) -> Any:
    """Integers in the data type's form. Those up to 256 are exact in bfloat16: the upper half of a float32."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(numpy_dtype(dtype))


def contribution(rank: int) -> Any:
    """What a rank puts in, 0 to 3. Mixed, so that the sum over ranks differs from element to element."""
    index = np.arange(BLOCK, dtype=np.uint64) % PERIOD
    mixed = (index * 2654435761 + rank * 40503) & 0x7FFFFFFF
    mixed = ((mixed ^ mixed >> 15) * 2246822519) & 0x7FFFFFFF
    return ((mixed ^ mixed >> 13) % (MAX_VALUE + 1)).astype(np.int64)


class Pattern:
    """The input of one rank and the sum that all ranks must get."""

    def __init__(self, dtype: str, rank: int, ranks: int) -> None:
        self._dtype = numpy_dtype(dtype)
        self.input = encode(contribution(rank), dtype)
        self.result = encode(sum(contribution(other) for other in range(ranks)), dtype)

    def fill(self, raw: Any) -> None:
        for part in self._blocks(raw):
            part[:] = self.input[: len(part)]

    def count_wrong(self, raw: Any) -> int:
        return sum(int(np.count_nonzero(part != self.result[: len(part)])) for part in self._blocks(raw))

    def _blocks(self, raw: Any) -> Any:
        elements = raw.view(self._dtype)
        return (elements[at : at + BLOCK] for at in range(0, len(elements), BLOCK))
