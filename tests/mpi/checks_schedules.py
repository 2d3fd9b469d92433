"""Where schedules of compression are: with checkpoints, and on ranks that have not had the same rounds."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks_optimizer_options import same_everywhere

import dcoll as hvd
from dcoll.compression.residuals import KEY

ROWS, COLUMNS = 60, 100
START = 3


def top_k(**options: Any) -> Any:
    return hvd.Compression.topk(0.05, **options)


def power_sgd(**options: Any) -> Any:
    return hvd.Compression.powersgd(1, **options)


KINDS: list[Callable[[], Any]] = [
    lambda: top_k(start_step=START),
    lambda: top_k(start_step=START, warmup_steps=2),
    lambda: power_sgd(start_step=START),
]


def model_and_optimizer(compression: Any) -> tuple[torch.nn.Linear, Any]:
    model = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression, op=hvd.Sum)


def gradient() -> torch.Tensor:
    """Whole numbers: sums in full are exact, and of no few directions."""
    return torch.randint(-50, 51, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(hvd.rank())).float()


def step(model: torch.nn.Linear, optimizer: Any, mine: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    (model.weight * mine).sum().backward()
    optimizer.step()
    assert model.weight.grad is not None
    return model.weight.grad.clone()


def join_after(steps: int, model: torch.nn.Linear, optimizer: Any) -> None:
    for _ in range(steps):
        step(model, optimizer, gradient())
    hvd.join()


def in_full(model: torch.nn.Linear, optimizer: Any) -> bool:
    """Whether a step's gradients arrive so, which all ranks take; and all get the same."""
    mine = gradient()
    got = step(model, optimizer, mine)
    assert same_everywhere(got)
    return torch.equal(got, hvd.allreduce(mine, op=hvd.Sum))


def rounds_everywhere(optimizer: Any) -> set[int]:
    return set(hvd.allgather_object(optimizer._dcoll._reducer.rounds()))


def check_ranks_go_on_alike_after_a_join() -> None:
    """Those that were in it had fewer rounds, rank 0 in the second epoch none; the others have passed the start."""
    for kind in KINDS:
        model, optimizer = model_and_optimizer(kind())
        for steps in ((1, 2), (0, 2)):
            join_after(steps[hvd.rank() > 0], model, optimizer)
        assert rounds_everywhere(optimizer) == {1, 4}
        assert not in_full(model, optimizer)
        assert rounds_everywhere(optimizer) == {5}


def check_ranks_go_on_alike_before_the_start() -> None:
    for kind in KINDS:
        model, optimizer = model_and_optimizer(kind())
        join_after(1 + (hvd.rank() == hvd.size() - 1), model, optimizer)
        assert in_full(model, optimizer)
        assert not in_full(model, optimizer)


def check_a_first_round_after_a_join_may_fail() -> None:
    """On one rank: nobody knows yet how many calls the round has; all are in step afterwards."""
    for kind in KINDS:
        model, optimizer = model_and_optimizer(kind())
        join_after(1 + START * (hvd.rank() > 0), model, optimizer)

        def fail(_: torch.Tensor) -> None:
            raise ValueError("not today")

        hook = model.weight.register_hook(fail) if hvd.rank() == 0 else None
        optimizer.zero_grad()
        with pytest.raises(ValueError if hook else hvd.DcollError, match="not today"):
            (model.weight * gradient()).sum().backward()
        if hook:
            hook.remove()
        assert not in_full(model, optimizer)
        assert rounds_everywhere(optimizer) == {START + 3}


def check_a_rank_without_backward_agrees_too() -> None:
    for kind in KINDS:
        model, optimizer = model_and_optimizer(kind())
        join_after(1 + START * (hvd.rank() > 0), model, optimizer)
        optimizer.zero_grad()
        if hvd.rank() == 0:
            (model.weight * gradient()).sum().backward()
        optimizer.step()
        assert same_everywhere(model.weight.grad)
        assert rounds_everywhere(optimizer) == {START + 2}


def check_two_optimizers_agree_each_for_itself() -> None:
    (first, one), (second, two) = both = [model_and_optimizer(top_k(start_step=START)) for _ in range(2)]
    join_after(1 + START * (hvd.rank() > 0), first, one)
    for _, optimizer in both:
        optimizer.zero_grad()
    ((first.weight + second.weight) * gradient()).sum().backward()
    for _, optimizer in both:
        optimizer.step()
    assert [rounds_everywhere(optimizer) for _, optimizer in both] == [{START + 2}, {1}]
    assert second.weight.grad is not None
    assert torch.equal(second.weight.grad, hvd.allreduce(gradient(), op=hvd.Sum))
    assert not in_full(first, one)
    assert in_full(second, two)


def check_a_new_job_goes_on() -> None:
    """As dcoll.elastic makes one; a rank that is new in it has had no rounds."""
    for new_ranks in (False, True):
        for kind in KINDS:
            model, optimizer = model_and_optimizer(kind())
            assert all(in_full(model, optimizer) for _ in range(START))
            hvd.shutdown()
            hvd.init()
            optimizer._dcoll._follow_job()
            if new_ranks and hvd.rank() == 0:
                optimizer._dcoll._reducer.set_rounds(0)
            assert not in_full(model, optimizer)
            assert rounds_everywhere(optimizer) == {START + 1}


def loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def check_a_checkpoint_has_where_a_schedule_is() -> None:
    """Also one of before the start, when nothing was lost."""
    for kind in KINDS:
        model, optimizer = model_and_optimizer(kind())
        for _ in range(START - 1):
            assert in_full(model, optimizer)
        state = loaded(optimizer.state_dict())
        assert state[KEY]["rounds"] == START - 1
        again = model_and_optimizer(kind())
        again[1].load_state_dict(state)
        assert in_full(*again)
        assert not in_full(*again)


def check_a_checkpoint_without_it_begins_anew() -> None:
    """As those of before dcoll saved it; what was lost goes with the first gradients."""
    model, optimizer = model_and_optimizer(top_k())
    step(model, optimizer, gradient())
    old = loaded(optimizer.state_dict())
    lost = old[KEY]["lost"][0]["error"].reshape(ROWS, COLUMNS)
    assert old[KEY].pop("rounds") == 0
    for state in (old, old | {KEY: old[KEY] | {"rank": hvd.rank() + 1, "process": "another"}}):
        model, optimizer = model_and_optimizer(top_k(start_step=START))
        for _ in range(START + 1):
            step(model, optimizer, gradient())
        optimizer.load_state_dict(state)
        with_lost = gradient() + lost if state is old else gradient()
        assert torch.equal(step(model, optimizer, gradient()), hvd.allreduce(with_lost, op=hvd.Sum))
        assert in_full(model, optimizer)


def check_nothing_of_a_schedule_is_saved_where_there_is_none() -> None:
    model, optimizer = model_and_optimizer(top_k(feedback=False))
    step(model, optimizer, gradient())
    assert KEY not in optimizer.state_dict()


def check_a_checkpoint_of_one_rank_alone_is_shared() -> None:
    """By broadcast_optimizer_state(), also that it has no directions."""
    for kind in KINDS:
        model, optimizer = model_and_optimizer(kind())
        before = loaded(optimizer.state_dict())
        assert [in_full(model, optimizer) for _ in range(START + 2)] == [True] * START + [False] * 2
        after = loaded(optimizer.state_dict())
        for state, at_once in ((before, True), (after, False)):
            if hvd.rank() == 0:
                optimizer.load_state_dict(state)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            assert rounds_everywhere(optimizer) == {state[KEY]["rounds"] if KEY in state else 0}
            arrives = gradient()
            if isinstance(kind(), hvd.Compression.topk):  # with which what each rank has kept goes at once
                arrives = arrives + optimizer.state_dict()[KEY]["lost"][0]["error"].reshape(ROWS, COLUMNS)
            got = step(model, optimizer, gradient())
            assert same_everywhere(got)
            assert torch.equal(got, hvd.allreduce(arrives, op=hvd.Sum)) == at_once
