"""What collectives must compute, the slow and obvious way: gather everything, then reduce with NumPy in rank order."""

import functools

import numpy as np
import torch

from dcoll import Average, BitAnd, BitOr, BitXor, Max, Min, Product, ReduceOp, Sum

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int32,
    torch.int64,
    torch.bool,
]
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
BITS = {BitAnd: torch.bitwise_and, BitOr: torch.bitwise_or, BitXor: torch.bitwise_xor}


def sample(rank: int, count: int, dtype: torch.dtype, op: ReduceOp) -> torch.Tensor:
    """Small integers, different on every rank, so that every result is exact in every dtype: sums stay below 128."""
    index = torch.arange(count, dtype=torch.int64)
    if dtype is torch.bool:
        return index % (rank + 2) != 0  # neither all nor none of the ranks, at most places
    values = (index * 7 + rank * 3) % 11
    if op is Product:
        return (1 + values % 2).to(dtype)  # of 11 ranks in a row 5 have a 2: 32 fits int8
    return (values - (0 if dtype in UNSIGNED else 5)).to(dtype)


def reduced(inputs: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """The exact result. Inputs are small integers, so int64 arithmetic is the truth."""
    dtype = inputs[0].dtype
    stack = torch.stack([one.to(torch.float64 if dtype.is_floating_point else torch.int64) for one in inputs])
    if op is Min:
        out = stack.amin(0)
    elif op is Max:
        out = stack.amax(0)
    elif op is Product:
        out = stack.prod(0)
    elif op in BITS:
        out = functools.reduce(BITS[op], stack.unbind())
    else:
        out = stack.sum(0)
        if op is Average:
            if dtype.is_floating_point:
                # The sum divided by n, as the core computes it: in float32 for the narrow types.
                wide = np.float64 if dtype is torch.float64 else np.float32
                return torch.from_numpy(out.numpy().astype(wide) / wide(len(inputs))).to(dtype)
            out = torch.div(out, len(inputs), rounding_mode="trunc")
    if dtype is torch.bool:
        return out != 0
    return out.to(dtype)


def ops_of(dtype: torch.dtype) -> list[ReduceOp]:
    """The operators that `dtype` has."""
    ops = [op for op in (Sum, Average, Min, Max, Product) if not (dtype is torch.bool and op is Average)]
    return ops if dtype.is_floating_point else [*ops, *BITS]


def sizes_for(n: int) -> list[int]:
    """Counts at which chunking goes wrong when it does."""
    return sorted({0, 1, n - 1, n, n + 1, 17, 1000, 4099})


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of a 4-dimensional tensor in other memory layouts."""
    doubled = torch.zeros(*x.shape[:-1], x.shape[-1] * 2, dtype=x.dtype)
    strided = doubled[..., ::2]
    strided.copy_(x)
    return {
        "contiguous": x.clone(),
        "channels_last": x.clone().contiguous(memory_format=torch.channels_last),
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "strided": strided,
    }
