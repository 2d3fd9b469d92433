"""GradientSync where ranks do not do the same: no backward on some, parameters that come late or are used by some."""

import gradient_models
import pytest
import torch
from gradient_models import Toy, clear, sync_of
from local_ranks import run_ranks
from torch import nn

from dcoll import _C, DcollError, Sum
from dcoll.optimizer.gradients import GradientSync

every_test_twice = gradient_models.hooked_and_late


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("without", [0, -1], ids=["the first", "the last"])
def test_a_rank_without_backward_contributes_zeros(n: int, without: int) -> None:
    def body(comm: _C.Communicator) -> list[int]:
        model = Toy()
        sync = sync_of(comm, model)
        for step in range(4):
            clear(model, sync)
            if step == 1 or comm.rank != without % n:
                model(6.0, [0, 3]).backward()
            sync.before_step()
            share = 1.0 if step == 1 else (n - 1) / n
            assert model.grads() == ([6 * share, None, None, 9 * share] if share else [None] * 4)
            sync.after_step()
        return [i for k in range(sync._reducer.num_buckets()) for i in sync._reducer.bucket_params(k)]

    orders = run_ranks(n, body)
    assert all(order == orders[0] for order in orders)
    assert set(orders[0][:2]) == {0, 3} or n == 1, "the order of a rank 0 that had no backward"


@pytest.mark.parametrize("passes", [1, 2])
def test_a_rank_without_backward_where_sums_are_wanted(passes: int) -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model, op=Sum, passes=passes)
        for step in range(4):
            clear(model, sync)
            for _ in range(passes):
                if step % 3 == comm.rank:
                    model(1.0, [0]).backward()
            sync.before_step()
            assert model.grads() == [None if step % 3 == 2 else passes, None, None, None]
            sync.after_step()

    run_ranks(2, body)


def test_a_closure_may_bring_the_backward() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model)
        rounds, finish = [], sync.finish
        sync.finish = lambda: rounds.append(finish())  # type: ignore[method-assign]
        for step in range(3):
            sync.before_step(closure_follows=True)
            assert len(rounds) == step
            clear(model, sync)
            model(2.0 * comm.rank, [0]).backward()
            sync.before_step()
            assert len(rounds) == step + 1
            sync.after_step()
        assert model.grads() == [1.0, None, None, None]

    run_ranks(2, body)


@pytest.mark.parametrize("op", [None, Sum], ids=["average", "sum"])
@pytest.mark.parametrize("cleared", ["optimizer", "model"])
def test_a_thawed_parameter_that_one_rank_does_not_use(op: object, cleared: str) -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        for i in (0, 3):
            model.w[i].requires_grad_(False)
        sync = sync_of(comm, model, **({} if op is None else {"op": op}))
        factor = 1 if op is None else 2
        for step in range(4):
            if cleared == "optimizer":
                clear(model, sync)
            else:
                model.zero_grad()
            if step == 1:
                for i in (0, 3):
                    model.w[i].requires_grad_(True)
            model(2.0, [0, 1] if step and comm.rank else [1]).backward()
            assert model.grads() == [factor * 1.0 if step else None, factor * 3.0, None, None]
            sync.after_step()
        assert len(sync.params) == 4

    run_ranks(2, body)


def test_a_backward_through_thawed_parameters_alone() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        model.w[0].requires_grad_(False)
        sync = sync_of(comm, model)
        for step in range(4):
            if step == 1:
                model.w[0].requires_grad_(True)
                for p in list(model.w)[1:]:
                    p.requires_grad_(False)
            model(2.0 * comm.rank, [0, 1] if step == 0 else [0]).backward()
            assert model.grads() == ([1.0, None, None, None] if step else [None, 2.0, None, None])
            sync.before_step()
            sync.after_step()
            model.zero_grad()

    run_ranks(2, body)


def test_a_thawed_parameter_with_sparse_gradients() -> None:
    def body(comm: _C.Communicator) -> None:
        model = nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True), "out": nn.Linear(2, 1, bias=False)})
        nn.init.ones_(model["out"].weight)
        model["table"].weight.requires_grad_(False)
        sync = sync_of(comm, model)
        for step in range(4):
            model.zero_grad()
            if step == 1:
                model["table"].weight.requires_grad_(True)
            x = model["table"](torch.tensor([3])) if comm.rank else torch.ones(2)
            model["out"](x).sum().backward()
            grad = model["table"].weight.grad
            assert (grad is not None) == (step > 0)
            if step:
                assert grad.to_dense().tolist() == [[0.0, 0.0]] * 3 + [[0.5, 0.5]]
            sync.after_step()
        assert len(sync.sparse.params) == 1

    run_ranks(2, body)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_parameters_added_after_backward(n: int) -> None:
    def body(comm: _C.Communicator) -> None:
        model, extra = Toy(), Toy()
        extra.w[3].requires_grad_(False)
        sync = sync_of(comm, model)
        (model(1.0 * comm.rank, [0]) + extra(1.0 * comm.rank, [0, 1] if comm.rank else [1])).backward()
        sync.extend(extra.parameters())
        sync.before_step()
        mean = (n - 1) / 2
        assert model.grads() == [mean, None, None, None]
        assert extra.grads() == [mean if n > 1 else None, mean + 1, None, None]
        sync.after_step()

    run_ranks(n, body)


def test_a_sparse_sum_is_not_summed_again() -> None:
    def body(comm: _C.Communicator) -> None:
        table = nn.Embedding(4, 1, sparse=True)
        sync = GradientSync(comm, [table.weight], lambda _: "table", op=Sum)
        rows = torch.tensor([1])
        for _ in range(2):
            table(rows).sum().backward()
            assert table.weight.grad.to_dense().tolist() == [[0.0], [2.0], [0.0], [0.0]]
            with pytest.raises(DcollError, match=r"second backward.*table.*optimizer\.zero_grad\(\)"):
                table(rows).sum().backward()
            clear(table, sync)
        table(rows).sum().backward()
        with sync.no_sync():
            table(rows).sum().backward()
        with pytest.raises(DcollError, match=r"second backward.*table.*optimizer\.zero_grad\(\)"):
            sync.before_step()
        table.zero_grad()
        sync.before_zero_grad(True)
        table(rows).sum().backward()
        table.zero_grad()
        table(rows).sum().backward()  # of a gradient that is new
        assert table.weight.grad.to_dense().tolist() == [[0.0], [2.0], [0.0], [0.0]]

    run_ranks(2, body)
