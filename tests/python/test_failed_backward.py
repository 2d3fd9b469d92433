"""A backward that raises on some ranks: all have an error, no gradient is left, and all go on in step."""

import re
from collections.abc import Callable
from typing import Any

import gradient_models
import pytest
import torch
from gradient_models import Halved, Toy, clear, sync_of
from local_ranks import run_ranks
from torch import nn

from dcoll import _C, Compression, DcollError, MismatchError, Sum
from dcoll.compression import StatefulCompressor
from dcoll.optimizer.gradients import GradientSync

every_test_twice = gradient_models.hooked_and_late

ALL = [0, 1, 2, 3]
TOLD = r"rank 1.*its backward raised ValueError: boom"


class Failing:
    """Makes the backward of a model raise: at its root (0), or when so many gradients have come."""

    def __init__(self, model: nn.Module) -> None:
        self.after, self.came = -1, 0
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self._count)

    def _count(self, _: torch.Tensor) -> None:
        self.came += 1
        self._check()

    def _check(self) -> None:
        if self.came == self.after:
            raise ValueError("boom")

    def backward(self, loss: torch.Tensor, after: int = -1) -> None:
        self.after, self.came = after, 0
        if after == 0:
            loss.register_hook(lambda _: self._check())
        try:
            loss.backward()
        finally:
            self.after = -1


def expect_failure(rank: int, backward: Callable[[], object], culprits: tuple[int, ...] = (1,)) -> str:
    with pytest.raises(ValueError, match="boom") if rank in culprits else pytest.raises(MismatchError) as caught:
        backward()
    return str(caught.value)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"op": Sum},
    "16 bit": {"compression": Compression.bf16},
    "int8": {"compression": Compression.int8},
    "in Python": {"compression": Halved},
    "groups": {"group_of": lambda params: [i % 2 for i in range(len(params))]},
    "one bucket": {"bucket_bytes": 1 << 20, "first_bucket_bytes": 1 << 20},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_all_ranks_have_an_error_and_go_on(after: int, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if options in ("16 bit", "int8"):
        monkeypatch.setenv("DCOLL_COMPRESS_LOCAL", "1")

    def body(comm: _C.Communicator) -> list[float | None]:
        model = Toy()
        sync = sync_of(comm, model, **OPTIONS[options])
        failing = Failing(model)
        factor = comm.size if options == "sum" else 1
        for step in range(4):
            clear(model, sync, set_to_none=step != 2)
            if step % 2 == 0:
                text = expect_failure(
                    comm.rank, lambda: failing.backward(model(1.0, ALL), after if comm.rank == 1 else -1)
                )
                assert comm.rank == 1 or re.search(TOLD, text), text
                if step == 0 and after < 4 and comm.rank != 1:
                    assert "gradient of parameter w." in text
                assert model.grads() == [None] * 4
                if step == 0:
                    clear(model, sync)
            failing.backward(model(2.0 * comm.rank + step, ALL))
            want = [(comm.size - 1 + step + i) * factor for i in range(4)]
            assert model.grads() == (pytest.approx(want, abs=0.2) if options == "int8" else want)
            sync.after_step()
        return model.grads()

    first, *others = run_ranks(3, body)
    assert all(other == first for other in others)


class FailsForZeros:
    """Sends tensors as they are; where it is told to, it cannot take those of zeros: gradients that did not come."""

    fails = False

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        if self.fails and not tensor.any():
            raise ValueError("boom")
        return tensor.clone(), None

    def decompress(self, tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        return tensor


class EncodesNoZeros(FailsForZeros, StatefulCompressor):
    def encode(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self.compress(tensor)[0]

    def decode(self, name: str, tensors: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        return tensors[0]


@pytest.mark.parametrize("ends", ["backward", "step"])
@pytest.mark.parametrize("unused", [[0], [1, 2], [3], ALL])
@pytest.mark.parametrize("kind", [FailsForZeros, EncodesNoZeros])
def test_a_compressor_that_fails_at_the_end(kind: type[FailsForZeros], unused: list[int], ends: str) -> None:
    """When the backward is over, and gradients that it did not bring are sent as zeros."""

    def body(comm: _C.Communicator) -> None:
        model, compression = Toy(), kind()
        sync = sync_of(comm, model, compression=compression)

        def reduce() -> None:
            used = [i for i in ALL if comm.rank != 1 or i not in unused]
            if not used:
                return sync.before_step()
            if ends == "backward":
                return model(1.0 + comm.rank, used).backward()
            with sync.no_sync():
                model(1.0 + comm.rank, used).backward()
            sync.before_step()
            return None

        for step in range(4):
            clear(model, sync)
            compression.fails = comm.rank == 1 and step % 2 == 0
            if step % 2 == 0:
                text = expect_failure(comm.rank, reduce)
                assert comm.rank == 1 or re.search(r"rank 1.*reducing its gradients raised ValueError: boom", text)
                assert model.grads() == [None] * 4
            else:
                reduce()
                want = [(4 + 2 * i) / 3 if i in unused else 2 + i for i in ALL]  # without rank 1
                assert model.grads() == pytest.approx(want)
            sync.after_step()

    run_ranks(3, body)


def no_memory() -> None:
    raise MemoryError("no room")


def no_memory_on_a_device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def no_memory_in_torch() -> None:  # its words for a tensor of 4 EiB
    allocator = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4611686018427387904 bytes"
    raise RuntimeError(f"[enforce fail at alloc_cpu.cpp:127] err == 0. {allocator}. Error code 12 (out of memory)")


@pytest.mark.parametrize(
    ("raises", "error", "text"),
    [
        ({}.popitem, KeyError, "KeyError: 'popitem(): dictionary is empty'"),
        (no_memory, MemoryError, "MemoryError: no room"),
        (no_memory_on_a_device, torch.OutOfMemoryError, "OutOfMemoryError: CUDA out of memory"),
        (no_memory_in_torch, RuntimeError, "RuntimeError: ["),  # which is cut off
    ],
)
def test_the_first_gradient_that_never_came_is_named(
    raises: Callable[[], object], error: type[Exception], text: str
) -> None:
    named = []

    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model)
        model(0.0, ALL).backward()
        buckets = [i for b in range(sync._reducer.num_buckets()) for i in sync._reducer.bucket_params(b)]
        clear(model, sync)

        def fail(_: torch.Tensor) -> None:
            named.append(next(i for i in buckets if model.w[i].grad is None))
            raises()

        if comm.rank == 1:
            failing = model.w[2].register_hook(fail)
        with pytest.raises(error if comm.rank == 1 else MismatchError) as caught:
            model(0.0, ALL).backward()
        if comm.rank == 1:
            failing.remove()
        else:
            told = str(caught.value)
            assert f"the gradient of parameter w.{named[0]} never came: its backward raised {text}" in told
        clear(model, sync)
        model(2.0 * comm.rank, ALL).backward()
        assert model.grads() == [1.0, 2.0, 3.0, 4.0]

    run_ranks(2, body)


@pytest.mark.parametrize("culprits", [(0, 1), (0, 1, 2)])
def test_several_ranks_fail_at_different_places(culprits: tuple[int, ...]) -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model)
        failing = Failing(model)
        for step in range(3):
            clear(model, sync)
            after = comm.rank + step if comm.rank in culprits else -1
            expect_failure(comm.rank, lambda: failing.backward(model(1.0, ALL), after), culprits)  # noqa: B023
            failing.backward(model(2.0 * comm.rank, ALL))
            assert model.grads() == [2.0, 3.0, 4.0, 5.0]
            sync.after_step()

    run_ranks(3, body)


def test_a_pass_before_the_last_one_counts() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model, passes=2)
        failing = Failing(model)
        for step in range(3):
            clear(model, sync)
            first = 0 if comm.rank == 1 and step != 1 else -1
            if first == 0:
                with pytest.raises(ValueError, match="boom"):
                    failing.backward(model(1.0, ALL), first)
            else:
                failing.backward(model(1.0, ALL))
            if step == 2:
                expect_failure(comm.rank, lambda: failing.backward(model(1.0, ALL), 1 if comm.rank == 1 else -1))
                assert model.grads() == [None] * 4
                for _ in range(2):
                    failing.backward(model(1.0, ALL))
                assert model.grads() == [2.0, 4.0, 6.0, 8.0]
            else:
                failing.backward(model(3.0, ALL))
                assert model.grads() == [(3 + i) + (1 + i) / (2 if step == 0 else 1) for i in ALL]
            sync.after_step()

    run_ranks(2, body)


def test_several_optimizers_of_one_backward() -> None:
    """One of which nobody has come by yet, and one that the backward is not of."""

    def body(comm: _C.Communicator) -> None:
        models = [Toy(), Toy(), Toy()]
        syncs = [sync_of(comm, model) for model in models]
        failing = [Failing(model) for model in models]
        for step in range(4):
            for model, sync in zip(models, syncs, strict=True):
                clear(model, sync)
            failing[2].backward(models[2](float(comm.rank), ALL))  # stays as it is
            loss = models[1](1.0, ALL) * models[0](1.0, ALL) if step % 2 else models[1](1.0, ALL) + models[0](1.0, ALL)
            expect_failure(comm.rank, lambda: failing[0].backward(loss, step if comm.rank == 1 else -1))  # noqa: B023
            assert models[0].grads() == models[1].grads() == [None] * 4
            assert models[2].grads() == [0.5, 1.5, 2.5, 3.5]
            for model in models:
                model.zero_grad()
            syncs[2].after_step()
            (models[0](2.0 * comm.rank, ALL) + models[1](2.0 * comm.rank, ALL)).backward()
            assert models[0].grads() == models[1].grads() == [1.0, 2.0, 3.0, 4.0]
            for sync in syncs:
                sync.after_step()

    run_ranks(2, body)


@pytest.mark.parametrize("alone", [True, False])
def test_sparse_gradients(alone: bool) -> None:
    def body(comm: _C.Communicator) -> None:
        table = nn.Embedding(4, 2, sparse=True)
        model = nn.ModuleList([table] if alone else [table, nn.Linear(2, 2, bias=False)])
        sync = sync_of(comm, model)
        for _ in range(3):
            for failing in (False, True, False):
                clear(model, sync)
                out = table(torch.tensor([comm.rank]))
                if failing and comm.rank == 1:
                    out.register_hook(lambda _: {}["missing"])
                loss = (out if alone else model[1](out)).sum()
                if failing:
                    with pytest.raises(KeyError if comm.rank == 1 else MismatchError, match="missing"):
                        loss.backward()
                    assert all(p.grad is None for p in model.parameters())
                else:
                    loss.backward()
                    grad = table.weight.grad
                    assert grad is not None
                    assert grad.is_sparse
                    assert (grad.to_dense().abs().sum(1) > 0).tolist() == [True, True, False, False]
                    sync.after_step()

    run_ranks(2, body)


def test_what_cannot_be_reduced_is_told_on_all_ranks() -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = sync_of(comm, model)
        model(1.0, ALL).backward()
        sync.after_step()
        clear(model, sync)
        for p in model.w:
            p.grad = torch.ones(5)
        if comm.rank == 1:
            model.w[1].data = torch.zeros(7)
            model.w[1].grad = torch.ones(7)
        with pytest.raises(DcollError if comm.rank == 1 else MismatchError, match=r"w.1 was torch.float32 .5. on cpu"):
            sync.before_step()
        if comm.rank == 1:
            model.w[1].data = torch.zeros(5)
        clear(model, sync)
        model(2.0 * comm.rank, ALL).backward()
        assert model.grads() == [1.0, 2.0, 3.0, 4.0]

    run_ranks(2, body)


@pytest.mark.parametrize("then", ["zero_grad", "backward", "step"])
def test_a_backward_that_cannot_be_watched(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other versions of torch may run it in a way that is not known: then it is noticed by what comes next."""
    monkeypatch.setattr("dcoll.optimizer.gradients.watch", lambda _: False)

    def body(comm: _C.Communicator) -> None:
        model = Toy()
        sync = GradientSync(comm, model.parameters(), lambda _: "w", bucket_bytes=20, first_bucket_bytes=20)
        failing = Failing(model)
        for _ in range(2):
            clear(model, sync)
            expect_failure(comm.rank, lambda: failing.backward(model(1.0, ALL), 2)) if comm.rank == 1 else None
            if then == "zero_grad":
                if comm.rank == 1:
                    clear(model, sync)
                else:
                    expect_failure(0, lambda: failing.backward(model(1.0, ALL)))
            elif comm.rank != 1:
                expect_failure(0, lambda: failing.backward(model(1.0, ALL)))
            if then == "step":
                sync.before_step()
                assert model.grads() == [None] * 4
                sync.after_step()
            model.zero_grad()  # which the optimizer does not see
            failing.backward(model(2.0 * comm.rank, ALL))
            assert model.grads() == [1.0, 2.0, 3.0, 4.0]
            sync.after_step()

    run_ranks(2, body)
