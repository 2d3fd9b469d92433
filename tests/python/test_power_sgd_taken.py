"""Where the gradients lie that PowerSGD begins with: the result is the same, to the bit."""

from collections.abc import Iterator

import gradient_models
import pytest
import torch
from gradient_models import clear, sync_of
from local_ranks import run_ranks
from power_sgd_twin import Twin, gradient_of
from torch import nn

from dcoll import _C, Compression
from dcoll.optimizer.gradients import GradientSync
from dcoll.optimizer.power_sgd import MatrixState, PowerSGDReducer

every_test_twice = gradient_models.hooked_and_late

SHAPE = (40, 30)


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """What take() returned."""
    monkeypatch.setenv("DCOLL_COMPRESS_LOCAL", "1")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    found: list[bool] = []
    take = PowerSGDReducer.take

    def noted(self: PowerSGDReducer, param: int, gradient: torch.Tensor) -> bool:
        found.append(take(self, param, gradient))
        return found[-1]

    monkeypatch.setattr(PowerSGDReducer, "take", noted)
    return found


def made(comm: _C.Communicator, dtype: torch.dtype = torch.float32) -> tuple[nn.ParameterList, GradientSync]:
    model = nn.ParameterList([torch.zeros(SHAPE, dtype=dtype), torch.zeros(5, dtype=dtype)])
    return model, sync_of(comm, model, compression=Compression.powersgd(3), bucket_bytes=20000)


def laid(values: torch.Tensor, where: str) -> torch.Tensor:
    """Equal values, elsewhere in memory or in another order."""
    if where == "transposed":
        return values.t().contiguous().t()
    if where == "negated":
        return torch._neg_view(-values)
    if where == "a part":
        return torch.cat([values, values])[: len(values)]
    return values.clone()


@pytest.mark.parametrize("where", ["elsewhere", "transposed", "negated", "a part", "in place"])
def test_bits_are_the_same_wherever_a_gradient_lies(where: str, taken: list[bool]) -> None:
    def body(comm: _C.Communicator) -> list[torch.Tensor]:
        found = []
        for of in ("elsewhere", where):
            model, sync = made(comm)
            for step in range(3):
                clear(model, sync, set_to_none=of != "in place")
                values = gradient_of(SHAPE, comm.rank, step).float()
                if of != "in place":
                    model[0].grad = laid(values, of)
                    values = torch.zeros(SHAPE)
                ((model[0] * values).sum() if of == "in place" else model[1].sum()).backward()
                assert model[0].grad is sync._views[0]
                sync.after_step()
            found.append(model[0].grad)
        return found

    for first, second in run_ranks(2, body):
        assert torch.equal(first, second)
    steps = 3 + {"elsewhere": 3, "a part": 3, "in place": 1}.get(where, 0)  # in place from the second on
    assert taken.count(True) == 2 * steps


def test_what_torch_multiplies_is_copied(taken: list[bool]) -> None:
    def body(comm: _C.Communicator) -> None:
        model, sync = made(comm, torch.float64)
        (model[0] * gradient_of(SHAPE, comm.rank, 0)).sum().backward()
        assert model[0].grad is sync._views[0]

    run_ranks(2, body)
    assert taken == [False, False]


def test_what_is_reduced_alone_is_not_begun_with() -> None:
    """Gradients of parameters that come after backward."""

    def body(comm: _C.Communicator) -> None:
        model, sync = made(comm)
        (model[1] * 2).sum().backward()
        new = nn.Parameter(torch.zeros(SHAPE))
        names = {id(model[0]): "0", id(model[1]): "1", id(new): "2"}
        sync.name_of = lambda p: names[id(p)]
        new.grad = torch.full(SHAPE, comm.rank + 1.0)
        sync.extend([new])
        assert new.grad.eq(1.5).all()
        sync.after_step()
        twin = Twin(MatrixState("2").first_q(3, 30, 0, torch.empty(0)), 2)
        for step in range(2):
            clear(model, sync)
            new.grad = None
            (new * gradient_of(SHAPE, comm.rank, step).float()).sum().backward()
            want = twin.step([gradient_of(SHAPE, r, step) for r in range(2)])
            torch.testing.assert_close(new.grad.double(), want, rtol=1e-3, atol=1e-4)
            sync.after_step()

    run_ranks(2, body)
