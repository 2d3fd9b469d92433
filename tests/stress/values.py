"""What every rank holds in every operation, and what must come out, computed by NumPy from small integers.

Any rank can compute any other's operand: it is a piece of one long random pattern, beginning where the operation's
dice said for that rank. Sums stay within 40 and products within 64, which every dtype holds exactly, so int8 is enough
to compute them in.
"""

import functools

import numpy as np
import torch

from dcoll import Average, BitAnd, BitOr, BitXor, Max, Min, Product, ReduceOp, Sum

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*FLOATING, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.bool,
          torch.uint32, torch.uint64)  # fmt: skip
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
COMBINE = {
    Sum: np.add,
    Average: np.add,
    Min: np.minimum,
    Max: np.maximum,
    Product: np.multiply,
    BitAnd: np.bitwise_and,
    BitOr: np.bitwise_or,
    BitXor: np.bitwise_xor,
}
PERIOD = 3 << 20  # elements; no operand is longer than this
LATEST_START = 1 << 16
_FACTOR_RANKS = 6  # so many ranks may multiply by 2: 2**6 fits int8


@functools.cache
def _pattern(what: str) -> np.ndarray:
    dice = np.random.default_rng(sum(what.encode()))
    choices = {
        "signed": np.arange(-5, 6),
        "unsigned": np.arange(6),
        "bits": np.array([0, 1]),
        "factors": np.array([-1, 1, 2]),
        "signs": np.array([-1, 1]),
        "unsigned factors": np.array([1, 2]),
        "ones": np.array([1]),
    }
    return dice.choice(choices[what].astype(np.int8), PERIOD + LATEST_START)


@functools.cache
def _real_pattern() -> np.ndarray:
    """Numbers of many magnitudes, so that sums in another order are other sums; float16 holds them all."""
    dice = np.random.default_rng(0)
    return (dice.standard_normal(PERIOD + LATEST_START) * 2.0 ** dice.integers(-6, 6, PERIOD + LATEST_START)).astype(
        np.float32
    )


def integers(dtype: torch.dtype, op: ReduceOp, start: int, count: int, rank: int) -> np.ndarray:
    """Rank `rank`'s operand, as int8."""
    if dtype is torch.bool:
        what = "bits"
    elif op is Product and dtype in UNSIGNED:
        what = "unsigned factors" if rank < _FACTOR_RANKS else "ones"
    elif op is Product:
        what = "factors" if rank < _FACTOR_RANKS else "signs"
    else:
        what = "unsigned" if dtype in UNSIGNED else "signed"
    return _pattern(what)[start : start + count]


def reals(start: int, count: int) -> np.ndarray:
    return _real_pattern()[start : start + count]


def converted(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def reduced(operands: list[np.ndarray], dtype: torch.dtype, op: ReduceOp, factor: float) -> torch.Tensor:
    """The result, from int8 operands. factor: prescale times postscale, a power of two, so that it rounds nothing."""
    combine = COMBINE[op]
    total = operands[0]
    for operand in operands[1:]:
        total = combine(total, operand)
    if dtype is torch.bool:
        return torch.from_numpy(total != 0)
    if dtype not in FLOATING:
        total = np.sign(total) * (np.abs(total) // len(operands)) if op is Average else total  # towards zero
        return converted(total, dtype)
    wide = total.astype(np.float64 if dtype is torch.float64 else np.float32)
    if op is Average:
        wide /= wide.dtype.type(len(operands))
    return converted(wide * wide.dtype.type(factor), dtype)
