"""PowerSGD among ranks that are threads: the results, what is kept, and what is out of the ordinary."""

from collections.abc import Iterator

import gradient_models
import pytest
import torch
from gradient_models import clear, sync_of
from local_ranks import run_ranks
from power_sgd_twin import Twin, gradient_of
from torch import nn

from dcoll import _C, ArgumentError, Average, Compression, DcollError, ReduceOp, Sum
from dcoll.optimizer import power_sgd
from dcoll.optimizer.gradients import GradientSync
from dcoll.optimizer.power_sgd import MatrixState, PowerSGDReducer

every_test_twice = gradient_models.hooked_and_late

SHAPES = {"w": (40, 30), "b": (40,), "conv": (16, 6, 3, 3), "small": (4, 4)}
COMPRESSED = ("w", "conv")
RANK = 3


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DCOLL_COMPRESS_LOCAL", "1")
    return


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64, names: tuple[str, ...] = tuple(SHAPES)) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(SHAPES[name], dtype=dtype)))

    def backward(self, rank: int, step: int, without: tuple[str, ...] = ()) -> None:
        """The gradients are gradient_of()."""
        of = {name: p for name, p in self.named_parameters() if name not in without}
        torch.stack(
            [(p * gradient_of(p.shape, rank, step, n).to(p.dtype)).sum() for n, p in of.items()]
        ).sum().backward()


def made(comm: _C.Communicator, model: nn.Module, **options: object) -> GradientSync:
    sync = sync_of(comm, model, **{"compression": Compression.powersgd(RANK), "bucket_bytes": 20000} | options)
    assert isinstance(sync._reducer, PowerSGDReducer)
    return sync


def twin_of(name: str, ranks: int) -> Twin:
    columns = SHAPES[name][1:]
    like = torch.empty(0, dtype=torch.float64)
    return Twin(MatrixState(name).first_q(RANK, torch.Size(columns).numel(), 0, like), ranks)


def average(name: str, ranks: int, step: int) -> torch.Tensor:
    return sum(gradient_of(SHAPES[name], r, step, name) for r in range(ranks)) / ranks  # type: ignore[return-value]


def expect_equal_bits(found: list[list[torch.Tensor]]) -> None:
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def every_second(params: list[torch.Tensor]) -> list[int]:
    return [i % 2 for i in range(len(params))]


OPTIONS: list[tuple[ReduceOp, dict[str, object]]] = [
    (Average, {}),
    (Average, {"predivide": 2.0}),
    (Sum, {"bucket_bytes": 0, "first_bucket_bytes": 0}),
    (Sum, {"group_of": every_second}),
    (Average, {"bucket_bytes": 1 << 20, "first_bucket_bytes": 1 << 20}),
]


@pytest.mark.parametrize(("op", "options"), OPTIONS, ids=["whole", "predivided", "single", "groups", "one_bucket"])
@pytest.mark.parametrize("n", [2, 3])
def test_steps_are_the_twins(n: int, op: ReduceOp, options: dict[str, object]) -> None:
    def body(comm: _C.Communicator) -> list[torch.Tensor]:
        model = Model()
        sync = made(comm, model, op=op, **options)
        twins = {name: twin_of(name, n) for name in COMPRESSED}
        scale = n if op is Sum else 1
        for step in range(4):
            clear(model, sync, set_to_none=step != 2)
            model.backward(comm.rank, step)
            for name, p in model.named_parameters():
                every = [gradient_of(p.shape, r, step, name) for r in range(n)]
                want = twins[name].step(every, scale) if name in twins else average(name, n, step) * scale
                torch.testing.assert_close(p.grad, want, rtol=1e-9, atol=1e-9)
            sync.after_step()
        return [p.grad for p in model.parameters()]

    expect_equal_bits(run_ranks(n, body))


def test_what_has_no_more_than_the_rank_arrives_whole() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Model(torch.float32, ("w",))
        sync = made(comm, model)
        left, right = torch.randn(40, RANK, generator=torch.Generator().manual_seed(1)), torch.linspace(-1, 1, 30)
        for step in range(3):
            clear(model, sync)
            whole = left @ torch.stack([right**k for k in range(RANK)])
            (model.w * whole * (comm.rank + step)).sum().backward()
            torch.testing.assert_close(model.w.grad, whole * (0.5 + step), rtol=1e-4, atol=1e-4)
            sync.after_step()

    run_ranks(2, body)


def test_what_was_lost_is_what_is_kept() -> None:
    """The sum of what was applied is that of the true averages, but for the average of what ranks keep."""

    def body(comm: _C.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        model = Model(torch.float32)
        sync = made(comm, model)
        applied = torch.zeros_like(model.w)
        for step in range(20):
            clear(model, sync)
            model.backward(comm.rank, step)
            applied += model.w.grad
            sync.after_step()
        return applied.detach(), sync._reducer.kept(0)["error"]

    found = run_ranks(3, body)
    true = sum(average("w", 3, step) for step in range(20))
    lost = sum(error for _, error in found) / 3
    assert float((true - found[0][0]).abs().max()) > 0.1
    torch.testing.assert_close((found[0][0] + lost).double(), true, rtol=1e-4, atol=1e-3)
    assert float(lost.norm()) < 8 * float(average("w", 3, 0).norm())  # it does not grow from step to step


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("rank", [1, 4, 6])
def test_float32_goes_through_the_core_or_through_torch(
    rank: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same within roundings; ranks have equal bits either way. LAPACK's depend on the CPU: not in the core."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    if threads == 1:
        monkeypatch.delattr(torch.linalg, "qr")

    def body(comm: _C.Communicator) -> list[torch.Tensor]:
        model = Model(torch.float32)
        sync = made(comm, model, compression=Compression.powersgd(rank, min_compression_rate=1.0))
        columns = {name: torch.Size(SHAPES[name][1:]).numel() for name in COMPRESSED}
        twins = {n: Twin(MatrixState(n).first_q(rank, columns[n], 0, torch.float64), comm.size) for n in COMPRESSED}
        for step in range(4):
            clear(model, sync)
            model.backward(comm.rank, step)
            for name, twin in twins.items():
                want = twin.step([gradient_of(SHAPES[name], r, step, name) for r in range(comm.size)])
                torch.testing.assert_close(getattr(model, name).grad.double(), want, rtol=1e-3, atol=1e-4)
            sync.after_step()
        return [p.grad for p in model.parameters()]

    assert power_sgd.in_core(torch.zeros(2, 2)) == (threads == 1)
    expect_equal_bits(run_ranks(3, body))


def test_a_bad_float32_makes_all_of_its_matrix_nan() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Model(torch.float32)
        sync = made(comm, model)
        is_as_expected = torch.Tensor.isfinite, torch.Tensor.isnan
        for of_rank_1, is_bad in ((1.0, False), (float("nan"), True), (2.0, False), (float("inf"), True), (3.0, False)):
            clear(model, sync)
            (model.w * torch.full((40, 30), of_rank_1 if comm.rank else 1.0)).sum().backward()
            assert is_as_expected[is_bad](model.w.grad).all()
            sync.after_step()

    run_ranks(2, body)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_step_arrives_and_is_forgotten(bad: float) -> None:
    """It is bad on one rank alone."""

    def body(comm: _C.Communicator) -> None:
        model = Model()
        sync = made(comm, model)
        twin = twin_of("w", 2)
        for step in range(4):
            clear(model, sync)
            if step == 2:
                before = sync._reducer.kept(0)
                hook = model.w.register_hook(lambda g: g.index_fill(0, torch.tensor([1]), bad) if comm.rank else g)
                model.backward(comm.rank, step)
                hook.remove()
                assert model.w.grad.isnan().all()
                assert model.conv.grad.isfinite().all()
                after = sync._reducer.kept(0)
                assert all(torch.equal(before[key], after[key]) for key in ("q", "error"))
            else:
                model.backward(comm.rank, step)
                want = twin.step([gradient_of(SHAPES["w"], r, step, "w") for r in range(2)])
                torch.testing.assert_close(model.w.grad, want, rtol=1e-9, atol=1e-9)
            sync.after_step()

    run_ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_zeros_and_few_directions_do_not_stay(dtype: torch.dtype) -> None:
    """After gradients of zeros, and of one direction alone, others arrive as well as ever."""

    def body(comm: _C.Communicator) -> None:
        model = Model(dtype, names=("w",))
        sync = made(comm, model)
        one = torch.zeros(40, 30, dtype=dtype)
        one[3, 4] = 1.0
        target = (gradient_of((40, 2), 0, 0) @ gradient_of((2, 30), 1, 0)).to(dtype)
        for given in (torch.zeros_like(one), one, one, target * 1e-30, target * 1e30):
            clear(model, sync)
            (model.w * given).sum().backward()
            torch.testing.assert_close(model.w.grad, given, rtol=1e-6, atol=1e-6 * float(given.abs().max()))
            sync.after_step()

    run_ranks(2, body)


def test_missing_here_and_everywhere() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Model()
        sync = made(comm, model)
        twins = {name: twin_of(name, 2) for name in COMPRESSED}
        for step in range(5):
            clear(model, sync)
            gone = {1: "w", 3: "conv"}.get(step, "")
            model.backward(comm.rank, step, (gone, "small") if comm.rank or step == 3 else ("small",))
            assert model.small.grad is None
            for name in COMPRESSED:
                if step == 3 and name == gone:
                    assert model.conv.grad is None
                    continue
                every = [gradient_of(SHAPES[name], r, step, name) * (r == 0 or name != gone) for r in range(2)]
                torch.testing.assert_close(getattr(model, name).grad, twins[name].step(every), rtol=1e-9, atol=1e-9)
            sync.after_step()

    run_ranks(2, body)


def test_more_parameters_later() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Model(names=("b", "w"))
        sync = made(comm, model)
        twins = {name: twin_of(name, 2) for name in COMPRESSED}
        for step in range(5):
            if step == 2:
                model.conv = nn.Parameter(torch.zeros(SHAPES["conv"], dtype=torch.float64))
                names = {id(p): name for name, p in model.named_parameters()}
                sync.name_of = lambda p, names=names: names[id(p)]
                clear(model, sync)
                sync.extend([model.conv])
            clear(model, sync)
            model.backward(comm.rank, step)
            for name in COMPRESSED[: 1 if step < 2 else 2]:
                every = [gradient_of(SHAPES[name], r, step, name) for r in range(2)]
                torch.testing.assert_close(getattr(model, name).grad, twins[name].step(every), rtol=1e-9, atol=1e-9)
            sync.after_step()

    run_ranks(2, body)


def test_passes_are_added_up_first() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Model()
        sync = made(comm, model, passes=2)
        twin = twin_of("w", 2)
        for step in (0, 2):
            clear(model, sync)
            model.backward(comm.rank, step)
            model.backward(comm.rank, step + 1)
            every = [sum(gradient_of(SHAPES["w"], r, step + i, "w") for i in range(2)) for r in range(2)]
            torch.testing.assert_close(model.w.grad, twin.step(every), rtol=1e-9, atol=1e-9)  # type: ignore[arg-type]
            sync.after_step()

    run_ranks(2, body)


def test_layouts_and_autocast() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Model(torch.float32, ("w", "conv")).to(memory_format=torch.channels_last)
        assert not model.conv.is_contiguous()
        sync = made(comm, model)
        twins = {name: twin_of(name, 2) for name in COMPRESSED}
        for step in range(3):
            clear(model, sync)
            with torch.autocast("cpu"):
                model.backward(comm.rank, step)
            for name in COMPRESSED:
                want = twins[name].step([gradient_of(SHAPES[name], r, step, name) for r in range(2)])
                torch.testing.assert_close(getattr(model, name).grad.double(), want, rtol=1e-3, atol=1e-4)
            sync.after_step()

    run_ranks(2, body)


def test_nothing_in_a_gradient() -> None:
    def body(comm: _C.Communicator) -> None:
        model = nn.ParameterList([torch.zeros(0, 5), torch.zeros(5, 0), torch.zeros(()), torch.zeros(40, 30)])
        sync = made(comm, model, bucket_bytes=0, first_bucket_bytes=0)
        for _ in range(2):
            clear(model, sync)
            sum((p * (comm.rank + 1)).sum() for p in model).backward()  # type: ignore[union-attr]
            assert model[2].grad == 1.5
            torch.testing.assert_close(model[3].grad, torch.full((40, 30), 1.5))
            sync.after_step()

    run_ranks(2, body)


def test_half_floats_travel_as_they_are() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Model(torch.bfloat16)
        sync = made(comm, model)
        assert not any(sync._reducer._compressible)  # type: ignore[union-attr]
        (model.w * (comm.rank + 1)).sum().backward()
        assert model.w.grad.eq(1.5).all()

    run_ranks(2, body)


def test_on_one_node_nothing_is_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DCOLL_COMPRESS_LOCAL")

    def body(comm: _C.Communicator) -> None:
        sync = sync_of(comm, model := Model(), compression=Compression.powersgd(RANK))
        assert isinstance(sync._reducer, _C.Reducer)
        model.backward(comm.rank, 0)
        torch.testing.assert_close(model.w.grad, average("w", 2, 0))

    run_ranks(2, body)


def test_state_is_saved_and_loaded() -> None:
    def body(comm: _C.Communicator) -> None:
        found = []
        model = Model()
        sync = made(comm, model)
        for step in range(2):
            clear(model, sync)
            model.backward(comm.rank, step)
            sync.after_step()
        saved = {i: kept for i in range(len(sync.params)) if (kept := sync._reducer.kept(i))}
        assert sorted(saved) == [0, 2]
        assert saved[0]["error"].shape == (40, 30)
        assert saved[0]["q"].shape == (RANK, 30)
        for load in (False, True):
            if load:
                model = Model()
                sync = made(comm, model)
                for i, kept in saved.items():
                    sync._reducer.keep(i, kept)
            clear(model, sync)
            model.backward(comm.rank, 2)
            found.append(model.w.grad)
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
        sync._reducer.keep(1, saved[0])  # which is not compressed
        assert sync._reducer.kept(1) == {}
        flat = torch.arange(864.0)  # as the core's Reducer keeps it, of another compression
        sync._reducer.keep(2, {"error": flat.numpy()})
        assert torch.equal(sync._reducer.kept(2)["error"], flat.view(16, 54).double())
        with pytest.raises(ArgumentError, match=r"is of shape \[40, 30\], but must be of \[16, 6, 3, 3\]"):
            sync._reducer.keep(2, saved[0])

    run_ranks(2, body)


@pytest.mark.parametrize("at", ["b", "w", "conv"])
def test_after_a_failed_backward_all_go_on(at: str) -> None:
    def body(comm: _C.Communicator) -> None:
        model = Model()
        sync = made(comm, model, bucket_bytes=0, first_bucket_bytes=0)
        twin = twin_of("w", 2)

        def fail(_: torch.Tensor) -> None:
            raise ValueError("a hook of the user's")

        for step in range(4):
            clear(model, sync)
            if step == 2:
                hook = getattr(model, at).register_hook(fail) if comm.rank == 1 else None
                with pytest.raises(ValueError if hook else DcollError, match="a hook of the user's"):
                    model.backward(comm.rank, step)
                if hook:
                    hook.remove()
                continue
            model.backward(comm.rank, step)
            want = twin.step([gradient_of(SHAPES["w"], r, step, "w") for r in range(2)])
            torch.testing.assert_close(model.w.grad, want, rtol=1e-9, atol=1e-9)
            sync.after_step()

    run_ranks(2, body)


@pytest.mark.parametrize("rank", [0, -1, 2.5, "4", True, None])
def test_wrong_ranks(rank: object) -> None:
    with pytest.raises(ArgumentError, match=r"got rank .*, but takes a whole number of 1 or more"):
        Compression.powersgd(rank)  # type: ignore[arg-type]


def test_other_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="got seed -1, but takes"):
        Compression.powersgd(seed=-1)
    for rate in (0.5, float("nan"), "2"):
        with pytest.raises(ArgumentError, match=r"min_compression_rate .*, but takes a number of 1 or more"):
            Compression.powersgd(min_compression_rate=rate)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="got start_step True, but takes"):
        Compression.powersgd(start_step=True)


def test_first_steps_travel_as_they_are() -> None:
    """Then directions begin as in a first step; whoever has some goes on with them."""

    def body(comm: _C.Communicator) -> None:
        model = Model()
        sync = made(comm, model, compression=Compression.powersgd(RANK, start_step=2))
        twins = {name: twin_of(name, comm.size) for name in COMPRESSED}
        for step in range(4):
            clear(model, sync)
            model.backward(comm.rank, step)
            for name, p in model.named_parameters():
                want = average(name, comm.size, step)
                if name in COMPRESSED and step >= 2:
                    want = twins[name].step([gradient_of(SHAPES[name], r, step, name) for r in range(comm.size)])
                torch.testing.assert_close(p.grad, want)
            assert bool(sync._reducer.kept(0)) == (step >= 2)
            sync.after_step()
        sync.extend([nn.Parameter(torch.zeros(40, 30))])  # of the same job: the schedule goes on
        assert sync._reducer._compresses(len(sync.params) - 1)
        again = made(comm, Model(), compression=Compression.powersgd(RANK, start_step=2))
        again._reducer.keep(0, sync._reducer.kept(0))
        assert [again._reducer._compresses(i) for i in range(4)] == [True, False, False, False]

    run_ranks(2, body)
