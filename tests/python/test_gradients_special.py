"""GradientSync where things are out of the ordinary: sparse gradients, checkpoints, errors, conversions."""

import copy
from collections.abc import Callable

import gradient_models
import pytest
import torch
from gradient_models import Toy, clear, sync_of
from local_ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from dcoll import _C, ArgumentError, Average, DcollError, MismatchError, ReduceOp, Sum, gradient_errors
from dcoll.optimizer import buckets
from dcoll.optimizer.gradients import GradientSync

every_test_twice = gradient_models.hooked_and_late


def embedding_grads(comm: _C.Communicator, mode: str) -> list[torch.Tensor]:
    """Three steps on an embedding; returns its dense gradient after each."""
    model = nn.ModuleDict({"table": nn.Embedding(6, 2, sparse=mode != "dense"), "out": nn.Linear(2, 1, bias=False)})
    nn.init.ones_(model["out"].weight)
    sync = sync_of(comm, model, sparse_as_dense=mode == "as_dense")
    found = []
    for step in range(3):
        clear(model, sync)
        rows = torch.tensor([comm.rank, comm.rank, step])
        model["out"](model["table"](rows)).sum().backward()
        grad = model["table"].weight.grad
        assert grad.is_sparse == (mode != "dense")
        found.append(grad.to_dense().clone())
        sync.after_step()
    assert len(sync.sparse.params) == (mode == "sparse")
    return found


@pytest.mark.parametrize("mode", ["sparse", "as_dense"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_sparse_gradients_equal_dense_ones(n: int, mode: str) -> None:
    want = run_ranks(n, lambda comm: embedding_grads(comm, "dense"))
    got = run_ranks(n, lambda comm: embedding_grads(comm, mode))
    for rank in range(n):
        for one, other in zip(got[rank], want[rank], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


@pytest.mark.parametrize("op", [Average, Sum])
def test_sparse_as_dense_leaves_gradients_sparse(op: ReduceOp) -> None:
    """On a rank that had none, too."""

    def body(comm: _C.Communicator) -> None:
        tables = nn.ModuleList([nn.Embedding(4, 2, sparse=True), nn.Embedding(4, 2), nn.Embedding(4, 2, sparse=True)])
        nn.init.zeros_(tables[0].weight)
        sync = sync_of(comm, tables, sparse_as_dense=True, op=op)
        optimizer = torch.optim.SparseAdam([tables[0].weight, tables[2].weight], lr=1.0)
        one = 1.0 if op is Sum else 0.5
        for step in range(3):
            clear(tables, sync)
            loss = tables[1](torch.tensor([0])).sum()
            if comm.rank == 1:
                loss = loss + tables[0](torch.tensor([3])).sum()
            if step > 0:
                loss = loss + tables[2](torch.tensor([2 * comm.rank])).sum()
            loss.backward()
            assert (tables[2].weight.grad is None) == (step == 0)
            for table, rows in ((tables[0], [3]), (tables[2], [0, 2]))[: 1 + (step > 0)]:
                grad = table.weight.grad
                assert grad.is_sparse
                assert grad.coalesce().indices().tolist() == [rows]
                assert grad.to_dense()[rows].eq(one).all()
            assert not tables[1].weight.grad.is_sparse
            optimizer.step()
            if op is Sum:
                with pytest.raises(DcollError, match="already the sum over all ranks"):
                    tables[0](torch.tensor([3])).sum().backward()
            sync.after_step()
        assert tables[0].weight.data[:3].eq(0).all()
        assert tables[0].weight.data[3].lt(-2.9).all()

    run_ranks(2, body)


def test_a_conversion_is_told_with_both_devices() -> None:
    error = gradient_errors.converted("w", torch.zeros(2, device="meta"), torch.zeros(3))
    assert "w was torch.float32 [2] on meta when" in str(error)
    assert "is now torch.float32 [3] on cpu" in str(error)


def test_sparse_on_some_ranks_only() -> None:
    def body(comm: _C.Communicator) -> None:
        model = nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True), "other": nn.Linear(2, 1, bias=False)})
        sync = sync_of(comm, model)
        for _ in range(2):
            clear(model, sync)
            loss = model["other"](torch.ones(2)).sum()
            if comm.rank == 1:
                loss = loss + model["table"](torch.tensor([3])).sum()
            loss.backward()
            grad = model["table"].weight.grad.to_dense()
            assert grad.tolist() == [[0.0, 0.0]] * 3 + [[0.5, 0.5]]
            sync.after_step()
        clear(model, sync)
        model["other"](torch.ones(2)).sum().backward()
        assert model["table"].weight.grad is None

    run_ranks(2, body)


@pytest.mark.parametrize("before", ["nothing", "dense", "sparse"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_gradient_sparse_here_and_dense_there_is_an_error_on_all_ranks(before: str, alone: bool) -> None:
    """Whatever the ranks have seen of it; and they go on in step."""

    def body(comm: _C.Communicator) -> None:
        weight = nn.Parameter(torch.zeros(4, 2))
        model = nn.ParameterList([weight] if alone else [weight, nn.Parameter(torch.zeros(3))])
        sync = sync_of(comm, model)

        def backward(sparse: bool) -> None:
            clear(model, sync)
            rows = nn.functional.embedding(torch.tensor([comm.rank]), weight, sparse=sparse)
            (rows.sum() + sum(p.sum() for p in model if p is not weight)).backward()

        def check(sparse: bool) -> None:
            backward(sparse)
            assert weight.grad is not None
            assert weight.grad.is_sparse == sparse
            assert weight.grad.to_dense().tolist() == [[0.25, 0.25]] * 4
            assert alone or model[1].grad.eq(1).all()
            sync.after_step()

        if before == "nothing":
            if not alone:
                model[1].sum().backward()  # all know that one as dense, and nothing of the other
                sync.after_step()
            expected = r"0 has a sparse gradient on one rank and a dense one on another: pass sparse_as_dense=True"
            errors: list[type[DcollError]] = [DcollError] * comm.size
        else:
            check(before == "sparse")
            check(before == "sparse")
            now = "dense" if before == "sparse" else "sparse"
            expected = rf"0 has a {now} gradient on rank 1, but had a {before} one before: pass sparse_as_dense=True"
            errors = [DcollError if rank == 1 else MismatchError for rank in range(comm.size)]
        for _ in range(2):
            with pytest.raises(errors[comm.rank], match=expected):
                backward(comm.rank == 1 if before != "sparse" else comm.rank != 1)
            assert all(p.grad is None for p in model)
        check(before == "sparse")
        check(before == "sparse")

    run_ranks(4, body)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules(reentrant: bool) -> None:
    initial = nn.ModuleList([nn.Linear(3, 3).double() for _ in range(4)])

    def body(comm: _C.Communicator) -> None:
        layers = copy.deepcopy(initial)

        def loss_of(rank: int, use_checkpoint: bool) -> torch.Tensor:
            h = (torch.arange(6.0, dtype=torch.float64).view(2, 3) + rank).requires_grad_()
            for i, layer in enumerate(layers):
                h = checkpoint(layer, h, use_reentrant=reentrant) if use_checkpoint and i in (1, 2) else layer(h)
            return (h**2).sum()

        want = torch.autograd.grad(
            sum(loss_of(rank, False) for rank in range(comm.size)) / comm.size, list(layers.parameters())
        )
        sync = sync_of(comm, layers)
        rounds, finish = [], sync.finish
        sync.finish = lambda: rounds.append(finish())  # type: ignore[method-assign]
        for step in range(2):
            clear(layers, sync)
            loss_of(comm.rank, True).backward()
            assert len(rounds) == step + 1, "the end of an inner backward was taken for the end"
            for p, g in zip(layers.parameters(), want, strict=True):
                torch.testing.assert_close(p.grad, g, rtol=1e-12, atol=1e-12)
            sync.after_step()

    run_ranks(2, body)


def test_a_model_that_is_one_reentrant_checkpoint() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync_of(comm, model)
        x = torch.tensor(2.0 * comm.rank, requires_grad=True)
        checkpoint(lambda x: model(x, [0, 1, 2, 3]), x, use_reentrant=True).backward()
        assert model.grads() == [1.0, 2.0, 3.0, 4.0]

    run_ranks(2, body)


class Exploding(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")


@pytest.mark.parametrize("cleared", [True, False], ids=["zero_grad", "no zero_grad"])
def test_a_backward_that_raised_is_forgotten(cleared: bool) -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model)
        for _ in range(2):
            clear(model, sync)
            with pytest.raises(ValueError, match="boom"):
                (model.w[3] * Exploding.apply(model.w[2].sum()) + model.w[3] * 2.0).sum().backward()
            if cleared:
                clear(model, sync)
            else:
                model.zero_grad()  # which the optimizer does not see
            model(2.0 * comm.rank, [0, 1, 2, 3]).backward()
            assert model.grads() == [1.0, 2.0, 3.0, 4.0]
            sync.after_step()

    run_ranks(2, body)


def test_the_last_owner_of_the_parameters_counts() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        first = sync_of(comm, model)
        second = sync_of(comm, model)
        assert not first._hooks
        model(2.0 * comm.rank, [0, 1]).backward()
        assert model.grads() == [1.0, 2.0, None, None]
        with pytest.raises(ArgumentError, match="another DistributedOptimizer"):
            GradientSync(comm, [model.w[0]], lambda p: "w")
        second.release()
        clear(model, second)
        model(2.0 * comm.rank, [0]).backward()
        assert model.grads()[0] == 2.0 * comm.rank

    run_ranks(2, body)


def test_a_replaced_owner_is_told_of_nothing() -> None:
    """Though it is alive, and had a frozen parameter that requires a gradient now, or a backward fails."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of luck")

    def body(comm: _C.Communicator) -> None:
        model = Toy()
        model.w[0].requires_grad_(False)
        first = sync_of(comm, model)
        model.w[0].requires_grad_(True)
        second = sync_of(comm, model)
        for _ in range(2):
            clear(model, second)
            model(2.0 * comm.rank, [0, 1]).backward()
            assert model.grads() == [1.0, 2.0, None, None]
        assert not first._hooks
        clear(model, second)
        loss = model(2.0 * comm.rank, [0, 1])
        if comm.rank == 0:
            with pytest.raises(RuntimeError, match="out of luck"):
                Fails.apply(loss).backward()
        else:
            with pytest.raises(MismatchError, match="out of luck"):
                loss.backward()
        clear(model, second)
        model(2.0 * comm.rank, [0, 1]).backward()
        assert model.grads() == [1.0, 2.0, None, None]

    run_ranks(2, body)


def test_different_models_are_told_apart() -> None:
    def body(comm: _C.Communicator) -> None:
        with pytest.raises(MismatchError, match=r"(?s)differ at number 0.*rank 0: w\.0.*\[5\].*rank 1: w\.0.*\[6\]"):
            sync_of(comm, Toy(width=5 + comm.rank))

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda comm: sync_of(comm, Toy(), passes=0), "backward_passes_per_step is 0"),
        (lambda comm: sync_of(comm, Toy().to("meta")), r"w\.0 is on device meta"),
        (
            lambda comm: GradientSync(
                comm, [torch.zeros(2, dtype=torch.complex64, requires_grad=True)], lambda p: "w.0"
            ),
            r"w\.0.*complex64",
        ),
    ],
    ids=["passes", "device", "dtype"],
)
def test_wrong_arguments(make: Callable[[_C.Communicator], object], text: str) -> None:
    def body(comm: _C.Communicator) -> None:
        with pytest.raises(ArgumentError, match=text):
            make(comm)

    run_ranks(1, body)


def test_converting_the_model_afterwards_is_told() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync_of(comm, model)
        model.double()
        with pytest.raises(DcollError, match=r"w\.\d was torch\.float32.*now torch\.float64.*then make the optimizer"):
            model(1.0, [0, 1, 2, 3]).backward()

    run_ranks(1, body)


@pytest.mark.parametrize("op", [Average, Sum])
def test_a_failed_peer_ends_backward(op: ReduceOp) -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model, op=op)
        model(1.0, [0, 1, 2, 3]).backward()
        clear(model, sync)
        if comm.rank == 1:
            comm.fail("KeyError: 'lost'")
            return
        with pytest.raises(DcollError, match="rank 1: KeyError: 'lost'"):
            model(1.0, [0, 1, 2, 3]).backward()

    run_ranks(2, body)


def test_a_gradient_copied_in_is_not_freed_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is another stream's, the allocator is told that the current one reads it."""
    told: list[tuple[torch.Tensor, object]] = []
    monkeypatch.setattr(buckets, "has_streams", lambda _: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the current one")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *found: told.append(found))
    view, own = torch.zeros(3), torch.ones(3)
    buckets.copy_in(view, own)
    assert torch.equal(view, own)
    assert [(one is own, stream) for one, stream in told] == [(True, "the current one")]
