"""Checks of Compression.powersgd and of StatefulCompressor, in jobs where gradients are compressed."""

from typing import Any

import numpy as np
import pytest
import torch
from checks_optimizer_options import Toy, distributed, same_everywhere
from power_sgd_twin import Twin, gradient_of

import dcoll as hvd
from dcoll import _C
from dcoll.compression import StatefulCompressor
from dcoll.optimizer.power_sgd import MatrixState, PowerSGDReducer

RANK = 2
SHAPES = {"w": (60, 50), "b": (70,), "conv": (16, 4, 3, 3), "small": (3, 5)}
COMPRESSED = ("w", "conv")
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


class Model(torch.nn.Module):
    """The gradients are gradient_of()."""

    def __init__(self, *names: str, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        for name in names or tuple(SHAPES):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(SHAPES[name], dtype=dtype)))

    def forward(self, step: int, rank: int, without: tuple[str, ...] = ()) -> torch.Tensor:
        used = [(name, p) for name, p in self.named_parameters() if name not in without]
        return torch.stack([(p * gradient_of(p.shape, rank, step, n).to(p.dtype)).sum() for n, p in used]).sum()


def twin_of(name: str, ranks: int, kept_rank: int = RANK) -> Twin:
    columns = torch.Size(SHAPES[name][1:]).numel()
    return Twin(MatrixState(name).first_q(kept_rank, columns, 0, torch.empty(0, dtype=torch.float64)), ranks)


def powersgd(model: torch.nn.Module, **options: object) -> object:
    optimizer = distributed(model, **{"compression": hvd.Compression.powersgd(RANK), "op": hvd.Average} | options)
    assert isinstance(optimizer._dcoll._reducer, PowerSGDReducer)
    return optimizer


def every(name: str, step: int, ranks: list[int]) -> list[torch.Tensor]:
    return [gradient_of(SHAPES[name], r, step, name) for r in ranks]


def check_steps_are_the_twins() -> None:
    ranks = list(range(hvd.size()))
    for options in (
        {},
        {"bucket_mb": 0.0, "gradient_predivide_factor": 2.0},
        {"groups": 2, "op": hvd.Sum},
        {"backward_passes_per_step": 2, "bucket_mb": 0.001},
    ):
        model = Model()
        optimizer = powersgd(model, **options)
        twins = {name: twin_of(name, hvd.size()) for name in COMPRESSED}
        scale = hvd.size() if options.get("op") is hvd.Sum else 1
        for step in range(0, 8, 2):
            optimizer.zero_grad()
            passes = range(step, step + options.get("backward_passes_per_step", 1))
            for one in passes:
                model(one, hvd.rank()).backward()
            for name, p in model.named_parameters():
                given = [sum(of_rank) for of_rank in zip(*(every(name, one, ranks) for one in passes), strict=True)]
                want = twins[name].step(given, scale) if name in twins else sum(given) / hvd.size() * scale
                torch.testing.assert_close(p.grad, want, **CLOSE)
            assert same_everywhere(*(p.grad for p in model.parameters()))
            optimizer.step()
        assert same_everywhere(*model.parameters())


def check_float32_has_equal_bits_and_few_directions_arrive() -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(300, RANK, generator=generator), torch.randn(RANK, 200, generator=generator)
    weight = torch.nn.Linear(200, 300, bias=False)
    optimizer = powersgd(weight)
    before = _C.kernels.active_isa()
    _C.kernels.set_isa(["generic", "avx2", "avx512"][hvd.rank() % 3])  # as on different CPUs
    for step in range(4):
        optimizer.zero_grad()
        (weight.weight * (left @ right) * (hvd.rank() + step)).sum().backward()
        mean = (hvd.size() - 1) / 2 + step
        torch.testing.assert_close(weight.weight.grad, left @ right * mean, rtol=1e-4, atol=1e-4)
        assert same_everywhere(weight.weight.grad)
        optimizer.step()
    _C.kernels.set_isa(before)


def check_what_was_lost_is_what_is_kept() -> None:
    model = Model("w", dtype=torch.float32)
    optimizer = powersgd(model)
    applied, true = torch.zeros(60, 50), torch.zeros(60, 50, dtype=torch.float64)
    for step in range(12):
        optimizer.zero_grad()
        model(step, hvd.rank()).backward()
        applied += model.w.grad
        true += sum(every("w", step, list(range(hvd.size())))) / hvd.size()
        optimizer.step()
    lost = hvd.allreduce(optimizer._dcoll._reducer.kept(0)["error"])
    assert float((applied - true).abs().max()) > 0.1  # it does compress
    torch.testing.assert_close((applied + lost).double(), true, rtol=1e-4, atol=1e-3)


def check_bad_gradients_arrive_and_are_forgotten() -> None:
    model = Model("w", "b")
    optimizer = powersgd(model)
    twin = twin_of("w", hvd.size())
    for step in range(4):
        optimizer.zero_grad()
        loss = model(step, hvd.rank())
        bad = step in (1, 2)
        if bad and hvd.rank() == hvd.size() - 1:
            loss = loss + model.w[3, 4] * (float("inf") if step == 1 else float("nan"))
        loss.backward()
        if bad:
            assert model.w.grad.isnan().all()
            assert model.b.grad.isfinite().all()
        else:
            torch.testing.assert_close(model.w.grad, twin.step(every("w", step, list(range(hvd.size())))), **CLOSE)


def check_missing_gradients_are_zeros() -> None:
    model = Model()
    optimizer = powersgd(model)
    twins = {name: twin_of(name, hvd.size()) for name in COMPRESSED}
    for step in range(5):
        optimizer.zero_grad()
        gone = ("w", "small") if step % 2 else ("small",)
        model(step, hvd.rank(), gone if hvd.rank() == 0 else ("small",)).backward()
        assert model.small.grad is None
        for name, twin in twins.items():
            given = every(name, step, list(range(hvd.size())))
            if name in gone:
                given[0] *= 0
            torch.testing.assert_close(getattr(model, name).grad, twin.step(given), **CLOSE)
        optimizer.step()


def check_what_is_kept_outlives_more_parameters() -> None:
    model = Model("w", "b")
    optimizer = powersgd(model)
    twin = twin_of("w", hvd.size())
    for step in range(4):
        optimizer.zero_grad()
        if step == 2:
            model.conv = torch.nn.Parameter(torch.zeros(SHAPES["conv"], dtype=torch.float64))
            optimizer.add_param_group({"params": [model.conv]})
        model(step, hvd.rank()).backward()
        torch.testing.assert_close(model.w.grad, twin.step(every("w", step, list(range(hvd.size())))), **CLOSE)
        optimizer.step()
    assert [bool(optimizer._dcoll._reducer.kept(i)) for i in range(3)] == [True, False, True]


def check_process_sets() -> None:
    """Of two ranks, that are of two nodes where there are some."""
    ranks = [0, hvd.size() - 1]
    pair = hvd.add_process_set(ranks) if hvd.size() > 2 else hvd.global_process_set
    if hvd.rank() in ranks:
        model = Model("w", "b")
        optimizer = powersgd(model, process_set=pair)
        twin = twin_of("w", 2)
        for step in range(3):
            optimizer.zero_grad()
            model(step, hvd.rank()).backward()
            torch.testing.assert_close(model.w.grad, twin.step(every("w", step, ranks)), **CLOSE)
            optimizer.step()
    if hvd.size() > 2:
        hvd.remove_process_set(pair)


def check_joined_ranks_take_part_with_zeros() -> None:
    model = Model("w", "b")
    optimizer = powersgd(model)
    twin = twin_of("w", hvd.size())
    for step in range(3):
        if step and hvd.rank() == 0:
            break
        optimizer.zero_grad()
        model(step, hvd.rank()).backward()
        given = every("w", step, list(range(hvd.size())))
        if step:
            given[0], twin.errors[0] = given[0] * 0, twin.errors[0] * 0
        torch.testing.assert_close(model.w.grad, twin.step(given), **CLOSE)
        optimizer.step()
    hvd.join()


def check_a_failed_backward_leaves_all_in_step() -> None:
    model = Model()
    optimizer = powersgd(model, bucket_mb=0.0)
    twin = twin_of("w", hvd.size())

    def fail(_: torch.Tensor) -> None:
        raise ValueError("not today")

    for step in range(4):
        optimizer.zero_grad()
        if step == 2:
            hook = model.conv.register_hook(fail if hvd.rank() == 0 else lambda g: g)
            with pytest.raises((ValueError, hvd.DcollError), match="not today"):
                model(step, hvd.rank()).backward()
            hook.remove()
            continue
        model(step, hvd.rank()).backward()
        torch.testing.assert_close(model.w.grad, twin.step(every("w", step, list(range(hvd.size())))), **CLOSE)
        optimizer.step()


def check_what_it_is_not_for() -> None:
    compression = hvd.Compression.powersgd()
    for call in (hvd.allreduce, hvd.reducescatter):
        with pytest.raises(
            hvd.ArgumentError, match=r"powersgd\(rank=4\) keeps .* DistributedOptimizer.* use Compression"
        ):
            call(torch.ones(hvd.size(), 4), compression=compression)
    with pytest.raises(hvd.ArgumentError, match=r"powersgd\(rank=4\) keeps"):
        hvd.grouped_allreduce([torch.ones(2)], compression=compression)
    with pytest.raises(hvd.ArgumentError, match="Signs keeps something"):
        hvd.allreduce(torch.ones(2), compression=Signs(), name="x")
    for one in (compression, Signs()):
        with pytest.raises(hvd.ArgumentError, match="is for op Average and Sum, but op is Adasum"):
            distributed(Toy(1), compression=one, op=hvd.Adasum)
    with pytest.raises(hvd.ArgumentError, match=r"also Compression.powersgd\(rank=4\)"):
        distributed(Toy(1), compression=hvd.Compression.powersgd)


class Signs(StatefulCompressor):
    """Of each gradient, and of what was lost before, signs and a scale."""

    gathers = True

    def __init__(self) -> None:
        self.lost: dict[str, torch.Tensor] = {}

    def encode(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        tensor = tensor + self.lost.get(name, 0)
        scale = tensor.abs().mean()
        self.lost[name] = tensor - scale * tensor.sign()
        return [tensor.sign().to(torch.int8), scale]

    def decode(self, name: str, tensors: list[list[torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
        return sum(signs * scale for signs, scale in tensors)  # type: ignore[return-value]


class Floats(Signs):
    """The same, added up by dcoll."""

    gathers = False

    def encode(self, name: str, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        signs, scale = super().encode(name, tensor)
        return signs * scale

    def decode(self, name: str, tensors: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return tensors[0]


def check_stateful_compressors() -> None:
    found = []
    for compression in (Signs(), Floats()):
        model = Model()
        optimizer = distributed(model, compression=compression, op=hvd.Average)
        applied = torch.zeros_like(model.w)
        for step in range(5):
            optimizer.zero_grad()
            model(step, hvd.rank()).backward()
            applied += model.w.grad
            optimizer.step()
        true = sum(sum(every("w", step, list(range(hvd.size())))) for step in range(5)) / hvd.size()
        torch.testing.assert_close(applied + hvd.allreduce(compression.lost["w"]), true, **CLOSE)
        assert same_everywhere(*model.parameters())
        found.append(applied.detach())
    torch.testing.assert_close(*found, **CLOSE)


def check_a_model_trains_as_without() -> None:
    torch.manual_seed(3)
    x = torch.randn(64, 100)
    y = x @ torch.randn(100, 60) / 10
    losses = {}
    for compression in (hvd.Compression.none, hvd.Compression.powersgd(4)):
        torch.manual_seed(4)
        model = torch.nn.Sequential(torch.nn.Linear(100, 80), torch.nn.Tanh(), torch.nn.Linear(80, 60))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(), compression=compression
        )
        for _ in range(100):
            optimizer.zero_grad()
            mine = slice(hvd.rank(), None, hvd.size())
            loss = torch.nn.functional.mse_loss(model(x[mine]), y[mine])
            loss.backward()
            optimizer.step()
        losses[str(compression)] = float(hvd.allreduce(loss.detach()))
        assert same_everywhere(*model.parameters())
    first, second = losses.values()
    assert second < 1.0
    assert second == pytest.approx(first, rel=0.1), np.asarray([first, second])


def check_a_checkpoint_of_one_rank_goes_on_on_all() -> None:
    """Directions are everybody's, errors each rank's own: without rank 0's every rank has the same directions still."""
    optimizers = []
    for _ in range(2):
        torch.manual_seed(1)
        model = Model("w")
        optimizers.append((model, powersgd(model)))
    (model, first), (again, second) = optimizers
    for step in range(3):
        first.zero_grad()
        model(step, hvd.rank()).backward()
        first.step()
    of_rank_0 = hvd.broadcast_object(first.state_dict(), root_rank=0)
    second.load_state_dict(of_rank_0)
    kept, own = second._dcoll._reducer.kept(0), first._dcoll._reducer.kept(0)
    assert torch.equal(kept["q"], own["q"])
    assert ("error" in kept) == (hvd.rank() == 0)
    second.load_state_dict(first.state_dict())
    for step in range(3, 5):
        for each, optimizer in optimizers:
            optimizer.zero_grad()
            each(step, hvd.rank()).backward()
        assert torch.equal(model.w.grad, again.w.grad)
        assert same_everywhere(model.w.grad)


def check_a_checkpoint_before_the_first_step_begins_anew() -> None:
    """dcoll.elastic goes back to such a one; directions begin anew as well, and wait for start_step."""
    model = Model("w")
    optimizer = powersgd(model)
    before = optimizer.state_dict()
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        model(0, hvd.rank()).backward()
        found.append(model.w.grad.clone())
        optimizer.step()
        if hvd.rank() == 0:
            optimizer.load_state_dict(before)
        kept = optimizer._dcoll._reducer.kept(0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # errors are each rank's own; there are no directions
        after = optimizer._dcoll._reducer.kept(0)
        assert kept["error"].any() == (hvd.rank() > 0)
        assert list(after) == ["error"]
        assert torch.equal(kept["error"], after["error"])
        optimizer.load_state_dict(before)
        assert not optimizer._dcoll._reducer.kept(0)["error"].any()
        assert "q" not in optimizer._dcoll._reducer.kept(0)
    assert torch.equal(*found)


def check_directions_of_different_jobs_begin_anew() -> None:
    model = Model("w", "conv")
    optimizer = powersgd(model)
    model(0, hvd.rank()).backward()
    optimizer.step()
    states = optimizer._dcoll._layout._states
    if hvd.rank() == hvd.size() - 1:  # as after a re-start with other ranks
        states[model.w].q = None
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    assert states[model.w].q is None
    assert states[model.conv].q is None
    optimizer.zero_grad()
    model(1, hvd.rank()).backward()
    assert same_everywhere(model.w.grad)


def ring(nbytes: int) -> int:
    """What a rank sends of an all-reduce of so many."""
    return 2 * (hvd.size() - 1) * nbytes // hvd.size()


def costs_of(compression: Any, steps: int) -> dict[str, dict[str, Any]]:
    """What stats() tells of an optimizer that takes so many steps."""
    model = Model(dtype=torch.float32)
    optimizer = distributed(model, compression=compression, op=hvd.Average, bucket_mb=1.0)
    for step in range(steps):
        optimizer.zero_grad()
        model(step, hvd.rank()).backward()
        optimizer.step()
    costs = {name: cost for name, cost in hvd.stats().items() if optimizer._dcoll._layout.label in name}
    for cost in costs.values():
        assert all(cost[what] > 0 for what in ("encode_seconds", "decode_seconds", "wire_seconds"))
        assert cost["saturated"] == 0
    norms = {name: cost["residual_norm"] for name, cost in costs.items() if "residual_norm" in cost}
    kept = [optimizer._dcoll._reducer.kept(i).get("error") for i in range(len(SHAPES))]
    if any(one is not None for one in kept):
        norm = float(torch.cat([one.flatten() for one in kept if one is not None]).norm())
        assert list(norms.values())[-1:] == pytest.approx([norm])
    else:
        assert not norms
    return costs


def check_stats_of_power_sgd() -> None:
    """In one bucket, which is called otherwise when the order of gradients is known."""
    costs = costs_of(hvd.Compression.powersgd(RANK), 3).values()
    factors = sum((rows + columns) * RANK for rows, columns in ((60, 50), (16, 36)))
    assert {cost["codec"] for cost in costs} == {f"powersgd {RANK}"}
    assert sum(cost["calls"] for cost in costs) == 3
    assert sum(cost["elements"] for cost in costs) == 3 * (3000 + 576)
    assert sum(cost["plain_bytes"] for cost in costs) == 3 * ring(4 * (3000 + 576 + 70 + 15))
    assert sum(cost["wire_bytes"] for cost in costs) == 3 * ring(4 * (factors + 70 + 15))
    assert costs_of(hvd.Compression.powersgd(RANK, start_step=9), 1) == {}


def check_stats_of_compressors_in_python() -> None:
    halves = {
        "compress": staticmethod(lambda one: (one.half(), None)),
        "decompress": staticmethod(lambda one, _: one.float()),
    }
    for compression in (Signs(), Floats(), type("Halves", (), halves)):
        costs = costs_of(compression, 2)
        assert len(costs) == len(SHAPES)
        for name, cost in costs.items():
            elements = torch.Size(SHAPES[name.split()[0]]).numel()
            wire = {
                "Signs": (hvd.size() - 1) * (elements + 4),
                "Floats": ring(4 * elements),
                "Halves": ring(2 * elements),
            }
            assert cost["wire_bytes"] == 2 * wire[cost["codec"]]
            assert cost["plain_bytes"] == 2 * ring(4 * elements)
            assert (cost["calls"], cost["elements"]) == (2, 2 * elements)
