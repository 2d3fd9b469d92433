"""Checks of DistributedOptimizer and of starting all ranks from the same state."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from torch import nn

import dcoll as hvd

STEPS = 20


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).double()


def batch_of(rank: int, step: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1000 * step + rank)
    return (
        torch.randn(rows, 8, dtype=torch.float64, generator=source),
        torch.randn(rows, 3, dtype=torch.float64, generator=source),
    )


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def everyones_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [batch_of(rank, step) for rank in range(hvd.size())]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def assert_same_everywhere(model: nn.Module) -> None:
    """Bit for bit: ranks that drift apart by one rounding end up with different models."""
    mine = [p.detach().numpy().tobytes() for p in model.parameters()]
    assert all(other == mine for other in hvd.allgather_object(mine))


def assert_close(model: nn.Module, reference: nn.Module) -> None:
    # Not equal to the last bit: the mean over N * B rows adds in another order than the mean of N means. Each gradient
    # is then off by some 1e-16 relative; AdamW divides by sqrt(v), so 20 steps stay well below 1e-9, whereas a wrong
    # scale or a missing rank changes the first digit.
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


OPTIMIZERS = {
    "SGD with momentum": lambda params: torch.optim.SGD(
        params, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True
    ),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def check_ranks_with_batch_b_equal_one_rank_with_all() -> None:
    for make in OPTIMIZERS.values():
        for bucket_mb in (None, 0, 1e-3):
            model, reference = make_model(), make_model()
            optimizer = hvd.DistributedOptimizer(
                make(model.parameters()), named_parameters=model.named_parameters(), bucket_mb=bucket_mb
            )
            plain = make(reference.parameters())
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, *batch_of(hvd.rank(), step)).backward()
                optimizer.step()
                plain.zero_grad()
                loss_of(reference, *everyones_batch(step)).backward()
                plain.step()
            assert_close(model, reference)
            assert_same_everywhere(model)
            assert any((p != q).any() for p, q in zip(model.parameters(), make_model().parameters(), strict=True))


def check_backward_passes_per_step() -> None:
    passes = 3
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), backward_passes_per_step=passes
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        plain.zero_grad()
        for i in range(passes):
            loss_of(model, *batch_of(hvd.rank(), passes * step + i)).backward()
            loss_of(reference, *everyones_batch(passes * step + i)).backward()
        optimizer.step()
        plain.step()
    assert_close(model, reference)
    optimizer.set_backward_passes_per_step(1)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, *batch_of(hvd.rank(), step)).backward()
        optimizer.step()
        plain.zero_grad()
        loss_of(reference, *everyones_batch(step)).backward()
        plain.step()
    assert_close(model, reference)


def check_step_after_synchronize_neither_warns_nor_reduces_again() -> None:
    w = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), [("w", w)], op=hvd.Sum)
    n = hvd.size()
    for step in range(1, 4):
        optimizer.zero_grad()
        (w.sum() * (hvd.rank() + 1)).backward()
        optimizer.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        assert w.tolist() == [-step * n * (n + 1) / 2] * 3


def check_clipping_sees_the_average() -> None:
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters())
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, *batch_of(hvd.rank(), step)).backward()
        if step % 2:  # the way Horovod wants it
            optimizer.synchronize()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        plain.zero_grad()
        loss_of(reference, *everyones_batch(step)).backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
        plain.step()
    assert_close(model, reference)


def check_grad_scaler() -> None:
    model = make_model().float()
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        x, y = (t.float() for t in batch_of(hvd.rank(), step))
        loss = loss_of(model, x, y)
        if step == 2 and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")  # on one rank: all must skip the step
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        moved = any((p != q).any() for p, q in zip(model.parameters(), before, strict=True))
        assert moved == (step != 2)
        assert scaler.get_scale() == (1024.0 if step < 2 else 512.0)
    assert_same_everywhere(model)


def check_it_is_the_optimizer_it_wraps() -> None:
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    text = repr(plain)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert repr(optimizer) == text
    assert optimizer.param_groups is plain.param_groups
    assert optimizer.state is plain.state
    with pytest.warns(UserWarning, match="a copy of a DistributedOptimizer is a plain SGD"):
        model_and_optimizer = copy.deepcopy((model, optimizer))
    assert type(model_and_optimizer[1]) is torch.optim.SGD
    assert model_and_optimizer[1].param_groups[0]["params"][0] is model_and_optimizer[0][0].weight
    assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.SGD
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="Optimizer"):
        hvd.DistributedOptimizer(model)  # type: ignore[arg-type]


def check_schedulers() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, *batch_of(hvd.rank(), step)).backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5**3
    assert_same_everywhere(model)
    torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer).step(1.0)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10).step()
    for op in (hvd.Average, hvd.Adasum)[: 1 if hvd.size() == 3 else 2]:
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(plain, lambda epoch: 0.5**epoch)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=op)
        loss_of(model, *batch_of(hvd.rank(), 0)).backward()
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # that there was no step
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.5


def check_state_dict_round_trip() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, *batch_of(hvd.rank(), number)).backward()
        optimizer.step()

    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model.named_parameters())
    for i in range(3):
        step(model, optimizer, i)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for i in range(3, 6):
        step(model, optimizer, i)

    again = make_model(seed=5)
    plain = torch.optim.AdamW(again.parameters(), lr=7.0)
    resumed = hvd.DistributedOptimizer(plain, again.named_parameters())
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert plain.param_groups[0]["lr"] == 0.01, "the wrapped optimizer does not see the state"
    for i in range(3, 6):
        step(again, resumed, i)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def check_every_optimizer_of_torch() -> None:
    special = {"Muon": lambda params: [p for p in params if p.ndim == 2]}
    for name, cls in inspect.getmembers(torch.optim, inspect.isclass):
        if not issubclass(cls, torch.optim.Optimizer) or cls is torch.optim.Optimizer or name == "SparseAdam":
            continue
        model = make_model()
        optimizer = hvd.DistributedOptimizer(cls(special.get(name, list)(model.parameters()), lr=0.01))
        before = [p.detach().clone() for p in model.parameters()]

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, *batch_of(hvd.rank(), 0))
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        assert len(set(hvd.allgather_object(tuple(losses)))) == 1, f"{name}: the ranks see different losses"
        assert any((p != q).any() for p, q in zip(model.parameters(), before, strict=True)), name
        assert_same_everywhere(model)


def check_sparse_adam() -> None:
    table = nn.Embedding(10, 3, sparse=True)
    nn.init.ones_(table.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        table(torch.tensor([hvd.rank()])).sum().backward()
        optimizer.step()
    moved = (table.weight != 1).any(1).tolist()
    assert moved == [row < hvd.size() for row in range(10)]
    assert_same_everywhere(table)


def check_lbfgs_reaches_the_minimum_of_all_data() -> None:
    target = torch.full((3,), float(hvd.rank()), dtype=torch.float64)
    w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS([w], line_search_fn="strong_wolfe"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((w - target) ** 2).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    torch.testing.assert_close(w.detach(), torch.full((3,), (hvd.size() - 1) / 2, dtype=torch.float64))


def check_unused_parameters_are_skipped() -> None:
    model = make_model()
    extra = nn.Linear(2, 2).double()
    before = copy.deepcopy(extra.state_dict())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW([*model.parameters(), *extra.parameters()], lr=0.1, weight_decay=0.5)
    )
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, *batch_of(hvd.rank(), step)).backward()
        assert all(p.grad is None for p in extra.parameters())
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in extra.state_dict().items()), "weight decay applied"
    assert_same_everywhere(model)


def check_add_param_group() -> None:
    model, head = make_model(), nn.Linear(3, 1).double()
    with torch.no_grad():
        for p in head.parameters():
            p.fill_(0.5)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": head.parameters(), "lr": 0.01})
        optimizer.zero_grad()
        x, _ = batch_of(hvd.rank(), step)
        head(model(x)).pow(2).mean().backward()
        optimizer.step()
        if step < 2:
            head.zero_grad()
    assert_same_everywhere(nn.ModuleList([model, head]))


def check_names() -> None:
    model = make_model()
    named = list(model.named_parameters())
    with pytest.raises(ValueError, match=r"must be unique.*0\.weight"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), [*named, named[0]])
    with pytest.raises(ValueError, match="were not named"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named[1:])
    with pytest.raises(ValueError, match="named_parameters"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.parameters())  # type: ignore[arg-type]
    numbered = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), enumerate(model.parameters()))
    assert list(numbered._parameter_names.values()) == ["0", "1", "2", "3", "4", "5"]


def check_different_models_are_told_apart() -> None:
    if hvd.size() == 1:
        return
    model = nn.Linear(3, 2 + (hvd.rank() == hvd.size() - 1))
    with pytest.raises(hvd.MismatchError, match="weight") as caught:
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    assert len(set(hvd.allgather_object(str(caught.value)))) == 1
    with pytest.raises(hvd.MismatchError, match="rank 0: bias"):
        hvd.broadcast_parameters(model.state_dict(), 0)


def check_broadcast_parameters() -> None:
    root = hvd.size() - 1
    for give in (
        lambda m: m.state_dict(),
        lambda m: list(m.named_parameters()),
        lambda m: m.named_parameters(),
        lambda m: m,
        lambda m: list(m.parameters()),
        lambda m: [(None, p) for p in m.parameters()],
        lambda m: [pair for layer in m for pair in layer.named_parameters()],  # three of each name
    ):
        model, want = make_model(seed=hvd.rank()), make_model(seed=root)
        hvd.broadcast_parameters(give(model), root_rank=root)
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            assert torch.equal(p, q)
    many = {
        f"t{i}": torch.full((i % 7, 3), float(hvd.rank()), dtype=(torch.float16, torch.float64)[i % 2])
        for i in range(300)
    }
    many |= {
        "large": torch.full((1_500_000,), float(hvd.rank())),
        "scalar": torch.tensor(hvd.rank()),
        "strided": torch.full((6, 4), float(hvd.rank())).t(),
        "large strided": torch.full((1000, 900), float(hvd.rank())).t(),
        "complex": torch.full((3,), complex(hvd.rank(), 1)),
        "flag": torch.tensor([hvd.rank() == root]),
    }
    hvd.broadcast_parameters(many, root_rank=root)
    assert many["flag"].item() is True
    assert many["complex"].eq(complex(root, 1)).all()
    assert all(t.eq(root).all() for name, t in many.items() if name not in ("flag", "complex"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, that quantized tensors are deprecated
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(hvd.ArgumentError, match="bits is quantized"):
        hvd.broadcast_parameters({"bits": quantized}, root_rank=root)
    hvd.broadcast_parameters(nn.ReLU().state_dict(), 0)  # there is nothing to send
    with pytest.raises(ValueError, match=r"2 entries of which none is a tensor: .* broadcast_optimizer_state\(\)"):
        hvd.broadcast_parameters(torch.optim.SGD(model.parameters(), lr=0.1).state_dict(), 0)


def check_broadcast_optimizer_state() -> None:
    def trained(steps: int, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.9 + lr))
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, *batch_of(0, step)).backward()
            optimizer.step()
        return model, optimizer

    root = hvd.size() - 1
    _, want = trained(3, 0.01)
    for steps in (3, 5, 0):  # as far as the root, further, or without any state
        model, optimizer = trained(3, 0.01) if hvd.rank() == root else trained(steps, 0.07)
        before = [(p, p.grad, p.detach().clone()) for p in model.parameters()]
        optimizer.step = None  # type: ignore[method-assign,assignment]  # Horovod takes a step to make the state
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        assert all(p.grad is grad and torch.equal(p, was) for p, grad, was in before)
        got, expected = optimizer.state_dict(), want.state_dict()
        assert got["param_groups"] == expected["param_groups"]
        assert got["state"].keys() == expected["state"].keys()
        for index, state in expected["state"].items():
            assert all(torch.equal(got["state"][index][key], value) for key, value in state.items())
    _, optimizer = trained(0 if hvd.rank() == root else 2, 0.01)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    assert not optimizer.state_dict()["state"], "state the root does not have"
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(make_model().parameters()), 0)
    model, optimizer = trained(1, 0.01 * (1 + hvd.rank()))
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_optimizer_state(wrapped, 0)
    assert wrapped.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.01


def check_plain_horovod_script() -> None:
    model = make_model(seed=hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, *batch_of(hvd.rank(), step))
        loss.backward()
        optimizer.step()
    assert hvd.allreduce(loss.detach(), name="avg_loss").item() > 0
    assert_same_everywhere(model)
