"""What DistributedOptimizer costs a training step, beside no communication and torch's DDP over Gloo, in turns.

    mpirun -n 2 python bench/optimizer.py
    mpirun -n 2 python bench/optimizer.py --model eighty --json steps.json
    python bench/optimizer.py   # one rank: the cost of each parameter, without waiting for another rank

small   1,000 parameters of 32 elements: what is left is the cost of each parameter, in microseconds.
eighty  80 parameters, 10.5 MB of gradients, about 10 ms of computing a step.

waiting       milliseconds of a step, of "over none", in which the rank waited for communication. dcoll counts them.
us/parameter  what is left of "over none", for each parameter: the cost of Python per parameter and step. Of DDP, which
              does not tell how long it waits, all of "over none" is in it. On several ranks the operations themselves
              are in it too; on one rank there are none.

Kinds take turns, some steps each after one that is not counted, and each turn is there and back (none, dcoll, DDP, DDP,
dcoll, none), so that what the machine does meanwhile meets all of them alike. The times are of the slowest rank; a
figure is the median over the turns, and of differences the median of the differences within a turn.
"""  # fmt: skip

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from arguments import at_least
from engines import join_gloo
from models import MODELS
from torch import nn

import dcoll as hvd


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The cost of a training step with DistributedOptimizer, DDP-Gloo and no communication.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="small", help="small: 1,000 parameters of 32 "
                        "elements; eighty: 80 parameters, 10.5 MB of gradients")  # fmt: skip
    parser.add_argument("--turns", type=at_least(1), default=25, help="how often each kind has its turn")
    parser.add_argument("--steps", type=at_least(1), default=3, help="steps of a turn, there and as many back")
    parser.add_argument("--batch", type=at_least(1), default=4, help="rows per rank, of the model of 80 parameters")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there (rank 0)")
    return parser.parse_args(argv)


class Step:
    """A training step. waited(): the seconds that this rank has waited for communication in steps so far."""

    def __init__(self, run: Callable[[], None], waited: Callable[[], float]) -> None:
        self.run = run
        self.waited = waited


def make_step(kind: str, args: argparse.Namespace) -> Step:
    torch.manual_seed(0)
    model: nn.Module = MODELS[args.model]()
    x = MODELS[args.model].input(args.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if kind == "ddp-gloo":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif kind == "dcoll":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    waited: Callable[[], float] = getattr(optimizer, "communication_seconds", float)

    def step() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    return Step(step, waited)


def turn(step: Step, steps: int) -> tuple[float, float]:
    """Milliseconds of a step, of the slowest rank; and how many of them it waited for communication."""
    step.run()  # its memory is in the caches again
    hvd.barrier()
    waited = step.waited()
    begin = time.perf_counter()
    for _ in range(steps):
        step.run()
    mine = (time.perf_counter() - begin) / steps * 1e3
    waited = (step.waited() - waited) / steps * 1e3
    everyone = hvd.allgather(torch.tensor([[mine, waited]], dtype=torch.float64)).tolist()
    slowest = max(everyone)
    return slowest[0], slowest[1]


def show(times: dict[str, list[tuple[float, float]]], parameters: int) -> None:
    print(f"{'kind':>10} {'ms/step':>9} {'over none':>10} {'waiting':>9} {'us/parameter':>13}")
    for kind, measured in times.items():
        pairs = list(zip(measured, times["none"], strict=True))
        over = statistics.median(mine - none for (mine, _), (none, _) in pairs)
        python = statistics.median(mine - waited - none for (mine, waited), (none, _) in pairs)
        waiting = statistics.median(waited for _, waited in measured)
        step = statistics.median(mine for mine, _ in measured)
        print(f"{kind:>10} {step:9.3f} {over:10.3f} {waiting:9.3f} {python * 1e3 / parameters:13.3f}", flush=True)


def main() -> None:
    args = parse_arguments()
    hvd.init()
    torch.set_num_threads(1)
    if hasattr(os, "sched_getaffinity") and hvd.rank() == 0:
        print(f"# {hvd.size()} ranks, {len(os.sched_getaffinity(0))} core(s) for rank 0, torch {torch.__version__}")
    join_gloo()
    steps = {kind: make_step(kind, args) for kind in ("none", "dcoll", "ddp-gloo")}
    for step in steps.values():
        turn(step, 3)
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in steps}
    for _ in range(args.turns):
        there = {kind: turn(step, args.steps) for kind, step in steps.items()}
        back = {kind: turn(steps[kind], args.steps) for kind in reversed(steps)}
        for kind, (mine, waited) in there.items():
            times[kind].append(((mine + back[kind][0]) / 2, (waited + back[kind][1]) / 2))
    if hvd.rank() == 0:
        show(times, 1000 if args.model == "small" else 80)
        if args.json is not None:
            found = {"ranks": hvd.size(), "model": args.model, "milliseconds of a step, waited": times}
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
