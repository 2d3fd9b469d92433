"""Checks of DistributedOptimizer's options, one by one: compression, groups, Adasum, check_sync, no_sync."""

import inspect
import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dcoll as hvd
from dcoll.compression import Compressor
from dcoll.job import world


class Toy(nn.Module):
    """The gradient of w[i] is x + i in every element, of those not used None."""

    def __init__(self, count: int = 5, width: int = 7, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.zeros(width + i, dtype=dtype)) for i in range(count)])

    def forward(self, x: float, use: list[int] | None = None) -> torch.Tensor:
        return torch.stack([(self.w[i] * (x + i)).sum() for i in (range(len(self.w)) if use is None else use)]).sum()

    def grads(self) -> list[float | None]:
        assert all(p.grad is None or (p.grad == p.grad[0]).all() for p in self.w)
        return [None if p.grad is None else p.grad[0].item() for p in self.w]


def distributed(model: nn.Module, *args: Any, **options: Any) -> Any:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), *args, **options
    )


def same_everywhere(*tensors: torch.Tensor) -> bool:
    mine = [t.detach().numpy().tobytes() for t in tensors]
    return all(other == mine for other in hvd.allgather_object(mine))


def mean_of_ranks() -> float:
    return (hvd.size() - 1) / 2


class Quarters(Compressor):
    """Whole quarters, as int32: another dtype and another shape than the gradient's."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor * 4).round().to(torch.int32).reshape(1, -1), tensor.shape

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.reshape(ctx) / 4


class Derived(hvd.Compression.fp16):  # type: ignore[name-defined,misc]
    """Sends zeros, which the core's float16 would not."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return torch.zeros_like(tensor), None


def check_compression_keeps_what_it_can_hold() -> None:
    n, last = hvd.size(), hvd.size() - 1
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16, Quarters):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            for options in ({}, {"bucket_mb": 0.0}, {"groups": 2}):
                model = Toy(dtype=dtype)
                optimizer = distributed(model, compression=compression, op=hvd.Sum, **options)
                for step in range(3):
                    optimizer.zero_grad(set_to_none=step != 1)
                    # Parameter 1 is nobody's, 4 the last rank's alone.
                    model(hvd.rank() + step, [0, 2, 3, 4] if hvd.rank() == last else [0, 2, 3]).backward()
                    all_of = [n * (n - 1) / 2 + n * (step + i) for i in range(5)]
                    want = [all_of[0], None, all_of[2], all_of[3], last + step + 4.0]
                    assert model.grads() == want, (compression, dtype, options, step)
                    assert all(p.grad is None or p.grad.dtype == dtype for p in model.w)
                    optimizer.step()


def check_compression_rounds_on_the_way() -> None:
    """Of float64; on one node float32 is not compressed (checks_compression.py)."""
    for compression, above_one, large in (
        (hvd.Compression.none, 1 + 2**-12, 1e6),
        (hvd.Compression.fp16, 1.0, float("inf")),
        (hvd.Compression.bf16, 1.0, 999424.0),
    ):
        for x, want in ((1 + 2**-12, above_one), (1e6, large)):
            model = Toy(1, dtype=torch.float64)
            optimizer = distributed(model, compression=compression)
            model(x).backward()
            assert model.grads() == [pytest.approx(want, abs=0)]
            optimizer.zero_grad()
    model = Toy(2)
    optimizer = distributed(model, compression=Derived)
    model(1.0).backward()
    assert model.grads() == [0.0, 0.0]
    with pytest.raises(ValueError, match="Compression"):
        distributed(model, compression=7)


def check_compressors_by_hand() -> None:
    x = torch.tensor([1.0, -2.5], dtype=torch.float64)
    for compression, dtype in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
        small, ctx = compression.compress(x)
        assert small.dtype is dtype
        back = compression.decompress(small, ctx)
        assert back.dtype is torch.float64
        assert torch.equal(back, x)
        count = torch.arange(3)
        assert compression.compress(count)[0] is count
        assert compression.decompress(count, None) is count
    assert hvd.Compression.none.compress(x) == (x, None)
    small, ctx = hvd.Compression.fp16.compress(np.array([1.5]))
    assert small.dtype == np.float16
    assert hvd.Compression.fp16.decompress(small, ctx).dtype == np.float64


def buckets_of(optimizer: Any) -> list[list[int]]:
    reducer = optimizer._dcoll._reducer
    return sorted(sorted(reducer.bucket_params(k)) for k in range(reducer.num_buckets()))


def check_groups_are_reduced_together() -> None:
    model = Toy()
    w = model.w
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_by_one = distributed(Toy(), groups=100)
    with pytest.warns(DeprecationWarning, match="groups"):
        deprecated = distributed(Toy(), num_groups=2)
    for compression in (hvd.Compression.none, hvd.Compression.fp16, Quarters):
        lists = distributed(model, compression=compression, groups=[[w[3], w[0]], [w[4]]])
        for step in range(3):
            lists.zero_grad()
            model(2.0 * hvd.rank() + step).backward()
            assert model.grads() == [2 * mean_of_ranks() + step + i for i in range(5)]
            assert buckets_of(lists) == [[0, 3], [1], [2], [4]]
            lists.step()
    assert buckets_of(one_by_one) == [[i] for i in range(5)]
    assert buckets_of(deprecated) == [[0, 1, 2], [3, 4]]
    assert buckets_of(distributed(Toy(), groups=2)) == [[0, 1, 2], [3, 4]]
    assert buckets_of(distributed(Toy(), groups=0)) == [[0, 1, 2, 3, 4]]
    for wrong in (-1, "all", [w[0]], [[1]], [[w[0]], [w[0]]], [[torch.zeros(1)]]):
        with pytest.raises(ValueError, match="groups"):
            distributed(model, groups=wrong)
    assert buckets_of(distributed(model, bucket_mb=float("inf"))) == [[0, 1, 2, 3, 4]]
    with pytest.raises(ValueError, match="bucket_mb"):
        distributed(model, groups=2, bucket_mb=1.0)


def check_arguments_are_where_horovod_has_them() -> None:
    names = list(inspect.signature(hvd.DistributedOptimizer).parameters)
    assert names[:10] == [
        "optimizer", "named_parameters", "compression", "backward_passes_per_step", "op", "gradient_predivide_factor",
        "num_groups", "groups", "sparse_as_dense", "process_set",
    ]  # fmt: skip
    assert [int(op) for op in (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)] == list(range(6))
    model = Toy(3)
    optimizer = distributed(model, hvd.Compression.fp16, 2, hvd.Average, 2.0, 0, None, True)
    for x in (2.0, 4.0):
        model(x * hvd.rank()).backward()
    assert model.grads() == [6 * mean_of_ranks() + 2 * i for i in range(3)]
    assert optimizer.find_duplicates(["a", "b", "a"]) == {"a"}
    read = ("op", "backward_passes_per_step", "gradient_predivide_factor", "sparse_as_dense", "process_set")
    assert [getattr(optimizer, name) for name in read] == [hvd.Average, 2, 2.0, True, hvd.global_process_set]
    assert optimizer._parameter_names == {p: name for name, p in model.named_parameters()}
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    with pytest.raises(ValueError, match="gradient_predivide_factor not supported with op != Average"):
        distributed(model, gradient_predivide_factor=2.0, op=hvd.Sum)
    with pytest.raises(ValueError, match="gradient_predivide_factor is 0, but must be positive"):
        distributed(model, gradient_predivide_factor=0)
    for wrong in (hvd.Max, 0, 2, True, "sum"):
        with pytest.raises(ValueError, match="op is"):
            distributed(model, op=wrong)
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        distributed(model, backward_passes_per_step=0)


def check_no_sync() -> None:
    model = Toy(2)
    optimizer = distributed(model)
    for _ in range(2):
        optimizer.zero_grad()
        with optimizer.no_sync():
            model(float(hvd.rank()), [0]).backward()
            with optimizer.no_sync():
                model(float(hvd.rank()), [0]).backward()
            model(float(hvd.rank()), [0]).backward()
        assert model.grads() == [3.0 * hvd.rank(), None]
        model(float(hvd.rank()), [1]).backward()
        assert model.grads() == [3 * mean_of_ranks(), mean_of_ranks() + 1]
        optimizer.step()
    optimizer.zero_grad()
    with optimizer.no_sync():
        model(float(hvd.rank())).backward()
    optimizer.step()  # reduces what was not
    assert model.grads() == [mean_of_ranks(), mean_of_ranks() + 1]


def check_zero_grad_in_the_middle_of_backward() -> None:
    model = Toy(3)
    optimizer = distributed(model, bucket_mb=0.0)
    handle = model.w[0].register_hook(lambda _: optimizer.zero_grad())
    loss = (model.w[0] * model.w[1][:7].exp() * model.w[2][:7].exp()).sum()  # w[2]'s gradient comes first, w[0]'s last
    with pytest.raises(AssertionError, match="middle of backward"):
        loss.backward()
    handle.remove()
    optimizer.zero_grad()
    model(float(hvd.rank())).backward()
    assert model.grads() == [mean_of_ranks() + i for i in range(3)]


def adasum(vectors: list[np.ndarray]) -> np.ndarray:
    """The formula along the tree, in float64."""
    if len(vectors) == 1:
        return vectors[0]
    half = len(vectors) // 2
    a, b = adasum(vectors[:half]), adasum(vectors[half:])
    ab, aa, bb = a @ b, a @ a, b @ b
    return (1 - ab / aa / 2 if aa else 1) * a + (1 - ab / bb / 2 if bb else 1) * b


def power_of_two() -> bool:
    return hvd.size() & (hvd.size() - 1) == 0


def check_adasum_of_tensors() -> None:
    draw = np.random.default_rng(5)
    vectors = [draw.standard_normal(1001) for _ in range(hvd.size())]
    mine = torch.from_numpy(vectors[hvd.rank()].copy())
    if not power_of_two():
        with pytest.raises(ValueError, match=f"there are {hvd.size()}"):
            hvd.allreduce(mine, op=hvd.Adasum)
        return
    want = torch.from_numpy(adasum(vectors))
    # Each level of the tree rounds to the dtype once; values are of order 1, factors of order 1.
    for dtype, tolerance in (
        (torch.float64, 1e-13),
        (torch.float32, 1e-5),
        (torch.float16, 1e-2),
        (torch.bfloat16, 8e-2),
    ):
        for call in (hvd.allreduce, lambda t, **options: hvd.allreduce_async(t, **options).wait()):
            got = call(mine.to(dtype), op=hvd.Adasum, name="adasum")
            torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
            assert same_everywhere(got.view(torch.uint8))
    here = mine.clone()
    assert hvd.allreduce_(here, op=hvd.Adasum, prescale_factor=2.0, postscale_factor=0.5) is here
    torch.testing.assert_close(here, want, rtol=1e-13, atol=1e-13)
    with pytest.raises(ValueError, match="float"):
        hvd.allreduce(torch.ones(3, dtype=torch.int32), op=hvd.Adasum)
    with pytest.raises(ValueError, match="defined for allreduce"):
        hvd.reducescatter(mine, op=hvd.Adasum)


def check_adasum_optimizer() -> None:
    if not power_of_two():
        model = Toy()
        optimizer = distributed(model, op=hvd.Adasum)
        model(1.0).backward()
        with pytest.raises(ValueError, match=f"there are {hvd.size()}"):
            optimizer.step()
        return
    draw = np.random.default_rng(6)
    shapes = [(3, 4), (1,), (50,)]
    grads = [[draw.standard_normal(shape) for shape in shapes] for _ in range(hvd.size())]
    for compression, tolerance in ((hvd.Compression.none, 1e-12), (hvd.Compression.fp16, 2e-2), (Quarters16, 2e-2)):
        params = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in shapes]
        unused = nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([*params, unused], lr=0.5, momentum=0.9),
            op=hvd.Adasum,
            compression=compression,
            check_sync=1,
        )
        want = [np.ones(shape) for shape in shapes]
        velocity = [[np.zeros(shape) for shape in shapes] for _ in range(hvd.size())]
        for step in range(2):
            optimizer.zero_grad()
            for p, g in zip(params, grads[hvd.rank()], strict=True):
                (p * torch.from_numpy(g)).sum().backward()
            if step:
                optimizer.step()
            else:
                loss = optimizer.step(lambda: torch.tensor(float(hvd.rank())))
                assert loss.item() == hvd.rank()
            for i in range(len(shapes)):
                for rank, theirs in enumerate(velocity):
                    theirs[i] = 0.9 * theirs[i] + grads[rank][i]
                deltas = [-0.5 * theirs[i].reshape(-1) for theirs in velocity]
                want[i] = want[i] + adasum(deltas).reshape(shapes[i])
                torch.testing.assert_close(
                    params[i].detach(), torch.from_numpy(want[i]), rtol=tolerance, atol=tolerance
                )
            assert unused.tolist() == [1.0, 1.0]
            assert same_everywhere(*params)
    optimizer.synchronize()
    if hvd.size() > 1:
        with (
            pytest.raises(AssertionError, match="Skipping synchronization is not supported"),
            optimizer.skip_synchronize(),
        ):
            pass
    else:
        with optimizer.skip_synchronize():
            pass
    assert isinstance(optimizer, torch.optim.SGD)
    optimizer.set_backward_passes_per_step(2)
    optimizer.load_state_dict(optimizer.state_dict())


class Quarters16(Compressor):
    """float16, in Python."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


def check_parameters_that_drift_apart_are_named() -> None:
    model = Toy(4)
    optimizer = distributed(model, check_sync=2)
    for step in range(1, 5):
        optimizer.zero_grad()
        model(float(hvd.rank())).backward()
        if step == 3 and hvd.rank() == hvd.size() - 1:
            with torch.no_grad():
                model.w[1][2] += 1e-3
                model.w[3][0] += 1.0
        if step < 4 or hvd.size() == 1:
            optimizer.step()
            continue
        with pytest.raises(hvd.MismatchError, match=r"after step 4: w\.1 \(float32 \[8\]\)") as caught:
            optimizer.step()
        assert len(set(hvd.allgather_object(str(caught.value)))) == 1
        assert "and 1 more of 4 tensors" in str(caught.value)
        odd = "rank 1 another" if hvd.size() == 2 else f"ranks {', '.join(map(str, range(hvd.size() - 1)))} hold one"
        assert odd in str(caught.value)
    hvd.broadcast_parameters(model.state_dict(), 0)
    for _ in range(2):
        optimizer.zero_grad()
        model(float(hvd.rank())).backward()
        optimizer.step()
    with pytest.raises(ValueError, match="check_sync"):
        distributed(model, check_sync=-1)


def check_process_sets() -> None:
    comm = world.communicator()
    for included, theirs in ((True, comm), (False, None)):
        model = Toy(2)
        members = types.SimpleNamespace(included=lambda: included, comm=theirs)  # noqa: B023
        optimizer = distributed(model, process_set=members)
        for step in range(2):
            optimizer.zero_grad()
            model(float(hvd.rank()) + step).backward()
            x = mean_of_ranks() if included else float(hvd.rank())
            assert model.grads() == [x + step, x + step + 1]
            optimizer.step()
    with pytest.raises(ValueError, match="not known to this job"):
        distributed(model, process_set=hvd.ProcessSet([0]))


def check_steps_skipped_by_a_scaler_leave_compressed_buckets_whole() -> None:
    model = Toy(3, dtype=torch.float64)  # cast to float16; float32 on one node is not compressed
    optimizer = distributed(model, compression=hvd.Compression.fp16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    for step in range(4):
        before = [p.detach().clone() for p in model.w]
        optimizer.zero_grad()
        # In step 1 one rank's gradient is beyond float16; in step 2 one rank's is NaN.
        x = {1: 1e6, 2: float("nan")}.get(step, 1.0) if hvd.rank() == hvd.size() - 1 else 1.0
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = any((p != q).any() for p, q in zip(model.w, before, strict=True))
        assert moved == (step in (0, 3)), step
    assert same_everywhere(*model.w)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def check_layouts_and_dtypes_of_gradients() -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("needs torch: this version does not let gradients have another dtype")
    model = Toy(1, dtype=torch.bfloat16)
    model.w[0].grad_dtype = None  # torch does not keep the gradient's dtype then

    def widen(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad = p.grad.double()

    model.w[0].register_post_accumulate_grad_hook(widen)
    optimizer = distributed(model)
    with pytest.raises(hvd.DcollError, match=r"torch\.bfloat16.*its gradient is now torch\.float64"):
        model(1.0).backward()
    optimizer.zero_grad()


def boom(_: torch.Tensor) -> None:
    raise ValueError("boom")


def backward_and_step(loss: torch.Tensor, optimizer: Any) -> None:
    loss.backward()
    optimizer.step()


def check_a_backward_that_raises_on_the_last_rank() -> None:
    if hvd.size() == 1:
        return
    last = hvd.size() - 1
    ops = [hvd.Average, hvd.Adasum] if hvd.size() & last == 0 else [hvd.Average]
    members = hvd.add_process_set([0, last]) if hvd.size() > 2 else hvd.global_process_set
    for options in [*({"op": op} for op in ops), {"process_set": members}, {"bucket_mb": 0}]:
        model = Toy(3, 1100 if options.get("op") is hvd.Average else 7)  # with hooks, and without
        optimizer = distributed(model, **options)
        inside = "process_set" not in options or members.included()
        for step in range(4):
            failing = step % 2 == 0
            loss = model(float(hvd.rank()))
            if failing and hvd.rank() == last:
                model.w[1].register_hook(boom)
            optimizer.zero_grad()
            if failing and inside:
                with pytest.raises(ValueError if hvd.rank() == last else hvd.MismatchError, match="boom") as caught:
                    backward_and_step(loss, optimizer)
                assert hvd.rank() == last or f"rank {last}" in str(caught.value)
                model.w[1]._backward_hooks = None
            else:
                backward_and_step(loss, optimizer)
            ranks = [0, last] if "process_set" in options else range(hvd.size())
            own = [hvd.allgather_object([p.tolist() for p in model.parameters()])[rank] for rank in ranks]
            assert not inside or own == [own[0]] * len(own)
            assert not inside or model.w[0].any() == (step > 0)
    if hvd.size() > 2:
        hvd.remove_process_set(members)
