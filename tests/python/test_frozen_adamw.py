"""FrozenAdamW: torch's AdamW up to its step, then with second moments that stay."""

import copy

import pytest
import torch

from dcoll import ArgumentError
from dcoll.optimizer import FrozenAdamW

OPTIONS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def gradients(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(7, 3, generator=generator, dtype=torch.float64) * (step + 1) for step in range(steps)]


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, 21, dtype=torch.float64).view(7, 3))


def run(p: torch.nn.Parameter, optimizer: torch.optim.Optimizer, given: list[torch.Tensor]) -> None:
    for one in given:
        p.grad = one.clone()
        optimizer.step()


def test_it_is_adamw_and_then_linear():
    given = gradients(9)
    p, like = parameter(), parameter()
    frozen, plain = FrozenAdamW([p], freeze_step=4, **OPTIONS), torch.optim.AdamW([like], **OPTIONS)
    run(p, frozen, given[:4])
    run(like, plain, given[:4])
    torch.testing.assert_close(p, like, **CLOSE)
    state = plain.state[like]
    for name, value in frozen.state[p].items():
        torch.testing.assert_close(value, state[name], **CLOSE)
    mean, scale = state["exp_avg"].clone(), (frozen.state[p]["exp_avg_sq"] / (1 - 0.95**4)).sqrt() + 1e-6
    want = like.detach().clone()
    for step, one in enumerate(given[4:], start=5):
        mean = 0.8 * mean + 0.2 * one
        want = want * (1 - 0.01 * 0.1) - 0.01 * mean / (1 - 0.8**step) / scale
    run(p, frozen, given[4:])
    torch.testing.assert_close(p.detach(), want, **CLOSE)


def test_what_has_come_late_does_not_jump():
    p = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = FrozenAdamW([p], freeze_step=3, lr=0.1, weight_decay=0.0)
    run(p, optimizer, [torch.zeros(4, dtype=torch.float64)] * 5)  # no time passes
    run(p, optimizer, [torch.tensor([1.0, 2.0, -1.0, 0.0], dtype=torch.float64)] * 3)
    before = p.detach().clone()
    square = optimizer.state[p]["exp_avg_sq"].clone()
    assert square[3] == square[:3].sum() / 4 * 0.01
    run(p, optimizer, [torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)])
    assert torch.equal(optimizer.state[p]["exp_avg_sq"], square)
    assert 0.01 < before[3] - p.detach()[3] < 2


def test_a_checkpoint_goes_on():
    given = gradients(8)
    p = parameter()
    optimizer = FrozenAdamW([p], freeze_step=3, **OPTIONS)
    run(p, optimizer, given[:5])
    again = torch.nn.Parameter(p.detach().clone())
    after = FrozenAdamW([again], freeze_step=100, **OPTIONS)
    after.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # the group's freeze_step, too
    run(p, optimizer, given[5:])
    run(again, after, given[5:])
    assert torch.equal(p, again)


def test_groups_closures_and_parameters_without_gradients():
    p, other, unused = parameter(), parameter(), parameter()
    optimizer = FrozenAdamW([{"params": [p]}, {"params": [other], "freeze_step": 1}], freeze_step=5)
    optimizer.add_param_group({"params": [unused]})
    assert [group["freeze_step"] for group in optimizer.param_groups] == [5, 1, 5]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum() + (other**2).sum()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert torch.equal(unused, parameter())
    assert not torch.equal(p, other)


@pytest.mark.parametrize("step", [0, -1, 2.5, True, None])
def test_wrong_steps(step):
    with pytest.raises(ArgumentError, match=r"freeze_step is .*, but must be a number of steps, at least 1"):
        FrozenAdamW([parameter()], freeze_step=step)
    with pytest.raises(ArgumentError, match="freeze_step is"):
        FrozenAdamW([{"params": [parameter()], "freeze_step": step}], freeze_step=3)


def test_what_it_does_not_take():
    with pytest.raises(ArgumentError, match="got amsgrad, maximize, but takes lr, freeze_step"):
        FrozenAdamW([parameter()], freeze_step=3, amsgrad=True, maximize=False)


def test_a_state_of_adamw_is_gone_on_with() -> None:
    p, like = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    plain = torch.optim.AdamW([like], lr=0.1)
    like.grad = torch.ones(3)
    plain.step()
    frozen = FrozenAdamW([p], lr=0.1, freeze_step=9)
    frozen.load_state_dict(plain.state_dict())
    p.grad, like.grad = torch.ones(3), torch.ones(3)
    with torch.no_grad():
        p.copy_(like)
    frozen.step()
    plain.step()
    torch.testing.assert_close(p, like)
    assert frozen.param_groups[0]["freeze_step"] == 9
