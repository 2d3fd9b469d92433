"""One operation of the stress test: every rank draws the same one from the same dice, starts it, and checks it.

An operation draws everything, also what concerns other ranks only, so that the dice stay together. Integers are
compared with what NumPy says must come out. Real numbers are hashed: all ranks must get the same bits, and so must the
next run.
"""

import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from operand import Operand, Place, Pool, as_tensor, place
from values import DTYPES, FLOATING, LATEST_START, PERIOD, converted, integers, reals, reduced

import dcoll
from dcoll import Average, BitAnd, BitOr, BitXor, Max, Min, Product, Sum

EDGES_BYTES = (4 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20)  # where another path is taken, or might be


@dataclass
class Started:
    """An operation under way, or done if handle is None."""

    what: str
    handle: dcoll.Handle | None
    result: Any
    check: Callable[[Any], None]
    mismatched: bool = False  # one rank called something else: MismatchError is due


@dataclass
class Context:
    """What operations of one round share."""

    rank: int
    size: int
    pool: Pool
    dice: random.Random = field(default_factory=random.Random)  # the same on every rank
    index: int = 0  # of the operation in its round
    hashes: list[tuple[int, str, str, bool]] = field(default_factory=list)  # index, what, hash, same on all ranks?


def draw_count(dice: random.Random, itemsize: int) -> int:
    """Elements: few, around an edge, log-uniform up to 2 MiB, and now and then up to 12 MiB."""
    kind = dice.random()
    if kind < 0.1:
        return dice.randrange(10)
    if kind < 0.4:
        return max(0, dice.choice(EDGES_BYTES) // itemsize + dice.choice((-3, -1, 0, 1, 8)))
    top = math.log((2 if kind < 0.97 else 12) << 20)
    return min(PERIOD, int(math.exp(dice.uniform(0, top))) // itemsize)


def draw_places(c: Context, *, dense: bool) -> list[Place]:
    """Where each rank's operand lies. They may differ: the core must agree on a way that suits all."""
    dice = c.dice
    mapped = dice.choice((0.0, 0.0, 1.0, 1.0, 0.5))  # the share of ranks
    aligned, strided = dice.random() < 0.5, not dense and dice.random() < 0.1
    return [
        Place(dice.random() < mapped, 0 if aligned else dice.randrange(17), 2 if strided else 1, dice.random() < 0.4)
        for _ in range(c.size)
    ]


def draw_name(c: Context) -> str | None:
    """Asynchronous operations with a name meet by it: each in flight has one of its own."""
    return c.dice.choice((None, None, f"tensor {c.index}", "a name that fills more than a line " * 3 + str(c.index)))


def own_operand(c: Context, values: torch.Tensor, places: list[Place]) -> Operand:
    return place(c.pool, values, places[c.rank], random.Random(f"{c.index}/{c.rank}"))


def require_equal(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    got = got.reshape(-1)
    if got.dtype == expected.dtype and torch.equal(got, expected):
        return
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise AssertionError(f"{what}: got {got.dtype} {list(got.shape)}, not {expected.dtype} {list(expected.shape)}")
    wrong = (got != expected).nonzero().reshape(-1)
    first = int(wrong[0])
    raise AssertionError(
        f"{what}: {len(wrong)} of {len(got)} elements are wrong, from {first} to {int(wrong[-1])}; the first is "
        f"{got[first].item()}, not {expected[first].item()}"
    )


def finish_reduction(
    c: Context,
    what: str,
    mine: Operand,
    sent: torch.Tensor | None,
    expected: Callable[[], torch.Tensor] | None,
    same: bool,
) -> Callable[[Any], None]:
    """The check of a result. sent: what the operand must still hold. expected: None if the result is to be hashed."""
    index = c.index

    def check(result: Any) -> None:
        got = as_tensor(result)
        if expected is None:
            c.hashes.append((index, what, digest(got), same))
        else:
            require_equal(got, expected(), what)
        if sent is not None:
            require_equal(mine.tensor, sent, f"the operand of {what}")
        mine.release(c.pool)

    return check


def digest(tensor: torch.Tensor) -> str:
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))  # stride 1 even of one element
    return hashlib.sha1(dense.view(torch.uint8).numpy(), usedforsecurity=False).hexdigest()


def started(what: str, out: Any, check: Callable[[Any], None]) -> Started:
    """`out` is a handle or, from the variants that wait, the result."""
    return Started(what, out, None, check) if isinstance(out, dcoll.Handle) else Started(what, None, out, check)


# --- the operations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reduction:
    """What is reduced and how: drawn for allreduce and reducescatter alike."""

    dtype: torch.dtype
    op: dcoll.ReduceOp
    real: bool
    prescale: float
    postscale: float

    def operands(self, c: Context, count: int) -> list[Any]:
        """Every rank's, as int8; the real ones of other ranks nobody needs."""
        starts = [c.dice.randrange(LATEST_START) for _ in range(c.size)]
        if self.real:
            return [reals(start, count) for start in starts]
        return [integers(self.dtype, self.op, start, count, r) for r, start in enumerate(starts)]

    def __str__(self) -> str:
        scale = f", scaled by {self.prescale} and {self.postscale}" if (self.prescale, self.postscale) != (1, 1) else ""
        return f"{self.dtype} {self.op.name} of {'real numbers' if self.real else 'integers'}{scale}"


def draw_reduction(dice: random.Random) -> Reduction:
    dtype = dice.choice(DTYPES)
    ops = (Sum, Sum, Min, Max, Product) if dtype is torch.bool else (Sum, Average, Average, Min, Max, Product)
    if dtype not in FLOATING:
        ops = (*ops, BitAnd, BitOr, BitXor)
    op = dice.choice(ops)
    real = dtype in FLOATING and op in (Sum, Average) and dice.random() < 0.4
    pre = post = 1.0
    if dtype in FLOATING and op is not Product and dice.random() < 0.2:
        if real:
            pre, post = dice.uniform(0.1, 2), dice.uniform(0.1, 2)
        else:  # exact
            pre, post = dice.choice((0.5, 1.0, 2.0)), 1.0 if op is Average else dice.choice((0.25, 1.0, 2.0))
    return Reduction(dtype, op, real, pre, post)


def allreduce(c: Context) -> Started:
    how = draw_reduction(c.dice)
    count = draw_count(c.dice, how.dtype.itemsize)
    operands, places = how.operands(c, count), draw_places(c, dense=False)
    variants = (dcoll.allreduce, dcoll.allreduce_, dcoll.allreduce_async, dcoll.allreduce_async_)
    variant, name = c.dice.choice(variants), draw_name(c)
    what = f"{variant.__name__} of {count} elements, {how}"
    values = converted(operands[c.rank], how.dtype)
    mine = own_operand(c, values, places)
    out = variant(mine.array, op=how.op, name=name, prescale_factor=how.prescale, postscale_factor=how.postscale)

    def expected() -> torch.Tensor:
        return reduced(operands, how.dtype, how.op, how.prescale * how.postscale)

    kept = None if variant.__name__.endswith("_") else values
    return started(what, out, finish_reduction(c, what, mine, kept, None if how.real else expected, True))


def reducescatter(c: Context) -> Started:
    how = draw_reduction(c.dice)
    width = c.dice.choice((1, 1, 3, 64, 1000))
    rows = draw_count(c.dice, how.dtype.itemsize) // width
    operands, places = how.operands(c, rows * width), draw_places(c, dense=True)
    variant, name = c.dice.choice((dcoll.reducescatter, dcoll.reducescatter_async)), draw_name(c)
    what = f"{variant.__name__} of {rows} rows of {width} elements, {how}"
    values = converted(operands[c.rank], how.dtype)
    mine = own_operand(c, values, places)
    array = mine.array.reshape(rows, width)
    out = variant(array, op=how.op, name=name, prescale_factor=how.prescale, postscale_factor=how.postscale)

    def expected() -> torch.Tensor:
        share = [rows // c.size + (r < rows % c.size) for r in range(c.size)]
        begin = sum(share[: c.rank]) * width
        piece = [operand[begin : begin + share[c.rank] * width] for operand in operands]
        return reduced(piece, how.dtype, how.op, how.prescale * how.postscale)

    return started(what, out, finish_reduction(c, what, mine, values, None if how.real else expected, False))


def broadcast(c: Context) -> Started:
    dtype = c.dice.choice(DTYPES)
    count, root = draw_count(c.dice, dtype.itemsize), c.dice.randrange(c.size)
    operands, places = Reduction(dtype, Sum, False, 1, 1).operands(c, count), draw_places(c, dense=False)
    variants = (dcoll.broadcast, dcoll.broadcast_, dcoll.broadcast_async, dcoll.broadcast_async_)
    variant, name = c.dice.choice(variants), draw_name(c)
    what = f"{variant.__name__} of {count} {dtype} from rank {root}"
    values = converted(operands[c.rank], dtype)
    mine = own_operand(c, values, places)
    out = variant(mine.array, root, name=name)
    kept = None if variant.__name__.endswith("_") else values
    return started(what, out, finish_reduction(c, what, mine, kept, lambda: converted(operands[root], dtype), True))


def allgather(c: Context) -> Started:
    dtype, width = c.dice.choice(DTYPES), c.dice.choice((1, 1, 3, 64))
    longest = draw_count(c.dice, dtype.itemsize) // width
    rows = [c.dice.choice((longest, longest, c.dice.randint(0, longest), 0)) for _ in range(c.size)]
    starts, places = [c.dice.randrange(LATEST_START) for _ in rows], draw_places(c, dense=True)
    variant, name = c.dice.choice((dcoll.allgather, dcoll.allgather_async)), draw_name(c)
    what = f"{variant.__name__} of {rows} rows of {width} {dtype}"
    operands = [integers(dtype, Sum, starts[r], rows[r] * width, r) for r in range(c.size)]
    values = converted(operands[c.rank], dtype)
    mine = own_operand(c, values, places)
    out = variant(mine.array.reshape(rows[c.rank], width), name=name)
    return started(
        what, out, finish_reduction(c, what, mine, values, lambda: converted(np.concatenate(operands), dtype), True)
    )


def alltoall(c: Context) -> Started:
    dtype, width = c.dice.choice(DTYPES), c.dice.choice((1, 1, 3, 64))
    longest = draw_count(c.dice, dtype.itemsize) // width // c.size
    even = c.dice.random() < 0.3
    splits = [[longest if even else c.dice.choice((longest, c.dice.randint(0, longest), 0)) for _ in range(c.size)]
              for _ in range(c.size)]  # fmt: skip
    starts, places = [c.dice.randrange(LATEST_START) for _ in splits], draw_places(c, dense=True)
    variant, name = c.dice.choice((dcoll.alltoall, dcoll.alltoall_async)), draw_name(c)
    what = f"{variant.__name__} with splits {splits}, rows of {width} {dtype}"
    operands = [integers(dtype, Sum, starts[r], sum(splits[r]) * width, r) for r in range(c.size)]
    values = converted(operands[c.rank], dtype)
    mine = own_operand(c, values, places)
    out = variant(mine.array.reshape(sum(splits[c.rank]), width), None if even else splits[c.rank], name=name)

    def expected() -> torch.Tensor:
        begins = [sum(splits[r][: c.rank]) * width for r in range(c.size)]
        pieces = [operands[r][begins[r] : begins[r] + splits[r][c.rank] * width] for r in range(c.size)]
        return converted(np.concatenate(pieces), dtype)

    check = finish_reduction(c, what, mine, values, expected, False)

    def check_both(result: Any) -> None:
        if not even:
            result, received = result
            assert received.tolist() == [splits[r][c.rank] for r in range(c.size)], f"{what}: {received.tolist()}"
        check(result)

    return started(what, out, check_both)


def barrier(_: Context) -> Started:
    def nothing(_: Any) -> None:
        pass

    dcoll.barrier()
    return Started("barrier", None, None, nothing)


def mismatch(c: Context) -> Started:
    """One rank calls something else. All are told so, and nothing is moved."""
    dtype = c.dice.choice((torch.float32, torch.float16, torch.int64))
    count, odd_one = draw_count(c.dice, dtype.itemsize), c.dice.randrange(c.size)
    places, deviation = draw_places(c, dense=True), c.dice.randrange(6)
    # Like no other call: who calls what another rank had called in vain is taken to be behind.
    if deviation in {2, 4, 5}:
        count += 70_001 + c.index
    values = converted(integers(dtype, Sum, c.rank, count, c.rank), dtype)
    mine = own_operand(c, values, places)
    what = f"allreduce_async_ of {count} {dtype}, on rank {odd_one} deviation {deviation}"
    # By name, only the same kind of operation meets.
    name = c.dice.choice((None, f"mismatched {c.index}")) if deviation in (0, 1, 2, 3) else None
    a, handle = mine.array, None
    if c.rank != odd_one:
        handle = dcoll.allreduce_async_(a, op=Sum, name=name)
    elif deviation == 0:
        handle = dcoll.allreduce_async_(a, op=Max, name=name)
    elif deviation == 1:
        handle = dcoll.allreduce_async_(a, op=Product, name=name)
    elif deviation == 2:
        handle = dcoll.allreduce_async(torch.ones(count + 1, dtype=dtype), op=Sum, name=name)
    elif deviation == 3:
        handle = dcoll.allreduce_async(torch.ones(count, dtype=torch.int32), op=Sum, name=name)
    elif deviation == 4:
        handle = dcoll.broadcast_async_(a, 0)
    else:
        handle = dcoll.allgather_async(a.reshape(1, -1))  # ranks compare the length of rows, not their number

    def check(_: Any) -> None:
        require_equal(mine.tensor, values, f"the operand of {what}")
        mine.release(c.pool)

    return Started(what, handle, None, check, mismatched=c.size > 1)


OPERATIONS = [allreduce] * 12 + [broadcast] * 2 + [allgather] * 2 + [reducescatter] * 3 + [alltoall] * 2
OPERATIONS += [barrier, mismatch]
