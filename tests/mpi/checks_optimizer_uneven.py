"""Checks of DistributedOptimizer where ranks do not do the same, or not at the same address, thread or time."""

import threading
from collections.abc import Callable

import pytest
import torch
from checks_optimizer_options import Quarters16
from torch import nn

import dcoll as hvd
from dcoll import _C
from dcoll.compression import Compressor, StatefulCompressor
from dcoll.optimizer.gradients import GradientSync

WIDTHS = (4, 600)  # gradients that are taken at the end of backward, and gradients that have hooks


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def layer(width: int, outputs: int = 1) -> nn.Linear:
    model = nn.Linear(width, outputs, bias=False)
    nn.init.zeros_(model.weight)
    return model


def distributed(model: nn.Module, lr: float = 1.0, **options: object) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), **options)


def loss_of(model: nn.Linear, x: float) -> torch.Tensor:
    return model(torch.full((1, model.in_features), x)).sum()


def value_of(tensor: torch.Tensor | None) -> float | None:
    assert tensor is None or (tensor == tensor.flatten()[0]).all()
    return None if tensor is None else tensor.flatten()[0].item()


def check_a_rank_without_backward() -> None:
    last = hvd.size() - 1
    for width in WIDTHS:
        for clip in ("no", "as Horovod"):
            model = layer(width)
            optimizer = distributed(model)
            weight = 0.0
            for step in range(5):
                optimizer.zero_grad()
                here = [float(r + 10**step) if step != 2 or r != last else 0.0 for r in range(hvd.size())]
                if here[hvd.rank()]:
                    loss_of(model, here[hvd.rank()]).backward()
                if clip == "no":
                    optimizer.step()
                else:
                    optimizer.synchronize()
                    with optimizer.skip_synchronize():
                        optimizer.step()
                if any(here):
                    assert value_of(model.weight.grad) == pytest.approx(mean(here))
                    weight -= mean(here)
                assert value_of(model.weight) == pytest.approx(weight)
            optimizer.step()  # again, with the gradients that are there: nothing is added up
            assert value_of(model.weight) == pytest.approx(weight - mean(here))


def check_steps_that_a_scaler_skips_and_ranks_without_backward() -> None:
    model = layer(4)
    optimizer = distributed(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    moved = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        if step != 3 or hvd.rank() == 0:
            scaler.scale(loss_of(model, float("inf") if step == 1 and hvd.rank() == 0 else 1.0)).backward()
        before = model.weight.detach().clone()
        optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(before, model.weight))
    assert moved == [True, False, True, True]
    assert len(set(hvd.allgather_object(value_of(model.weight)))) == 1


def check_closures() -> None:
    """LBFGS calls its closure several times a step; ranks have the same number of rounds."""
    target = float(hvd.rank())
    for width in WIDTHS:
        model = layer(width)
        optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe"))

        def closure(model: nn.Linear = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model.weight - target).pow(2).mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        want = mean([float(r) for r in range(hvd.size())])
        torch.testing.assert_close(model.weight, torch.full_like(model.weight, want), rtol=1e-3, atol=1e-3)


def check_closures_that_return_no_loss() -> None:
    """On one rank, or on all, and what is no number: the calls meet, and who has a number gets the mean of those."""
    model = layer(3)
    optimizer = distributed(model)

    def step(returned: object) -> object:
        def closure() -> object:
            optimizer.zero_grad()
            model.weight.sum().backward()
            return returned

        return optimizer.step(closure)

    n, r = hvd.size(), hvd.rank()
    assert step(None if r == 0 else float(r)) == (None if r == 0 else sum(range(1, n)) / (n - 1))
    assert step(None) is None
    pair = (1.0, "more")
    assert step(pair) is pair
    loss = step(torch.tensor(float(r)))
    assert isinstance(loss, torch.Tensor)
    assert loss.item() == mean([float(one) for one in range(n)])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == n


def check_parameters_keep_their_names_after_a_broadcast_state() -> None:
    """On ranks that have loaded a state torch has put a new list of groups in place of the old one."""
    first, second = layer(3), layer(3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9))
    first(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    optimizer.add_param_group({"params": list(second.parameters())})
    names = [optimizer._dcoll.name_of(p) for p in second.parameters()]
    assert names == [f"param.1.{i}" for i in range(len(names))]
    optimizer.zero_grad()
    (first(torch.ones(1, 3)).sum() + second(torch.ones(1, 3)).sum()).backward()
    optimizer.step()


def check_zero_grad_of_another_form() -> None:
    class Plain(torch.optim.SGD):
        def zero_grad(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.zero_()

    model = layer(3)
    optimizer = hvd.DistributedOptimizer(Plain(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        (model.weight * float(hvd.rank())).sum().backward()
        optimizer.step()
        want = mean([float(r) for r in range(hvd.size())])
        assert torch.equal(model.weight.grad, torch.full_like(model.weight, want))


def check_adasum_of_a_model_that_was_converted() -> None:
    """Equal steps combine to themselves, in the dtype that the parameters have now."""
    if hvd.size() not in (2, 4):
        return  # not of others; and of one rank it is an ordinary optimizer, which refuses converted parameters
    model = layer(2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Adasum)
    fine = 2.0**-40  # of no float32 beside 1
    for convert in (model.float, model.double):
        convert()
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer.zero_grad()
        model.weight.sum().mul(fine).backward()
        optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.full_like(model.weight, 1.0 - fine), rtol=0, atol=2.0**-50)


def check_passes_and_ranks_without_backward() -> None:
    model = layer(4)
    optimizer = distributed(model, backward_passes_per_step=2)
    for step in range(3):
        optimizer.zero_grad()
        passes = 2 if step != 1 else hvd.rank() % 3  # two, none and one
        for _ in range(passes):
            loss_of(model, 1.0).backward()
        optimizer.step()
        every = [2.0 if step != 1 else float(r % 3) for r in range(hvd.size())]
        if any(every):
            assert value_of(model.weight.grad) == pytest.approx(mean(every))


def check_many_small_optimizers_in_one_backward() -> None:
    """Ranks have other things in memory, so the optimizers are at other addresses."""
    kept = []
    models, optimizers = [], []
    for i in range(12):
        kept += [threading.Event() for _ in range(7 * hvd.rank() + i * hvd.rank())]
        del kept[:: 2 + hvd.rank()]
        models.append(layer(4))
        optimizers.append(distributed(models[-1]))
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.stack([loss_of(model, 100.0 * i + hvd.rank() + step) for i, model in enumerate(models)]).sum().backward()
        for i, model in enumerate(models):
            assert value_of(model.weight.grad) == pytest.approx(100.0 * i + step + (hvd.size() - 1) / 2)


def on_another_thread(body: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:  # raised below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def check_backward_on_another_thread() -> None:
    for width in WIDTHS:
        model = layer(width)
        optimizer = distributed(model)

        def train(model: nn.Linear = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for set_to_none in (False, True, False):
                optimizer.zero_grad(set_to_none=set_to_none)
                loss_of(model, float(hvd.rank())).backward()
                assert value_of(model.weight.grad) == (hvd.size() - 1) / 2
                optimizer.step()

        on_another_thread(train)
        train()
        on_another_thread(lambda: loss_of(layer(4), 1.0).backward())
        train()


def check_parameters_swapped_for_others() -> None:
    """One half of the model is frozen for the other; no one tells the optimizer."""
    for width in WIDTHS:
        one, two = layer(width), layer(width)
        model = nn.ModuleList([one, two])
        two.requires_grad_(False)
        optimizer = distributed(model)
        for step in range(4):
            if step == 2:
                one.requires_grad_(False)
                two.requires_grad_(True)
            loss_of(one if step < 2 else two, float(hvd.rank())).backward()
            assert value_of((one if step < 2 else two).weight.grad) == (hvd.size() - 1) / 2
            optimizer.step()
            model.zero_grad()
        assert value_of(two.weight) == 1.0 - hvd.size()


def check_a_group_added_between_backward_and_step() -> None:
    one, two = layer(4), layer(600)
    optimizer = distributed(one)
    (loss_of(one, 1.0) + loss_of(two, float(hvd.rank()))).backward()
    optimizer.add_param_group({"params": list(two.parameters())})
    optimizer.step()
    assert value_of(two.weight) == -(hvd.size() - 1) / 2


def check_hooks_of_step_run_once() -> None:
    for op in (hvd.Average, hvd.Adasum):
        if op is hvd.Adasum and hvd.size() & (hvd.size() - 1):
            continue
        model = layer(4)
        optimizer = distributed(model, op=op)
        called = []
        optimizer.register_step_pre_hook(lambda *_, called=called: called.append("pre"))
        optimizer.register_step_post_hook(lambda *_, called=called: called.append("post"))
        for _ in range(2):
            loss_of(model, 1.0).backward()
            optimizer.step()
            assert called == ["pre", "post"], op
            called.clear()
            hvd.broadcast_optimizer_state(optimizer, 0)
            optimizer.load_state_dict(optimizer.state_dict())


def check_optimizers_whose_backwards_come_in_another_order() -> None:
    """Equally long buckets of models that are called the same: it is an error, not the other one's gradients."""
    size = hvd.size()
    for width in WIDTHS:
        for options in ({}, {"compression": hvd.Compression.fp16}, {"compression": Quarters16}):
            models = [layer(width) for _ in range(2)]
            optimizers = [distributed(model, **options) for model in models]
            for step in range(3):
                order = [0, 1] if step == 1 and hvd.rank() == 0 and size > 1 else [1, 0]
                for i in order:
                    optimizers[i].zero_grad()
                    if step != 1 or size == 1:
                        loss_of(models[i], float(1 + 9 * i)).backward()
                        assert value_of(models[i].weight.grad) == 1 + 9 * i
                        continue
                    with pytest.raises(hvd.MismatchError, match=r"weight") as caught:
                        loss_of(models[i], float(1 + 9 * i)).backward()
                    said = str(caught.value)
                    assert len(set(hvd.allgather_object(said))) == 1
                    numbers = [o._dcoll._layout.label for o in optimizers]
                    assert all(number in said for number in numbers), said


def check_adasum_optimizers_that_step_in_another_order() -> None:
    if hvd.size() not in (2, 4):
        return
    models = [layer(4) for _ in range(2)]
    optimizers = [distributed(model, op=hvd.Adasum) for model in models]
    for model in models:
        loss_of(model, 1.0).backward()
    for i in (0, 1) if hvd.rank() == 0 else (1, 0):
        with pytest.raises(hvd.MismatchError, match="steps of optimizer"):
            optimizers[i].step()


def check_optimizers_have_one_number_on_all_ranks() -> None:
    """Though ranks may have made different ones before, of process sets or alone."""
    if hvd.rank() == 0:
        kept = [GradientSync(_C.connect_local(1)[0], layer(4).parameters(), lambda _: "w") for _ in range(3)]
        assert len({sync._layout.label for sync in kept}) == 3
    labels = [distributed(layer(4))._dcoll._layout.label for _ in range(2)]
    assert labels[0] != labels[1]
    assert len(set(hvd.allgather_object(labels[0]))) == 1
    assert len(set(hvd.allgather_object(labels[1]))) == 1


def check_an_optimizer_whose_process_set_was_removed() -> None:
    if hvd.size() == 1:
        return
    members = hvd.add_process_set([0])
    for width in WIDTHS:
        model = layer(width)
        optimizer = distributed(model, process_set=members)
        loss_of(model, 1.0).backward()
        optimizer.step()
        assert value_of(model.weight) == -1.0
    hvd.remove_process_set(members)
    optimizer.zero_grad()
    if hvd.rank() == 0:
        with pytest.raises(hvd.DcollError, match=r"remove_process_set\(\)"):
            loss_of(model, 1.0).backward()


class Plain(StatefulCompressor):
    """Sends gradients as they are; fails as it is told."""

    fails = ""

    def encode(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def decode(self, name: str, tensors: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        if self.fails == "raises":
            raise ValueError("not today")
        return tensors[0][:1] if self.fails else tensors[0]


class PlainClass(Compressor):
    """Likewise."""

    fails = ""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor.clone(), None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        if PlainClass.fails == "raises":
            raise ValueError("not today")
        return tensor[:, :-1] if PlainClass.fails else tensor


def check_a_result_that_one_rank_cannot_decode() -> None:
    """Its round comes to nothing on all, who are in step afterwards."""
    last = hvd.size() - 1
    for compression in (Plain(), PlainClass):
        model = layer(5, 3)
        optimizer = distributed(model, compression=compression)
        for step, fails in enumerate(("", "raises", "", "shape", "")):
            optimizer.zero_grad()
            compression.fails = fails if hvd.rank() == last else ""
            before = model.weight.detach().clone()
            if fails:
                with pytest.raises(Exception if hvd.rank() == last else hvd.DcollError) as told:
                    loss_of(model, float(hvd.rank() + step)).backward()
                assert hvd.rank() == last or "reducing its gradients raised" in str(told.value)
                assert fails == "shape" or "not today" in str(told.value)
                assert model.weight.grad is None
                assert torch.equal(before, model.weight)
                continue
            loss_of(model, float(hvd.rank() + step)).backward()
            assert value_of(model.weight.grad) == mean([float(r + step) for r in range(hvd.size())])
            optimizer.step()
