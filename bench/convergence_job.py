"""A rank of a job of bench/convergence.py: all runs of one task, each with a new model and a new optimizer.

Rank 0 writes a line of JSON after each run. Weights and order of the samples follow from the run's seed alone.
"""

import argparse
import gc
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from convergence_methods import METHODS, quarter
from torch import nn

import dcoll
from dcoll.optimizer import FrozenAdamW

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_digits
import train_gpt

POINTS = 10  # of each loss curve, the last step's being the result
DIGITS = {"batch": 16, "lr": 0.05}
GPT = {"layers": 2, "heads": 4, "width": 128, "block": 64, "batch": 8, "lr": 2e-3, "warmup": 20, "clip": 1.0,
       "max_bytes": 4 << 20, "held_out_bytes": 256 << 10, "held_out_windows": 128}  # fmt: skip

Batch = tuple[torch.Tensor, torch.Tensor]


class Digits:
    """examples/train_digits.py's model, optimizer and rates, a quarter of its batch per rank."""

    def __init__(self, steps: int) -> None:
        self.data, self.held_out = train_digits.load_data()
        self.steps_per_epoch = len(self.data[1]) // (DIGITS["batch"] * dcoll.size())
        epochs = steps / self.steps_per_epoch
        self.config = argparse.Namespace(**DIGITS, epochs=epochs, warmup_epochs=epochs / 8)

    def start(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        self.seed = seed
        model = train_digits.make_model()
        return model, torch.optim.SGD(model.parameters(), lr=DIGITS["lr"], momentum=0.9, nesterov=True,
                                      weight_decay=1e-3)  # fmt: skip

    def learning_rate(self, step: int) -> float:
        return train_digits.learning_rate(self.config, step / self.steps_per_epoch)

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        images, labels = self.data
        epoch, place = divmod(step, self.steps_per_epoch)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed * 100_003 + epoch))
        count = DIGITS["batch"] * dcoll.size()
        mine = order[place * count : (place + 1) * count][dcoll.rank() :: dcoll.size()]
        return F.cross_entropy(model(images[mine]), labels[mine], label_smoothing=0.1)

    def before_step(self, model: nn.Module) -> None:
        pass

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Without the smoothing that training has: 0 is reachable, so that differences are not hidden by a floor."""
        images, labels = (part[dcoll.rank() :: dcoll.size()] for part in self.held_out)
        out = model(images)
        loss, correct = F.cross_entropy(out, labels, reduction="sum"), (out.argmax(1) == labels).sum()
        sums = total([float(loss), float(correct), len(labels)])
        return {"loss": sums[0] / sums[2], "accuracy": sums[1] / sums[2]}


class Gpt:
    """examples/train_gpt.py's model, optimizer and rates, small; the text's end is held out."""

    def __init__(self, steps: int) -> None:
        self.config = argparse.Namespace(**GPT, steps=steps)
        text = train_gpt.read_text(GPT["max_bytes"])
        text, held_out = text[: -GPT["held_out_bytes"]], text[-GPT["held_out_bytes"] :]
        share = len(text) // dcoll.size()
        self.shard = text[dcoll.rank() * share : (dcoll.rank() + 1) * share]
        places = windows(held_out, GPT["held_out_windows"], torch.Generator().manual_seed(0))
        self.held_out = tuple(part[dcoll.rank() :: dcoll.size()] for part in places)

    def start(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        self.generator = torch.Generator().manual_seed(seed * 1000 + dcoll.rank())
        model = train_gpt.GPT(GPT["layers"], GPT["heads"], GPT["width"], GPT["block"])
        return model, torch.optim.AdamW(model.parameters(), lr=GPT["lr"], betas=(0.9, 0.95), weight_decay=0.1)

    def learning_rate(self, step: int) -> float:
        return train_gpt.learning_rate(self.config, step)

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        loss: torch.Tensor = model(*windows(self.shard, GPT["batch"], self.generator))
        return loss

    def before_step(self, model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), GPT["clip"])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        count = len(self.held_out[0])
        sums = total([float(model(*self.held_out)) * count if count else 0.0, count])
        return {"loss": sums[0] / sums[1]}


TASKS: dict[str, Any] = {"digits": Digits, "gpt": Gpt}


def windows(text: torch.Tensor, count: int, generator: torch.Generator) -> Batch:
    """Bytes at random places, and the byte after each."""
    starts = torch.randint(len(text) - GPT["block"], (count, 1), generator=generator)
    found = text[starts + torch.arange(GPT["block"] + 1)].long()
    return found[:, :-1], found[:, 1:]


def total(values: list[float]) -> list[float]:
    found: list[float] = dcoll.allreduce(torch.tensor(values, dtype=torch.float64), op=dcoll.Sum).tolist()
    return found


def ranks_agree(model: nn.Module) -> bool:
    """Whether the weights are the same bits on every rank."""
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return len(set(dcoll.allgather_object(digest))) == 1


def train(task: Any, method: str, seed: int, steps: int) -> dict[str, Any]:
    """One run: the held-out loss at about POINTS steps and at the end."""
    torch.manual_seed(seed)
    model, optimizer = task.start(seed)
    dcoll.broadcast_parameters(model.state_dict(), root_rank=0)
    how = {}
    if METHODS[method].freezes:
        how["freeze_step"] = quarter(steps)
        optimizer = FrozenAdamW(optimizer.param_groups, **how)
    if METHODS[method].beta1 is not None:
        how["beta1"] = METHODS[method].beta1
        for group in optimizer.param_groups:
            group["betas"] = (how["beta1"], group["betas"][1])
    compression = METHODS[method].make(steps)
    how |= vars(compression) if not isinstance(compression, type) else {}
    if METHODS[method].takes_momentum:
        for group in optimizer.param_groups:
            if "momentum" in group:
                group.update(momentum=0.0, nesterov=False)
    optimizer = dcoll.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    every, curve, found = max(steps // POINTS, 1), [], {}
    begin = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate(step)
        optimizer.zero_grad()
        task.loss(model, step).backward()
        task.before_step(model)
        optimizer.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            with torch.no_grad():
                found = task.evaluate(model)
            curve.append((step + 1, found["loss"]))
    return {
        "method": method, "seed": seed, "options": how, **found, "curve": curve, "ranks_agree": ranks_agree(model),
        "seconds": time.perf_counter() - begin, "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip


def main() -> None:
    plan = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dcoll.init()
    task = TASKS[plan["task"]](plan["steps"])
    for method, seed in plan["runs"]:
        run = {"task": plan["task"], **train(task, method, seed, plan["steps"])}
        if dcoll.rank() == 0:
            print(json.dumps(run), flush=True)
        gc.collect()  # the hooks of an optimizer that is done
    dcoll.shutdown()


if __name__ == "__main__":
    main()
