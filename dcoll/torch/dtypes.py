"""What the core calls torch's dtypes and operators, and what it cannot reduce."""

from typing import Any

import torch
import torch.distributed as dist

from dcoll import _C
from dcoll.collectives.tensors import DTYPE_NAMES
from dcoll.errors import ArgumentError

RedOpType: Any = dist.ReduceOp.RedOpType  # torch's stubs know none of its members

REDUCED: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in DTYPE_NAMES.items()}
"""The code of what the core computes with."""

PAIRS: dict[torch.dtype, int] = {
    torch.complex32: _C.FLOAT16,
    torch.complex64: _C.FLOAT32,
    torch.complex128: _C.FLOAT64,
}
"""A complex number is two real ones; the code is theirs."""

OPERATORS: dict[Any, int] = {
    RedOpType.SUM: _C.SUM,
    RedOpType.AVG: _C.AVERAGE,
    RedOpType.PRODUCT: _C.PRODUCT,
    RedOpType.MIN: _C.MIN,
    RedOpType.MAX: _C.MAX,
    RedOpType.BAND: _C.BIT_AND,
    RedOpType.BOR: _C.BIT_OR,
    RedOpType.BXOR: _C.BIT_XOR,
    RedOpType.PREMUL_SUM: _C.SUM,
}

_OF_WHOLE_NUMBERS = (RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR)
_OF_PAIRS = (RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM)
_NO_BOOL = (RedOpType.AVG, RedOpType.PREMUL_SUM)

PLAIN_DTYPES = {dtype: code for dtype, code in REDUCED.items() if dtype is not torch.bool}
PLAIN_OPERATORS = {
    hash(dist.ReduceOp(op)): code
    for op, code in OPERATORS.items()
    if op not in (*_OF_WHOLE_NUMBERS, RedOpType.PREMUL_SUM)
}
"""What goes together in any pair. By the operator's hash, which costs a call less than its kind."""


def moved(dtype: torch.dtype) -> int:
    """The code under which a dtype is only moved: its own, or that of bytes (float8, say)."""
    code = REDUCED.get(dtype)
    return PAIRS.get(dtype, _C.UINT8) if code is None else code


def reduction(what: str, tensor: torch.Tensor, op: Any) -> tuple[int, int, int, float]:
    """What the core takes for a reduction: the dtype's code, numbers per element, the operator's code, and the factor
    that every rank's values are multiplied by first."""
    kind = getattr(op, "op", op)
    dtype = tensor.dtype
    code, per_element = REDUCED.get(dtype), 1
    if code is None and dtype in PAIRS:
        code, per_element = PAIRS[dtype], 2
    operator = OPERATORS.get(kind)
    if operator is None:
        raise ArgumentError(f"{what} with {kind} is not there: the operators are {', '.join(map(str, OPERATORS))}")
    if code is None:
        raise ArgumentError(
            f"{what} got dtype {dtype}, but reduces {', '.join(map(str, (*REDUCED, *PAIRS)))}. Other dtypes are only "
            "moved: gather the tensors and reduce them here"
        )
    if (
        (per_element == 2 and kind not in _OF_PAIRS)
        or (kind in _OF_WHOLE_NUMBERS and dtype.is_floating_point)
        or (kind in _NO_BOOL and dtype is torch.bool)
    ):
        raise ArgumentError(f"{what} with {kind} is not defined for {dtype}")
    if kind != RedOpType.PREMUL_SUM:
        return code, per_element, operator, 1.0
    factor = op.factor
    if isinstance(factor, torch.Tensor):
        if factor.numel() != 1:
            raise ArgumentError(f"{what} with PREMUL_SUM takes one factor, but got a tensor of {factor.numel()}")
        factor = factor.item()
    if not (dtype.is_floating_point or dtype.is_complex):
        raise ArgumentError(f"{what} with PREMUL_SUM multiplies floating-point numbers, but got {dtype}")
    return code, per_element, operator, float(factor)
