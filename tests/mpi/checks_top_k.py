"""Checks of top-k, in the jobs of checks_compression.py."""

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from checks_compression import COUNT, by_every_call, whole
from checks_optimizer_options import Toy, distributed

import dcoll as hvd
from dcoll.compression.residuals import KEY

TopK = hvd.Compression.topk


def optimizer_of(model: torch.nn.Module, **options: Any) -> Any:
    compression = TopK(0.05, **options)
    return distributed(model, compression=compression, op=hvd.Sum)


def weights(count: int = 6000) -> torch.nn.Module:
    """A model whose gradient is what it is multiplied by."""
    model = torch.nn.Module()
    model.register_parameter("weight", torch.nn.Parameter(torch.zeros(count)))
    return model


def reduced(optimizer: Any, model: Any, gradient: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    (model.weight * gradient).sum().backward()
    optimizer.step()
    grad: torch.Tensor = model.weight.grad
    return grad.clone()


def all_kept(optimizer: Any) -> torch.Tensor:
    """The sum over the ranks of what was not sent."""
    lost: torch.Tensor = optimizer.state_dict()[KEY]["lost"][0]["error"]
    return hvd.allreduce(lost, op=hvd.Sum)


def check_all_of_them_is_the_plain_sum() -> None:
    x = whole(COUNT)
    for got in by_every_call(x, TopK(1.0), hvd.Average):
        assert torch.equal(got, x)


def check_the_greatest_arrive_and_no_others() -> None:
    torch.manual_seed(5)
    x = torch.randn(COUNT)
    for compression in (TopK, TopK(0.01), TopK(0.2)):
        first, *others = by_every_call(x, compression, hvd.Average)
        sent = first != 0
        share = 0.2 if compression is not TopK and compression.ratio == 0.2 else 0.01
        assert float(sent.sum()) == pytest.approx(share * COUNT, rel=0.05)
        torch.testing.assert_close(first[sent], x[sent])
        assert bool(sent[x.abs().argmax()])
        assert float(x[sent].abs().mean()) > 2 * float(x[~sent].abs().mean())
        assert others
        for other in others:
            assert 0 < float((other != 0).sum()) < 1.2 * share * COUNT
        assert all(torch.equal(one, first) for one in hvd.allgather(first[None]))


def check_what_is_not_encoded_goes_as_before() -> None:
    x = torch.ones(COUNT, dtype=torch.float64)
    assert torch.equal(hvd.allreduce(x, compression=TopK(0.01)), x)
    with pytest.raises(hvd.ArgumentError, match=r"Compression\.topk is for all-reduces with op Sum or Average"):
        hvd.allreduce(x.float(), compression=TopK(0.01), op=hvd.Max)
    with pytest.raises(hvd.ArgumentError, match=r"Compression\.topk encodes sums and averages, but op is Adasum"):
        distributed(Toy(1), compression=TopK(0.01), op=hvd.Adasum)


def check_wrong_arguments() -> None:
    for ratio in (0, -1, 2, 1.01, 1e-50, "0.01", None, True, float("nan")):
        with pytest.raises(hvd.ArgumentError, match="must be a share of the elements"):
            TopK(ratio)  # type: ignore[arg-type]
    assert hvd.allreduce(torch.ones(COUNT), compression=TopK(2e-45)).any()  # one element of each piece
    for codec, of in (("int8", hvd.Compression.int8), ("topk", TopK)):
        for flag in ("no", 0, None):
            with pytest.raises(hvd.ArgumentError, match=f"{codec} got feedback {flag!r}, but takes True or False"):
                of(feedback=flag)  # type: ignore[arg-type]
    with pytest.raises(hvd.ArgumentError, match=r"momentum is 1\.5, but must be at least 0 and less than 1"):
        TopK(momentum=1.5)
    with pytest.raises(hvd.ArgumentError, match="warmup_steps is -1"):
        TopK(warmup_steps=-1)
    with pytest.raises(hvd.ArgumentError, match="exchange is 'best', but must be 'auto', 'gather' or 'owners'"):
        TopK(exchange="best")
    with pytest.raises(hvd.ArgumentError, match="start_step is True"):
        TopK(start_step=True)
    with pytest.raises(hvd.ArgumentError, match="pass feedback=True"):
        TopK(momentum=0.9, feedback=False)


def check_another_share_is_a_mismatch() -> None:
    with pytest.raises(hvd.MismatchError, match=r"as topk 0\.25"):
        hvd.allreduce(torch.ones(COUNT), compression=TopK(0.5 if hvd.rank() == 0 else 0.25))
    assert hvd.allreduce(torch.ones(COUNT)).eq(1).all()


def check_what_arrived_and_what_is_kept_are_all_there_was() -> None:
    """With whole numbers: exactly, after any step."""
    for options in ({}, {"warmup_steps": 3}, {"start_step": 4}, {"exchange": "owners"}, {"exchange": "gather"}):
        model = weights()
        optimizer = optimizer_of(model, **options)
        torch.manual_seed(7 + hvd.rank())
        given, arrived = torch.zeros(6000), torch.zeros(6000)
        for step in range(12):
            gradient = torch.randint(-50, 51, (6000,)).float() * (1 if step % 3 else 4)
            given += gradient
            arrived += reduced(optimizer, model, gradient)
            assert torch.equal(arrived + all_kept(optimizer), hvd.allreduce(given, op=hvd.Sum))
        assert all_kept(optimizer).abs().sum() > 0


def check_nothing_is_lost_beside_a_rank_that_joined() -> None:
    """Rank 0 carries its node's sums, or a part of them, and joins first."""
    for compression in (TopK(0.05, exchange="gather"), TopK(0.05, exchange="owners"), hvd.Compression.int8):
        model = weights()
        optimizer = distributed(model, compression=compression, op=hvd.Sum)
        torch.manual_seed(31 + hvd.rank())
        given, arrived = torch.zeros(6000), torch.zeros(6000)
        for step in range(6):
            if step == (5 if hvd.rank() else 2):
                hvd.join()
            if step < 2 or step == 5 or hvd.rank() > 0:
                gradient = torch.randint(-50, 51, (6000,)).float()
                given += gradient
                arrived += reduced(optimizer, model, gradient)
        want = hvd.allreduce(given, op=hvd.Sum) - all_kept(optimizer)
        if hvd.rank() > 0:  # rank 0 has not seen what arrived meanwhile
            torch.testing.assert_close(arrived, want, rtol=0, atol=0 if isinstance(compression, TopK) else 1e-3)


def check_nothing_waits_for_ever() -> None:
    """Of equal gradients every element has its turn."""
    for exchange in ("gather", "owners"):
        model = weights(400)
        optimizer = optimizer_of(model, exchange=exchange)
        arrived = torch.zeros(400)
        for _ in range(100):
            arrived += reduced(optimizer, model, torch.linspace(0.5, 1.0, 400))
        assert arrived.gt(0).all()


def check_owners_pass_on_a_share() -> None:
    """Of what nodes have selected, each other elements: the greatest sums, the same bits on all ranks."""
    torch.manual_seed(6 + hvd.rank())
    x = torch.randn(COUNT)
    plain = hvd.allreduce(x, op=hvd.Sum)
    gathered, passed = (
        hvd.allreduce(x, op=hvd.Sum, compression=TopK(0.02, exchange=exchange)) for exchange in ("gather", "owners")
    )
    sent = passed != 0
    assert 0 < float(sent.sum()) < 0.025 * COUNT
    assert float((gathered != 0).sum()) > 1.5 * float(sent.sum())
    assert torch.equal(passed[sent], gathered[sent])
    assert float(plain[sent].abs().mean()) > 1.5 * float(plain.abs().mean())
    assert all(torch.equal(one, passed) for one in hvd.allgather(passed[None]))
    with pytest.raises(hvd.MismatchError, match=r"as topk 0\.02 owners"):
        hvd.allreduce(x, compression=TopK(0.02, exchange="owners" if hvd.rank() == 0 else "gather"))


def check_without_feedback_nothing_is_kept() -> None:
    for compression in (TopK(0.05, feedback=False), hvd.Compression.int8(feedback=False)):
        model = weights()
        optimizer = distributed(model, compression=compression, op=hvd.Sum)
        torch.manual_seed(9)
        gradient = torch.randn(6000)
        first = reduced(optimizer, model, gradient)
        assert torch.equal(reduced(optimizer, model, gradient), first)
        assert KEY not in optimizer.state_dict()


def check_warm_up_sends_more_at_first() -> None:
    model = weights()
    optimizer = optimizer_of(model, warmup_steps=4)
    sent = []
    for _ in range(7):
        torch.manual_seed(11)
        sent.append(int((reduced(optimizer, model, torch.randn(6000)) != 0).sum()))
    assert sent[0] == pytest.approx(0.25 * 6000, rel=0.1)
    assert all(a > b for a, b in itertools.pairwise(sent[:5]))
    assert sent[4] == pytest.approx(0.05 * 6000, rel=0.1)
    assert sent[4:] == [sent[4]] * 3


def check_first_steps_send_all() -> None:
    """And what a checkpoint has kept with the first of them."""
    torch.manual_seed(12 + hvd.rank())
    gradient = torch.randint(-50, 51, (6000,)).float()
    whole = hvd.allreduce(gradient, op=hvd.Sum)
    model = weights()
    optimizer = optimizer_of(model, start_step=3, warmup_steps=2)
    found = [reduced(optimizer, model, gradient) for _ in range(7)]
    assert all(torch.equal(one, whole) for one in found[:3])
    sent = [int((one != 0).sum()) for one in found[3:]]
    assert sent[0] > 1.5 * sent[1] > 2 * sent[2] > 0
    lost = all_kept(optimizer)
    assert lost.abs().sum() > 0
    again = weights()
    after = optimizer_of(again, start_step=8)  # the checkpoint is of the seventh
    after.load_state_dict(optimizer.state_dict())
    assert torch.equal(reduced(after, again, gradient), whole + lost)
    assert not all_kept(after).any()
    assert not torch.equal(reduced(after, again, gradient), whole)


def check_first_steps_have_momentum_too() -> None:
    """And what waits afterwards goes on with theirs."""
    torch.manual_seed(12 + hvd.rank())
    gradient = torch.randint(-50, 51, (6000,)).float()
    whole = hvd.allreduce(gradient, op=hvd.Sum)
    model = weights()
    optimizer = optimizer_of(model, start_step=3, momentum=0.5)
    for velocity in (1.0, 1.5, 1.75):
        assert torch.equal(reduced(optimizer, model, gradient), velocity * whole)
    arrived = reduced(optimizer, model, gradient)
    assert 0 < arrived.count_nonzero() < whole.count_nonzero()
    assert torch.equal(arrived + all_kept(optimizer), 1.875 * whole)


def check_a_schedule_goes_on_with_more_parameters() -> None:
    """A Reducer that takes the place of another one does not begin anew: it would send everything again."""
    torch.manual_seed(12 + hvd.rank())
    gradient = torch.randint(-50, 51, (6000,)).float()
    whole = hvd.allreduce(gradient, op=hvd.Sum)
    model = weights()
    optimizer = optimizer_of(model, start_step=3)
    for _ in range(3):
        assert torch.equal(reduced(optimizer, model, gradient), whole)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    assert not torch.equal(reduced(optimizer, model, gradient), whole)


def check_momentum_gathers_what_waits() -> None:
    """One element is always sent but when another, which is a tenth of it, has gathered more."""
    for momentum, turn, value in ((0.0, 10, 11.0), (0.9, 4, 13.1441)):
        model = weights(16)
        optimizer = distributed(model, compression=TopK(0.01, momentum=momentum), op=hvd.Average)
        gradient = torch.zeros(16)
        gradient[0], gradient[1] = 10, 1
        for step in range(turn + 1):
            got = reduced(optimizer, model, gradient)
            assert float(got[1]) == pytest.approx(value if step == turn else 0.0, rel=1e-4), (momentum, step, got)


def check_a_checkpoint_goes_on_where_it_was() -> None:
    """As if there had been no break, on every rank; with momentum's state too."""
    torch.manual_seed(13 + hvd.rank())
    gradients = torch.randn(8, 6000)
    # Where ranks encode for each other, momentum does not go on to the bit: what was kept may be another rank's then.
    alone = max(hvd.allgather_object(hvd.local_size())) == 1 or max(hvd.allgather_object(hvd.cross_size())) == 1
    for options in ({}, {"momentum": 0.5}) if alone else ({},):
        model = weights()
        optimizer = optimizer_of(model, **options)
        for gradient in gradients[:4]:
            reduced(optimizer, model, gradient)
        saved = io.BytesIO()
        torch.save({"optimizer": optimizer.state_dict(), "model": model.state_dict()}, saved)
        expected = [reduced(optimizer, model, gradient) for gradient in gradients[4:]]
        saved.seek(0)
        loaded = torch.load(saved)
        again = weights()
        again.load_state_dict(loaded["model"])
        optimizer = optimizer_of(again, **options)
        optimizer.load_state_dict(loaded["optimizer"])
        for gradient, before in zip(gradients[4:], expected, strict=True):
            torch.testing.assert_close(reduced(optimizer, again, gradient), before)


def check_what_is_kept_is_its_ranks_alone() -> None:
    model = weights()
    optimizer = optimizer_of(model)
    reduced(optimizer, model, torch.arange(6000.0) + hvd.rank())
    before = copy.deepcopy(optimizer.state_dict()[KEY]["lost"][0]["error"])
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(optimizer.state_dict()[KEY]["lost"][0]["error"], before)
    others = optimizer.state_dict()
    others[KEY] = {"rank": hvd.rank() + 1, "process": "another", "lost": {0: {"error": torch.ones(6000)}}}
    optimizer.load_state_dict(others)
    assert not optimizer.state_dict()[KEY]["lost"][0]["error"].any()
    others[KEY].update(rank=hvd.rank(), lost={0: {"error": torch.ones(5)}})
    with pytest.raises(hvd.ArgumentError, match="has 5 elements, but the parameter has 6000"):
        optimizer.load_state_dict(others)


def check_what_a_checkpoint_lacks_begins_anew() -> None:
    """As after a start without it: one of a plain optimizer, of another compression, of another rank."""
    torch.manual_seed(14 + hvd.rank())
    gradient = torch.randint(-50, 51, (6000,)).float()
    plain = torch.optim.SGD(weights().parameters(), lr=1.0).state_dict()
    other = {KEY: {"rank": hvd.rank(), "process": "another", "lost": {}}}
    for lacking in (plain, plain | other):
        for compression in (TopK(0.05), TopK(0.05, momentum=0.5), hvd.Compression.int8):
            model = weights()
            optimizer = distributed(model, compression=compression, op=hvd.Sum)
            first = reduced(optimizer, model, gradient)
            assert all_kept(optimizer).any()
            optimizer.load_state_dict(lacking)
            assert not any(one.any() for one in optimizer.state_dict()[KEY]["lost"][0].values())
            assert torch.equal(reduced(optimizer, model, gradient), first)
            before = all_kept(optimizer)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            assert torch.equal(all_kept(optimizer), before)


def check_new_parameters_leave_the_others_what_they_kept() -> None:
    model, more = weights(), weights(500)
    optimizer = optimizer_of(model)
    gradient = torch.randint(-50, 51, (6000,)).float()
    arrived = reduced(optimizer, model, gradient)
    optimizer.zero_grad()
    optimizer.add_param_group({"params": list(more.parameters())})
    assert torch.equal(arrived + all_kept(optimizer), hvd.allreduce(gradient, op=hvd.Sum))
    # The rank that kept it may not be the one that encodes the element from now on.
    for _ in range(400):
        optimizer.zero_grad()
        ((model.weight + more.weight.sum()) * 0).sum().backward()  # type: ignore[operator]
        optimizer.step()
        assert isinstance(model.weight, torch.nn.Parameter)
        assert model.weight.grad is not None
        arrived += model.weight.grad
    assert torch.equal(arrived, hvd.allreduce(gradient, op=hvd.Sum))


def check_a_new_job_of_the_same_ranks_keeps_it() -> None:
    """As dcoll.elastic does after a failure."""
    model = weights()
    optimizer = optimizer_of(model)
    torch.manual_seed(15 + hvd.rank())
    gradients = torch.randint(-50, 51, (3, 6000)).float()
    arrived = reduced(optimizer, model, gradients[0])
    hvd.shutdown()
    hvd.init()
    for gradient in gradients[1:]:
        arrived += reduced(optimizer, model, gradient)
    assert torch.equal(arrived + all_kept(optimizer), hvd.allreduce(gradients.sum(0), op=hvd.Sum))


def check_what_is_left_of_a_parameter_waits_while_nobody_uses_it() -> None:
    torch.manual_seed(21 + hvd.rank())
    for compression in (TopK(0.05), TopK(0.05, momentum=0.5), hvd.Compression.int8):
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(6000)) for _ in range(2)])
        optimizer = distributed(model, compression=compression, op=hvd.Sum)

        def kept(name: str = "error", optimizer: Any = optimizer) -> torch.Tensor:
            values: torch.Tensor = optimizer.state_dict()[KEY]["lost"][1][name]
            return values.clone()

        def step(used: list[int], model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            sum((model[i] * torch.randn(6000)).sum() for i in used).backward()
            optimizer.step()

        step([0, 1])
        left = kept()
        assert bool(hvd.allreduce(left, op=hvd.Sum).any())  # where ranks share memory one encodes for all
        momentum = isinstance(compression, TopK) and compression.momentum
        velocity = kept("velocity") if momentum else None
        for _ in range(2):
            step([0])
            assert model[1].grad is None
            assert torch.equal(kept(), left)
            assert velocity is None or torch.equal(kept("velocity"), velocity)
        if momentum or hvd.size() == 1:
            continue
        mine = torch.randn(6000) * (hvd.rank() > 0)  # one rank has none: what is left of it waits, that of others goes
        optimizer.zero_grad()
        ((model[0] * 2.0).sum() + ((model[1] * mine).sum() if hvd.rank() else 0.0)).backward()
        optimizer.step()
        arrived = model[1].grad
        want = hvd.allreduce(left + mine, op=hvd.Sum)
        torch.testing.assert_close(arrived + hvd.allreduce(kept(), op=hvd.Sum), want, rtol=1e-4, atol=1e-4)


def check_unused_parameters_are_known() -> None:
    for feedback in (True, False):
        model = Toy(3)
        optimizer = distributed(model, compression=TopK(0.01, feedback=feedback), op=hvd.Sum)
        model(1e6, [0, 1] if hvd.rank() == 0 else [0]).backward()
        assert [w.grad is None for w in model.w] == [False, False, True]
        optimizer.step()


def check_a_model_trains() -> None:
    torch.manual_seed(3)
    x = torch.randn(64, 200)
    y = x @ torch.randn(200, 100) / 14
    losses = []
    for compression in (hvd.Compression.none, TopK(0.1)):
        torch.manual_seed(4)
        model = torch.nn.Sequential(torch.nn.Linear(200, 120), torch.nn.Tanh(), torch.nn.Linear(120, 100))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(), compression=compression
        )
        for _ in range(100):
            optimizer.zero_grad()
            mine = slice(hvd.rank(), None, hvd.size())
            loss = torch.nn.functional.mse_loss(model(x[mine]), y[mine])
            loss.backward()
            optimizer.step()
        losses.append(float(hvd.allreduce(loss.detach())))
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
