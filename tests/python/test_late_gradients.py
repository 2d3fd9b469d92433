"""Gradients that are taken together when backward has ended: small ones, beside large ones that have hooks."""

import threading

import pytest
import torch
from gradient_models import Toy, clear, sync_of
from local_ranks import run_ranks
from torch import nn

from dcoll import _C, DcollError, Sum
from dcoll.optimizer.gradients import GradientSync
from dcoll.optimizer.late_gradients import late_ones


class Watched:
    """Counts how often the buckets are reduced."""

    def __init__(self, sync: GradientSync) -> None:
        self.rounds = 0
        self._finish = sync.finish
        sync.finish = self._count  # type: ignore[method-assign]

    def _count(self) -> None:
        self.rounds += 1
        self._finish()


def test_which_are_late() -> None:
    sizes = (1, 8, 9, 0, 8)
    params = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    assert late_ones(params, 64) == [0, 1, 3, 4]
    assert late_ones(params, 0) == [3]
    many = [torch.zeros(1 << 17, dtype=torch.uint8)] * 9
    assert late_ones(many, 1 << 20) == list(range(8))


def test_a_backward_of_either_kind_alone() -> None:
    """Toy's four parameters are late from 20 bytes; the fifth is not."""

    def body(comm: _C.Communicator) -> None:
        model = Toy()
        model.w.append(nn.Parameter(torch.zeros(100)))
        sync = sync_of(comm, model, late_bytes=20)
        assert len(sync._hooks) == 1
        watched = Watched(sync)
        for step in range(3):
            for use in ([0, 1, 2, 3], [4], [1, 4], [2], [0, 1, 2, 3, 4]):
                clear(model, sync)
                rounds = watched.rounds
                model(2.0 * comm.rank, use).backward()
                assert watched.rounds == rounds + 1
                assert model.grads() == [1.0 + i if i in use else None for i in range(5)], (step, use)
                sync.after_step()
        assert len(sync._hooks) == 1

    run_ranks(2, body)


def test_other_models_are_no_news() -> None:
    def body(comm: _C.Communicator) -> None:
        one, other = Toy(), Toy()
        syncs = [sync_of(comm, model, late_bytes=4096) for model in (one, other)]
        watched = [Watched(sync) for sync in syncs]
        for model, sync in zip((one, other), syncs, strict=True):
            clear(model, sync)
        one(2.0 * comm.rank, [0]).backward()
        assert [w.rounds for w in watched] == [1, 0]
        other(2.0 * comm.rank, [1]).backward()
        torch.zeros(1, requires_grad=True).sum().backward()
        assert torch.autograd.grad(one(1.0, [2]), one.w[2])[0] is not None
        assert [w.rounds for w in watched] == [1, 1]
        assert one.grads() == [1.0, None, None, None]
        assert other.grads() == [None, 2.0, None, None]

    run_ranks(2, body)


@pytest.mark.parametrize("way", ["kept", "zeroed", "no_sync"])
def test_gradients_that_are_kept(way: str) -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model, late_bytes=4096)
        assert not sync._hooks
        if way == "no_sync":
            with sync.no_sync():
                model(2.0 * comm.rank, [0, 1]).backward()
            assert model.grads() == [2.0 * comm.rank, 2.0 * comm.rank + 1, None, None]
        else:
            model(2.0 * comm.rank, [0, 1]).backward()
            assert model.grads() == [1.0, 2.0, None, None]
        if way == "zeroed":
            clear(model, sync, set_to_none=False)
        model(2.0 * comm.rank, [0, 1]).backward()
        factor = 1 if way == "zeroed" else 2
        assert model.grads() == [1.0 * factor, 2.0 * factor, None, None]
        sync.after_step()

    run_ranks(2, body)


def test_a_sum_is_not_summed_again() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model, op=Sum, late_bytes=4096)
        model(2.0 * comm.rank, [0]).backward()
        with pytest.raises(DcollError, match="a second backward added to the gradient"):
            model(1.0, [0]).backward()
        clear(model, sync)
        model(2.0 * comm.rank, [0]).backward()
        assert model.grads()[0] == 2.0
        comm.barrier_sync()

    run_ranks(2, body)


def test_a_backward_in_another_thread() -> None:
    """It is not watched, but its hooks tell; and where it has none, step() reduces."""

    def body(comm: _C.Communicator) -> None:
        model = Toy()
        model.w.append(nn.Parameter(torch.zeros(100)))
        sync = sync_of(comm, model, late_bytes=20)
        for use in ([0, 1, 4], [0, 1]):
            clear(model, sync)
            thread = threading.Thread(target=lambda use=use: model(2.0 * comm.rank, use).backward())
            thread.start()
            thread.join()
            sync.before_step()
            assert model.grads() == [1.0 + i if i in use else None for i in range(5)]
            sync.after_step()

    run_ranks(2, body)


def test_backward_that_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcoll.optimizer.gradients.watch", lambda _: False)

    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model, late_bytes=4096)
        assert len(sync._hooks) == 4
        model(2.0 * comm.rank, [0, 3]).backward()
        assert model.grads() == [1.0, None, None, 4.0]

    run_ranks(2, body)


def test_zero_grad_in_the_middle_of_backward() -> None:
    def body(comm: _C.Communicator) -> None:
        model, other = Toy(), Toy()
        sync = sync_of(comm, model, late_bytes=4096)
        said = []

        def interfere(_: torch.Tensor) -> None:
            try:
                sync.before_zero_grad(True)
            except AssertionError as error:
                said.append(str(error))

        model.w[0].register_post_accumulate_grad_hook(interfere)
        model(2.0 * comm.rank, [0, 1]).backward()
        assert len(said) == 1
        assert model.grads() == [1.0, 2.0, None, None]
        clear(model, sync)
        other.w[0].register_post_accumulate_grad_hook(interfere)
        other(1.0, [0]).backward()  # which is none of its business
        assert len(said) == 1

    run_ranks(2, body)
