"""Train a small GPT on the source of Python's standard library, data-parallel, and show what communication costs.

    mpirun -n 2 --bind-to core python examples/train_gpt.py
    mpirun -n 2 --bind-to core python examples/train_gpt.py --backend ddp-gloo    # the same with PyTorch's DDP
    mpirun -n 2 --bind-to core python examples/train_gpt.py --backend none        # no communication: the upper bound
"""  # fmt: skip

import argparse
import json
import math
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from gpt import GPT
from torch import nn
from torch.optim import Optimizer

import dcoll


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--backend", choices=("dcoll", "ddp-gloo", "none"), default="dcoll", help="who averages the "
                        "gradients; none: nobody, each rank trains alone on its shard")  # fmt: skip
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks")
    parser.add_argument("--heads", type=int, default=6, help="attention heads; must divide --width")
    parser.add_argument("--width", type=int, default=384, help="model width")
    parser.add_argument("--block", type=int, default=256, help="bytes of context")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=10, help="steps of linear warm-up; a cosine to a tenth follows")
    parser.add_argument("--clip", type=float, default=1.0, help="largest global norm of the averaged gradient")
    parser.add_argument("--bucket-mb", type=float, help="gradient bucket size (default: the backend's own)")
    parser.add_argument("--max-bytes", type=int, default=16 << 20, help="how much text to read at most")
    parser.add_argument("--threads", type=int, default=1, help="torch threads per rank; one, so that ranks on one node "
                        "do not compete for cores")  # fmt: skip
    parser.add_argument("--report-every", type=int, default=10, metavar="STEPS", help="steps between two lines")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every report there (rank 0)")
    args = parser.parse_args()
    for name in ("steps", "layers", "heads", "width", "block", "batch", "threads", "report_every", "max_bytes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    if args.width % args.heads:
        parser.error(f"--heads {args.heads} does not divide --width {args.width}")
    return args


class AloneBackend:
    """No communication at all: what the others are measured against."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank, self.size = rank_and_size()
        self.bucket_mb = args.bucket_mb

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        return model, optimizer

    def waited_seconds(self) -> float | None:
        return 0.0

    def mean(self, value: torch.Tensor) -> float:
        return float(value)


class DcollBackend(AloneBackend):
    """Gradients averaged by dcoll while backward still runs."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        dcoll.init()
        self.rank, self.size = dcoll.rank(), dcoll.size()

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        dcoll.broadcast_parameters(model.state_dict(), root_rank=0)
        self.optimizer = dcoll.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), bucket_mb=self.bucket_mb
        )
        return model, self.optimizer

    def waited_seconds(self) -> float | None:
        return float(self.optimizer.communication_seconds())

    def mean(self, value: torch.Tensor) -> float:
        return float(dcoll.allreduce(value, name="loss"))


class DdpGlooBackend(AloneBackend):
    """PyTorch's DistributedDataParallel over its Gloo backend, for comparison."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        if self.size == int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", self.size)):
            # One node: meet on the loopback interface, at a port that follows from the launcher's process id, which is
            # the parent of all ranks. On several nodes, pass -x MASTER_ADDR -x MASTER_PORT to mpirun.
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", str(20000 + os.getppid() % 20000))
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group("gloo", init_method="env://", rank=self.rank, world_size=self.size)
        # DDP never lets go of its group, whose threads then run into the end of Python. They would abort the process
        # (std::terminate) while they free a tensor of Python's; so these go through a group that does end.
        self.group = torch.distributed.new_group()

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        # gradient_as_bucket_view: without it DDP copies every gradient once more, and the comparison would be unfair
        size = {} if self.bucket_mb is None else {"bucket_cap_mb": self.bucket_mb}
        wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **size)
        return wrapped, optimizer

    def waited_seconds(self) -> float | None:
        return None  # DDP waits inside backward() and does not tell for how long

    def mean(self, value: torch.Tensor) -> float:
        value = value.clone()
        torch.distributed.all_reduce(value, group=self.group)
        return float(value) / self.size


BACKENDS: dict[str, type[AloneBackend]] = {"dcoll": DcollBackend, "ddp-gloo": DdpGlooBackend, "none": AloneBackend}


def rank_and_size() -> tuple[int, int]:
    """From the launcher's environment: Open MPI, else PMI (MPICH, Slurm), else a job of one."""
    for prefix in ("OMPI_COMM_WORLD_", "PMI_"):
        if prefix + "RANK" in os.environ:
            return int(os.environ[prefix + "RANK"]), int(os.environ[prefix + "SIZE"])
    return 0, 1


def read_text(max_bytes: int) -> torch.Tensor:
    """The standard library's source, in the order of the paths: the same bytes on every machine with this Python."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in stdlib.rglob("*.py") if not {"site-packages", "test", "tests"} & set(p.parts))
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= max_bytes:
            break
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


class Batches:
    """Random windows from this rank's contiguous shard of the text."""

    def __init__(self, args: argparse.Namespace, rank: int, size: int) -> None:
        text = read_text(args.max_bytes)
        share = len(text) // size
        if share <= args.block:
            raise SystemExit(f"train_gpt: {len(text)} bytes over {size} ranks is {share} each, less than --block "
                             f"{args.block} + 1; raise --max-bytes or lower --block")  # fmt: skip
        self.shard = text[rank * share : (rank + 1) * share]
        self.batch, self.block = args.batch, args.block
        self.generator = torch.Generator().manual_seed(args.seed * 1000 + rank)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self.shard) - self.block, (self.batch, 1), generator=self.generator)
        windows = self.shard[starts + torch.arange(self.block + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup:
        return float(args.lr * (step + 1) / args.warmup)
    done = (step - args.warmup) / max(args.steps - args.warmup, 1)
    return float(args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done))))


def train(
    args: argparse.Namespace, backend: AloneBackend, model: nn.Module, optimizer: Optimizer
) -> list[dict[str, Any]]:
    """Reports every --report-every steps. The first step is timed apart: it allocates, and dcoll orders its buckets."""
    batches = Batches(args, backend.rank, backend.size)
    reports: list[dict[str, Any]] = []
    start, waited, since = time.perf_counter(), backend.waited_seconds(), 0
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step)
        optimizer.zero_grad()
        loss = model(*batches.next())
        loss.backward()
        # With dcoll and DDP alike, backward() returns when the gradients are averaged: clipping sees the average.
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        if step != 0 and (step + 1) % args.report_every and step + 1 != args.steps:
            continue
        seconds, steps = time.perf_counter() - start, step + 1 - since
        total = backend.waited_seconds()
        share = None
        if total is not None and waited is not None:  # over all ranks: the slowest one never waits
            share = backend.mean(torch.tensor([(total - waited) / seconds]))
        report = {
            "step": step + 1,
            "loss": backend.mean(loss.detach().reshape(1)),
            "step_ms": 1e3 * seconds / steps,
            "tokens_per_second": steps * args.batch * args.block * backend.size / seconds,
            "communication_share": share,
        }
        reports.append(report)
        if backend.rank == 0:
            print_report(report, args.backend)
        start, waited, since = time.perf_counter(), total, step + 1
    return reports


def print_report(report: dict[str, Any], backend: str) -> None:
    share = report["communication_share"]
    waiting = "not told by DDP" if share is None else f"{share:6.1%}"
    loss = f"{report['loss']:6.3f}" + (" (rank 0)" if backend == "none" else "")
    print(f"step {report['step']:5d}  loss {loss}  {report['step_ms']:8.1f} ms/step  "
          f"{report['tokens_per_second']:9,.0f} tokens/s  waiting for communication {waiting}", flush=True)  # fmt: skip


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    backend = BACKENDS[args.backend](args)
    model = GPT(args.layers, args.heads, args.width, args.block)
    parameters = sum(p.numel() for p in model.parameters())
    if backend.rank == 0:
        layout = f"{backend.size} rank(s) x {args.threads} thread(s), {args.batch} x {args.block} bytes each"
        size = f"{parameters / 1e6:.1f} M parameters ({parameters * 4 / 1e6:.0f} MB of gradients)"
        print(f"{size}, {layout}, backend {args.backend}", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    reports = train(args, backend, *backend.wrap(model, optimizer))
    if backend.rank == 0 and args.json:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        result = {"settings": settings, "ranks": backend.size, "parameters": parameters, "reports": reports}
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    if args.backend == "ddp-gloo":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
