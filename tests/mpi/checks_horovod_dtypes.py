"""Checks of every collective by dtype and number of dimensions, with the factors, errors and handles that Horovod's
documentation promises, and of torch's every optimizer; with 2 and 3 ranks."""

import inspect
import itertools
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from reference import DTYPES, UNSIGNED, ops_of, reduced, sample

import dcoll as hvd

NUMBERS = [dtype for dtype in DTYPES if dtype is not torch.bool]
INTEGERS = [dtype for dtype in NUMBERS if not dtype.is_floating_point]
SIDE = 17


def shaped(rank: int, dim: int, dtype: torch.dtype, op: hvd.ReduceOp = hvd.Sum) -> torch.Tensor:
    return sample(rank, SIDE**dim, dtype, op).view([SIDE] * dim)


def everybodys(dim: int, dtype: torch.dtype, op: hvd.ReduceOp = hvd.Sum) -> list[torch.Tensor]:
    return [shaped(rank, dim, dtype, op) for rank in range(hvd.size())]


def cases() -> Iterator[tuple[torch.dtype, int]]:
    return itertools.product(DTYPES, (1, 2, 3))


def done(handle: hvd.Handle) -> hvd.Handle:
    """The handle, once poll() says that it is done."""
    until = time.monotonic() + 60
    while not hvd.poll(handle):
        assert time.monotonic() < until
        time.sleep(0.001)
    return handle


def check_allreduce_in_every_form() -> None:
    for dtype, dim in cases():
        for op in ops_of(dtype):
            inputs = everybodys(dim, dtype, op)
            want, mine = reduced(inputs, op), inputs[hvd.rank()]
            assert torch.equal(hvd.allreduce(mine, op=op), want)
            assert torch.equal(hvd.synchronize(done(hvd.allreduce_async(mine, op=op, name=f"{dtype}"))), want)
            for got in hvd.grouped_allreduce([mine, mine], op=op):
                assert torch.equal(got, want)
            in_place = mine.clone()
            assert hvd.allreduce_(in_place, op=op) is in_place
            assert torch.equal(in_place, want)


def check_many_in_flight() -> None:
    handles = [(hvd.allreduce_async(shaped(hvd.rank(), dim, dtype), op=hvd.Sum), dtype, dim) for dtype, dim in cases()]
    for handle, dtype, dim in reversed(handles):
        assert torch.equal(hvd.synchronize(handle), reduced(everybodys(dim, dtype), hvd.Sum))


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """In float64 and truncated for integers, in float32 for 16 bits."""
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float32}
    return (x.to(wide.get(x.dtype, torch.float64)) * factor).to(x.dtype)


def check_factors_of_every_dtype() -> None:
    n = hvd.size()
    for dtype, dim in itertools.product(NUMBERS, (1, 2, 3)):
        for factor in (0.30078125, 2.5):
            mine = shaped(0, dim, dtype)
            before = reduced([scaled(mine, factor)] * n, hvd.Sum)
            after = scaled(reduced([mine] * n, hvd.Sum), factor)
            for options, want in (({"prescale_factor": factor}, before), ({"postscale_factor": factor}, after)):
                calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
                    lambda x, options=options: hvd.allreduce(x, op=hvd.Sum, **options),
                    lambda x, options=options: hvd.allreduce_(x.clone(), op=hvd.Sum, **options),
                    lambda x, options=options: hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum, **options)),
                    lambda x, options=options: hvd.grouped_allreduce([x[:1], x], op=hvd.Sum, **options)[1],
                    lambda x, options=options: hvd.allgather(hvd.reducescatter(x, op=hvd.Sum, **options)),
                ]
                for call in calls:
                    assert torch.equal(call(mine), want), (dtype, dim, options)
    with pytest.raises(ValueError, match="finite factors"):
        hvd.allreduce(torch.ones(1, dtype=torch.int32), prescale_factor=float("nan"))
    # What a factor makes too large stays within the type.
    assert hvd.allreduce(torch.tensor([100, -100], dtype=torch.int8), op=hvd.Max, postscale_factor=2.0).tolist() == [
        127,
        -128,
    ]


def check_average_of_integers_truncates() -> None:
    n, r = hvd.size(), hvd.rank()
    for dtype in INTEGERS:
        assert hvd.allreduce(torch.full((3,), 7, dtype=dtype)).tolist() == [7] * 3
        if dtype not in UNSIGNED:
            mine = torch.tensor([-1 if r == 0 else 0, -5 if r == 0 else -6], dtype=dtype)
            assert hvd.allreduce(mine).tolist() == [0, -((5 + 6 * (n - 1)) // n)]


def check_moving_every_dtype() -> None:
    n, r = hvd.size(), hvd.rank()
    for dtype, dim in cases():
        everyone = everybodys(dim, dtype)
        uneven = [one[: 3 + rank] for rank, one in enumerate(everyone)]
        assert torch.equal(hvd.allgather(everyone[r]), torch.cat(everyone))
        assert torch.equal(hvd.allgather(uneven[r]), torch.cat(uneven))
        gathered = hvd.synchronize(done(hvd.allgather_async(uneven[r], name=f"gather {dtype}")))
        assert torch.equal(gathered, torch.cat(uneven))
        assert all(torch.equal(one, torch.cat(uneven)) for one in hvd.grouped_allgather([uneven[r], uneven[r]]))
        for root in range(n):
            mine = everyone[r].clone()
            assert torch.equal(hvd.broadcast(mine, root), everyone[root])
            assert torch.equal(mine, everyone[r])
            assert hvd.broadcast_(mine, root) is mine
            assert torch.equal(mine, everyone[root])
        sent = torch.cat([torch.full([r + 1, *[2] * (dim - 1)], float(to)).to(dtype) for to in range(n)])
        for splits in (None, torch.full((n,), r + 1, dtype=torch.int32)):
            got = hvd.alltoall(sent, splits)
            received = got if splits is None else got[0]
            assert received.shape == (n * (n + 1) // 2, *[2] * (dim - 1))
            assert torch.equal(received, torch.full_like(received, r))
            assert splits is None or got[1].tolist() == list(range(1, n + 1))


def check_reducescatter_of_every_dtype() -> None:
    n, r = hvd.size(), hvd.rank()
    for dtype, dim in cases():
        for op in ops_of(dtype):
            inputs = everybodys(dim, dtype, op)
            want = reduced(inputs, op).tensor_split(n)[r]
            assert torch.equal(hvd.reducescatter(inputs[r], op=op), want)
            assert torch.equal(hvd.synchronize(hvd.reducescatter_async(inputs[r], op=op)), want)
            for got in hvd.grouped_reducescatter([inputs[r]] * 2, op=op):
                assert torch.equal(got, want)


def check_what_differs_between_ranks_is_an_error_of_the_call() -> None:
    r = hvd.rank()
    other_rows = torch.ones(SIDE + r, SIDE)
    other_columns = torch.ones(SIDE, SIDE + r)
    other_type = torch.ones(6 * SIDE, dtype=torch.int32 if r % 2 else torch.float32)
    flattened = torch.ones(SIDE, 23 * 57) if r == 0 else torch.ones(SIDE, 23, 57)
    everything: list[Callable[[torch.Tensor], object]] = [
        hvd.allreduce,
        lambda x: hvd.allreduce(x, op=hvd.Sum),
        lambda x: hvd.grouped_allreduce([x, torch.ones(1)]),
        lambda x: hvd.broadcast(x, 0),
        hvd.reducescatter,
    ]
    for call in everything:
        for x in (other_rows, other_columns, other_type, flattened):
            with pytest.raises(hvd.HorovodInternalError):
                call(x)
    for call in (hvd.allgather, lambda x: hvd.alltoall(x.repeat(hvd.size(), *[1] * (x.ndim - 1)))):
        for x in (other_columns, other_type, flattened):
            with pytest.raises(hvd.HorovodInternalError):
                call(x)
    with pytest.raises(hvd.HorovodInternalError):
        hvd.broadcast(torch.ones(3), r)
    assert hvd.allreduce(torch.ones(1)).item() == 1


def check_a_name_that_is_in_use() -> None:
    starts: list[Callable[[], hvd.Handle]] = [
        lambda: hvd.allreduce_async(torch.ones(SIDE), name="twice"),
        lambda: hvd.allgather_async(torch.ones(SIDE), name="twice"),
        lambda: hvd.broadcast_async(torch.ones(SIDE), 0, name="twice"),
        lambda: hvd.alltoall_async(torch.ones(hvd.size()), name="twice"),
        lambda: hvd.reducescatter_async(torch.ones(SIDE), name="twice"),
    ]
    for start in starts:
        for rank in range(hvd.size()):  # the others are not there yet, so it is certainly in flight
            if rank == hvd.rank():
                handle = start()
                if rank == 0:
                    with pytest.raises(ValueError, match="twice"):
                        start()
            hvd.barrier()
        hvd.synchronize(handle)


def check_splits_that_are_no_numbers() -> None:
    n = hvd.size()
    rows = torch.ones(n)
    for wrong in (torch.ones(n), torch.ones(n, dtype=torch.float64), [1.0] * n, ["1"] * n, 1, [None] * n):
        with pytest.raises(ValueError, match="whole numbers"):
            hvd.alltoall(rows, wrong)
        with pytest.raises(ValueError, match="whole numbers"):
            hvd.alltoall_async(rows, wrong)
        with pytest.raises(ValueError, match="whole numbers"):
            hvd.alltoall(rows.clone().requires_grad_(), wrong)
    for wrong in (torch.ones(n + 1, dtype=torch.int32), torch.full((n,), 2, dtype=torch.int32)):
        with pytest.raises(ValueError, match="alltoall got splits"):
            hvd.alltoall(rows, wrong)
    with pytest.raises(ValueError, match="cannot share evenly"):
        hvd.alltoall(torch.ones(n + 1))


def check_the_result_is_there_once_poll_says_so() -> None:
    n = hvd.size()
    for dtype in (torch.float32, torch.int16):
        columns = torch.ones(SIDE, 4, dtype=dtype)
        handle = done(hvd.allreduce_async_(columns[:, ::2], op=hvd.Sum, name="strided"))
        assert columns.unique(dim=0).tolist() == [[n, 1, n, 1]]
        hvd.synchronize(handle)
        mine = torch.full((4, 3), hvd.rank(), dtype=dtype).t()
        handle = done(hvd.broadcast_async_(mine, n - 1, name="turned"))
        assert mine.eq(n - 1).all()
        hvd.synchronize(handle)
        group = [torch.ones(5, dtype=dtype), columns[:, 1], torch.ones(2, dtype=torch.int64)]
        handle = done(hvd.grouped_allreduce_async_(group, op=hvd.Sum, name="group"))
        assert all(one.eq(n).all() for one in group)
        assert hvd.synchronize(handle)[0] is group[0]
    shape = 3 + hvd.rank()
    handle = done(hvd.allreduce_async_(torch.ones(shape, 2)[:, 0], name="fails"))
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(handle)


def check_join_beside_integers() -> None:
    n, r = hvd.size(), hvd.rank()
    for dtype, first in itertools.product(INTEGERS, (0, 1)):
        if r != first:
            handle = hvd.allreduce_async(torch.full((5,), 7, dtype=dtype), name="joined")
            assert hvd.synchronize(handle).tolist() == [7 * (n - 1) // n] * 5
            assert hvd.allreduce(torch.full((5,), 6, dtype=dtype), op=hvd.Max, prescale_factor=0.5).tolist() == [3] * 5
        assert 0 <= hvd.join() < n


OPTIONS = (
    {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.2, "nesterov": True, "betas": (0.9, 0.999), "etas": (0.8, 2.4)},
    {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": False, "betas": (0.8, 0.9), "etas": (0.25, 1.75)},
)


def optimizer_classes() -> list[type[torch.optim.Optimizer]]:
    """torch's own that DistributedOptimizer takes and dense parameters of one dimension suit, in one order."""
    unsuitable = {"LBFGS", "SparseAdam", "Muon"}
    found = {cls.__name__: cls for cls in torch.optim.Optimizer.__subclasses__() if cls.__module__.startswith("torch.")}
    return [found[name] for name in sorted(found) if name not in unsuitable]


def described(value: object) -> object:
    """Nested values with tensors as bytes, and the type of each."""
    if isinstance(value, dict):
        return {key: described(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [described(one) for one in value]
    return (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else (type(value), value)


def check_the_state_of_every_optimizer_comes_from_the_root() -> None:
    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 5)).sum().backward()
        optimizer.step()

    for cls in optimizer_classes():
        taken = inspect.signature(cls).parameters
        options = {key: value for key, value in OPTIONS[hvd.rank() % 2].items() if key in taken}
        model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        optimizer = hvd.DistributedOptimizer(cls(model.parameters(), **options), model.named_parameters())
        step(model, optimizer)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        states = hvd.allgather_object((described(optimizer.state_dict()), described(model.state_dict())))
        assert all(state == states[0] for state in states), cls
        for key, value in OPTIONS[0].items():
            assert key not in options or optimizer.param_groups[0][key] == value, (cls, key)
            assert key not in options or type(optimizer.param_groups[0][key]) is type(value), (cls, key)
        step(model, optimizer)
        weights = hvd.allgather_object([p.tolist() for p in model.parameters()])
        assert all(one == weights[0] for one in weights), cls
