"""Checks of several DistributedOptimizers with the same parameters, and of parameters that get into one by hand."""

import copy
import gc

import pytest
import torch
from checks_optimizer_uneven import WIDTHS, distributed, layer, loss_of, value_of
from torch import nn

import dcoll as hvd

Optimizers = dict[str, torch.optim.Optimizer]


def two_layers(width: int) -> nn.ModuleDict:
    return nn.ModuleDict({"one": layer(width), "two": layer(width)})


def backward(model: nn.ModuleDict, x: float) -> None:
    (loss_of(model["one"], x) + loss_of(model["two"], 2 * x)).backward()


def step_in_turns(model: nn.ModuleDict, optimizers: Optimizers, op: hvd.ReduceOp, passes: int, zeros: bool) -> None:
    """Every rank has the sum or average of all gradients, whichever optimizer takes the step."""
    total = sum(range(hvd.size())) * passes / (hvd.size() if op is hvd.Average else 1)
    for turn in range(6):
        names = list(optimizers)
        stepping = optimizers[names[turn % len(names)]]
        for optimizer in optimizers.values() if zeros else ():
            optimizer.zero_grad()
        if not zeros:
            model.zero_grad()
        before = copy.deepcopy(model)
        for _ in range(passes):
            backward(model, float(hvd.rank()))
        if turn % 2:
            stepping.synchronize()
        stepping.step()
        stepped = {id(p) for group in stepping.param_groups for p in group["params"]}
        for layer_now, layer_before, factor in zip(model.values(), before.values(), (1, 2), strict=True):
            assert value_of(layer_now.weight.grad) == total * factor
            taken = total * factor if id(layer_now.weight) in stepped else 0.0
            assert value_of(layer_now.weight) == value_of(layer_before.weight) - taken


def check_optimizers_that_share_parameters() -> None:
    for width in WIDTHS:
        for op in (hvd.Average, hvd.Sum):
            for passes in (1, 2):
                for order in (("both", "one", "two"), ("one", "two", "both"), ("one", "both", "two")):
                    model = two_layers(width)
                    parts = {"both": model, "one": model["one"], "two": model["two"]}
                    optimizers = {
                        name: distributed(parts[name], op=op, backward_passes_per_step=passes) for name in order
                    }
                    step_in_turns(model, optimizers, op, passes, zeros=True)
                    step_in_turns(model, optimizers, op, passes, zeros=False)
                    del optimizers["both"]  # the others still have their gradients reduced
                    gc.collect()
                    step_in_turns(model, optimizers, op, passes, zeros=True)


def check_no_sync_is_for_all_gradients_of_an_optimizer() -> None:
    model = two_layers(600)
    optimizers = [distributed(model), distributed(model["one"])]
    with optimizers[1].no_sync():
        backward(model, float(hvd.rank()))
    assert value_of(model["one"].weight.grad) == hvd.rank()
    backward(model, float(hvd.rank()))
    assert value_of(model["one"].weight.grad) == hvd.size() - 1
    assert optimizers[1].communication_seconds() == optimizers[0].communication_seconds() > 0 or hvd.size() == 1


def check_a_stage_of_fewer_parameters() -> None:
    """While a variable and a scheduler still have the optimizer of the stage before."""
    model = two_layers(600)
    mean = (hvd.size() - 1) / 2
    for stage in range(4):
        model["one"].requires_grad_(stage % 2 == 0)
        trained = nn.ModuleList([one for one in model.values() if one.weight.requires_grad])
        optimizer = distributed(trained)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(2):
            optimizer.zero_grad()
            backward(model, float(hvd.rank()))
            assert value_of(model["two"].weight.grad) == 2 * mean
            assert value_of(model["one"].weight.grad) == (mean if stage % 2 == 0 else None)
            optimizer.step()
            scheduler.step()
        model.zero_grad()


def check_other_options_are_refused() -> None:
    model = two_layers(4)
    first = distributed(model)
    with pytest.raises(hvd.ArgumentError, match="another DistributedOptimizer, which also has other parameters"):
        distributed(model["one"], op=hvd.Sum)
    del first
    distributed(model["one"], op=hvd.Sum)


def check_parameters_put_into_a_group_by_hand() -> None:
    for width in WIDTHS:
        for way in ("appended", "replaced", "cleared"):
            model = two_layers(width)
            optimizer = distributed(model)
            backward(model, float(hvd.rank()))
            optimizer.step()
            optimizer.zero_grad()
            model["two"] = layer(width)
            if way == "appended":
                optimizer.param_groups[0]["params"].append(model["two"].weight)
            elif way == "replaced":
                optimizer.param_groups[0]["params"] = list(model.parameters())
            else:
                optimizer.param_groups.clear()
                optimizer.add_param_group({"params": list(model.parameters()), "lr": 1.0})
            for turn in range(1, 4):
                backward(model, float(hvd.rank()))
                optimizer.step()
                optimizer.zero_grad()
                assert value_of(model["two"].weight) == -turn * (hvd.size() - 1)
                assert value_of(model["one"].weight) == -(turn + 1) * (hvd.size() - 1) / 2
