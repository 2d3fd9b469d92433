"""GradientSync: what is in .grad when backward() returns, for every way of making gradients."""

import io

import gradient_models
import pytest
import torch
from gradient_models import Halved, Toy, clear, sync_of
from local_ranks import run_ranks
from torch import nn

from dcoll import _C, Compression, DcollError, Sum
from dcoll.optimizer.gradients import GradientSync

every_test_twice = gradient_models.hooked_and_late


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_average_when_backward_returns(n: int, set_to_none: bool) -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model)
        for step in range(4):
            clear(model, sync, set_to_none)
            model(2.0 * comm.rank + step, [0, 1, 2, 3]).backward()
            assert model.grads() == [n - 1 + step + i for i in range(4)]
            assert all(p.grad is view for p, view in zip(sync.params, sync._views, strict=True)), "copied, not a view"
            sync.after_step()

    run_ranks(n, body)


def test_buckets_follow_the_order_of_the_first_backward() -> None:
    def body(comm: _C.Communicator) -> list[int]:
        model = Toy(6)
        sync = sync_of(comm, model)
        # Ranks see different orders; rank 0's counts for all.
        use = [3, 0, 5] if comm.rank == 0 else [1, 2, 3, 4, 5, 0]
        model(0.0, use).backward()
        assert model.grads() == [0.0, 0.5, 1.0, 3.0, 2.0, 5.0]
        return [i for k in range(sync._reducer.num_buckets()) for i in sync._reducer.bucket_params(k)]

    first, second = run_ranks(2, body)
    assert first == second
    assert set(first[:3]) == {0, 3, 5}


def test_unused_here_used_elsewhere_and_nowhere() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model)
        for _ in range(3):
            clear(model, sync)
            model(4.0, [0, 1] if comm.rank == 0 else [0]).backward()
            assert model.grads() == [4.0, 2.5, None, None]
            sync.after_step()

    run_ranks(2, body)


def test_second_backward_adds_to_the_average() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync_of(comm, model)
        model(2.0 * comm.rank, [0, 1]).backward()
        assert model.grads() == [1.0, 2.0, None, None]
        model(4.0 * comm.rank, [1, 2]).backward()
        assert model.grads() == [1.0, 5.0, 4.0, None]
        if comm.rank == 0:  # partial, and on one rank only: the other contributes what it has
            model(8.0, [0]).backward()
        else:
            model(0.0, [3]).backward()
        assert model.grads() == [5.0, 5.0, 4.0, 1.5]

    run_ranks(2, body)


def test_sum() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model, op=Sum)
        for _ in range(2):
            clear(model, sync)
            model(1.0, [0, 1]).backward()
            assert model.grads() == [2.0, 4.0, None, None]
            sync.after_step()
        clear(model, sync)
        model(1.0, [0, 1]).backward()
        with pytest.raises(DcollError, match=r"second backward.*w\.\d.*zero_grad\(\)"):
            model(1.0, [0, 1]).backward()
        clear(model, sync)
        model(3.0, [0]).backward()
        assert model.grads() == [6.0, None, None, None]

    run_ranks(2, body)


def test_several_passes_per_step() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model, passes=3)
        for _ in range(2):
            clear(model, sync)
            for x in (1.0, 2.0):
                model(x * comm.rank, [0]).backward()
            assert model.grads()[0] == 3.0 * comm.rank, "sent before the last pass"
            model(0.0, [0, 1]).backward()
            assert model.grads() == [1.5, 1.0, None, None]
            sync.after_step()
        clear(model, sync)
        model(2.0 * comm.rank, [0]).backward()
        sync.before_step()  # fewer than announced
        assert model.grads()[0] == 1.0
        sync.after_step()
        clear(model, sync)
        model(9.0, [0]).backward()
        clear(model, sync)  # thrown away: the count starts anew
        for _ in range(3):
            model(2.0 * comm.rank, [0]).backward()
        assert model.grads()[0] == 3.0

    run_ranks(2, body)


def test_predivide() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync_of(comm, model, predivide=4.0)
        model(2.0 * comm.rank, [0, 1]).backward()
        assert model.grads() == [1.0, 2.0, None, None]

    run_ranks(2, body)


def test_gradients_set_by_hand() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model)
        for p in model.w[:2]:
            p.grad = torch.full((5,), 2.0 * comm.rank)
        sync.before_step()
        assert model.grads() == [1.0, 1.0, None, None]
        sync.after_step()
        sync.before_step()  # nothing new: nothing is sent
        assert model.grads() == [1.0, 1.0, None, None]

    run_ranks(2, body)


def test_no_backward_at_all() -> None:
    def body(comm: _C.Communicator) -> None:
        sync = sync_of(comm, Toy())
        sync.before_step()
        sync.after_step()

    run_ranks(2, body)


def test_shared_parameter() -> None:
    def body(comm: _C.Communicator) -> None:
        a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        b.weight = a.weight
        model = nn.Sequential(a, b)
        with torch.no_grad():
            a.weight.fill_(1.0)
        sync_of(comm, model)
        model(torch.full((1, 2), float(comm.rank))).sum().backward()
        # d/dw of sum(w w x): both uses add up before the gradient is ready.
        assert torch.equal(a.weight.grad, torch.full((2, 2), 2.0))

    run_ranks(2, body)


def test_frozen_later() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model)
        model(2.0 * comm.rank, [0, 1]).backward()
        sync.after_step()
        clear(model, sync)
        model.w[0].requires_grad_(False)
        model(2.0 * comm.rank, [0, 1]).backward()
        assert model.grads() == [None, 2.0, None, None]

    run_ranks(2, body)


@pytest.mark.parametrize("cleared", [True, False], ids=["zero_grad before", "straight to backward"])
def test_thawed_later(cleared: bool) -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        model.w[0].requires_grad_(False)
        sync = sync_of(comm, model)
        model(2.0 * comm.rank, [0, 1]).backward()
        assert model.grads() == [None, 2.0, None, None]
        sync.after_step()
        clear(model, sync)
        model.w[0].requires_grad_(True)
        for _ in range(2):
            if cleared:
                clear(model, sync)
            model(2.0 * comm.rank, [0, 1]).backward()
            assert model.grads() == [1.0, 2.0, None, None]
            sync.after_step()
            clear(model, sync)
        assert len(sync.params) == 4

    run_ranks(2, body)


def test_more_parameters() -> None:
    def body(comm: _C.Communicator) -> None:
        model, extra = Toy(), Toy(2)
        sync = sync_of(comm, model)
        model(2.0 * comm.rank, [0]).backward()
        sync.extend(extra.parameters())
        assert model.grads() == [1.0, None, None, None]
        clear(model, sync)
        (model(2.0 * comm.rank, [0, 1]) + extra(4.0 * comm.rank, [0])).backward()
        assert model.grads() == [1.0, 2.0, None, None]
        assert extra.grads() == [2.0, None]

    run_ranks(2, body)


def test_channels_last_gradients_keep_their_layout() -> None:
    def body(comm: _C.Communicator) -> None:
        conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        sync_of(comm, conv)
        conv(torch.ones(1, 3, 5, 5) * comm.rank).sum().backward()
        grad = conv.weight.grad
        assert grad is not None
        assert grad.stride() == conv.weight.stride()
        assert torch.equal(grad, torch.full_like(grad, 4.5))

    run_ranks(2, body)


def test_mixed_dtypes() -> None:
    def body(comm: _C.Communicator) -> None:
        params = [torch.zeros(3, dtype=d, requires_grad=True) for d in (torch.float64, torch.float32, torch.bfloat16)]
        GradientSync(comm, params, lambda p: str(p.dtype))
        sum((p * 2.0 * comm.rank).sum().double() for p in params).backward()
        for p in params:
            assert p.grad is not None
            assert p.grad.dtype == p.dtype
            assert p.grad.tolist() == [1.0] * 3

    run_ranks(2, body)


@pytest.mark.parametrize("shape", [(5,), (40000,), (200, 300), (1, 1), (0,)], ids=str)
def test_new_gradients_of_every_size_and_layout_are_brought_into_the_bucket(shape: tuple[int, ...]) -> None:
    def body(comm: _C.Communicator) -> None:
        model = nn.Module()
        model.p = nn.Parameter(torch.zeros(shape))
        model.turned = nn.Parameter(torch.zeros(shape[::-1]).t() if len(shape) == 2 else torch.zeros(shape))
        sync = sync_of(comm, model)
        numbers = torch.arange(float(model.p.numel())).reshape(shape) % 251
        for step in range(3):
            clear(model, sync)
            x = numbers + 2 * comm.rank + step
            ((model.p * x).sum() + (model.turned * (x + 1)).sum()).backward()
            for i, p in enumerate((model.p, model.turned)):
                assert p.grad is sync._views[i]
                assert p.grad.stride() == p.stride()
                assert torch.equal(p.grad, numbers + 1 + step + i), step
            sync.after_step()

    run_ranks(2, body)


def test_a_model_converted_after_the_optimizer_was_made_is_told() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy(1)
        sync_of(comm, model)
        model.double()
        with pytest.raises(DcollError, match="convert or move the model first"):
            model(1.0, [0]).backward()

    run_ranks(1, body)


def test_a_model_resized_after_the_optimizer_was_made_is_told() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy(1, width=5)
        sync_of(comm, model)
        model.w[0].data = torch.zeros(500000)
        with pytest.raises(DcollError, match="convert or move the model first"):
            model(1.0, [0]).backward()

    run_ranks(1, body)


def test_gradients_replaced_by_an_earlier_hook_in_another_layout() -> None:
    def body(comm: _C.Communicator) -> None:
        model = nn.Module()
        model.p = nn.Parameter(torch.zeros(4, 3))

        def turn(p: torch.Tensor) -> None:
            p.grad = p.grad.t().contiguous().t()  # type: ignore[union-attr]

        model.p.register_post_accumulate_grad_hook(turn)
        sync = sync_of(comm, model)
        numbers = torch.arange(12.0).reshape(4, 3)
        (model.p * (numbers + 2 * comm.rank)).sum().backward()
        assert torch.equal(model.p.grad, numbers + 1)
        assert model.p.grad is sync._views[0]

    run_ranks(2, body)


def _kept(p: torch.Tensor) -> dict[str, object]:
    """All the ways in which a program may keep a gradient."""
    grad = p.grad
    assert grad is not None
    weight = torch.ones_like(grad, requires_grad=True)
    ways = {"itself": grad, "detached": grad.detach(), "view": grad[1:], "array": grad.numpy()}
    return ways | {"saved": (weight, (weight * grad).sum())}


@pytest.mark.parametrize("way", ["itself", "detached", "view", "array", "saved"])
@pytest.mark.parametrize("options", [{}, {"compression": Compression.bf16}, {"compression": Halved}], ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_gradients_that_the_program_keeps_stay_what_they_are(
    n: int, options: dict[str, object], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCOLL_COMPRESS_LOCAL", "1")
    if way != "itself" and not hasattr(torch._C, "_storage_Use_Count"):
        pytest.skip("needs torch: this version does not tell who has a storage")

    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model, **options)
        history = []
        for step in range(5):  # the first one ends with other buckets
            clear(model, sync)
            use = [0, 1, 2] if step != 3 else [1, 2]  # zeros are written for what is not used, too
            model(2.0 * comm.rank + step, use).backward()
            assert model.grads() == [n - 1.0 + step + i if i in use else None for i in range(4)]
            if step != 3:
                history.append((step, _kept(model.w[0])[way]))
            sync.after_step()
        for step, kept in history:
            if way == "saved":
                weight, penalty = kept  # type: ignore[misc]
                penalty.backward()
                assert weight.grad[1] == n - 1 + step
            else:
                assert kept[1 if way == "view" else 0] == n - 1 + step  # type: ignore[index]

    run_ranks(n, body)


def test_gradients_that_nobody_keeps_stay_where_they_are() -> None:
    model = Toy()
    sync = sync_of(_C.connect_local(1)[0], model)
    model(0.0, [0, 1, 2, 3]).backward()
    places = {p.grad.data_ptr() for p in model.w if p.grad is not None}
    for step in range(4):
        clear(model, sync, set_to_none=step % 2 == 0)
        model(float(step), [0, 1, 2, 3]).backward()
        norm = sum(p.grad.detach().view(-1).norm() for p in model.w if p.grad is not None)  # looked at, not kept
        assert norm > 0
        assert places == {p.grad.data_ptr() for p in model.w if p.grad is not None}


def _of_another_storage(grad: torch.Tensor, way: str) -> None:
    """Halve it, by all the ways that give the same tensor other memory."""
    if way == "data":
        grad.data = grad.data * 0.5
    elif way == "set":
        grad.data.mul_(0.5)
        grad.set_(grad.clone())
    else:
        grad.mul_(0.5)
        grad.share_memory_()


@pytest.mark.parametrize("way", ["data", "set", "shared"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("options", [{}, {"compression": Compression.bf16}, {"compression": Halved}], ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_gradients_that_were_given_other_memory(
    n: int, options: dict[str, object], set_to_none: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCOLL_COMPRESS_LOCAL", "1")

    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model, **options)
        for step in range(4):
            clear(model, sync, set_to_none)
            for backward in range(2):  # the second one adds to what was halved
                model(2.0 * comm.rank + step, [0, 1, 2, 3]).backward()
                got = n - 1.0 + step
                assert model.grads() == [(got + i) * (1.5 if backward else 1.0) for i in range(4)]
                kept = [p.grad.data for p in model.w if p.grad is not None]
                for p in model.w:
                    _of_another_storage(p.grad, way)
                if way == "data":
                    assert [one[0] for one in kept] == [(got + i) * (1.5 if backward else 1.0) for i in range(4)]
            sync.after_step()

    run_ranks(n, body)


@pytest.mark.parametrize("finish", [True, False], ids=["by hand", "in backward"])
def test_a_model_converted_with_its_gradients_is_told(finish: bool) -> None:
    """To every rank, though one alone has converted its model."""

    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model)
        model(1.0, [0, 1, 2, 3]).backward()
        sync.after_step()
        if comm.rank == 0:
            model.double()
        reduce = sync.before_step if finish else model(1.0, [0, 1, 2, 3]).backward
        with pytest.raises(DcollError, match="convert or move"):
            reduce()

    run_ranks(2, body)


def test_a_gradient_is_saved_alone() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3, bias=False))
    sync = GradientSync(_C.connect_local(1)[0], model.parameters(), lambda _: "p")
    model(torch.ones(2, 64)).sum().backward()
    for p in sync.params:
        grad = p.grad
        assert grad is not None
        assert grad.untyped_storage().nbytes() == p.nbytes
        file = io.BytesIO()
        torch.save(grad, file)
        assert len(file.getvalue()) < p.nbytes + 4096
