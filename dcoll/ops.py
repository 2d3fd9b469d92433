"""The reduction operators."""

import enum

from dcoll import _C
from dcoll.errors import ArgumentError


class ReduceOp(enum.IntEnum):
    """How the ranks' values are combined. The values are Horovod's, which has none that combine bits."""

    Average = _C.AVERAGE
    Sum = _C.SUM
    Adasum = _C.ADASUM
    Min = _C.MIN
    Max = _C.MAX
    Product = _C.PRODUCT
    BitAnd = _C.BIT_AND
    BitOr = _C.BIT_OR
    BitXor = _C.BIT_XOR


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product
BitAnd = ReduceOp.BitAnd
BitOr = ReduceOp.BitOr
BitXor = ReduceOp.BitXor


def wrong_op(op: object, allowed: tuple[ReduceOp, ...] = tuple(ReduceOp)) -> ArgumentError:
    """The error for an `op` that is not one of `allowed`. A bare number is refused: the names say more."""
    names = ", ".join(f"dcoll.{one.name}" for one in allowed)
    return ArgumentError(f"op is {op!r}, but must be one of {names}")
