"""torch.distributed on dcoll and on Gloo, in turns in one job: calls by size, and training steps of a GPT.

    mpirun -n 2 --bind-to core python bench/torch_backend.py
    mpirun -n 2 --bind-to core python bench/torch_backend.py --only calls --json calls.json --plot calls.png
    mpirun -n 4 python bench/torch_backend.py --only steps --turns 5
    mpirun -n 2 --bind-to core python bench/torch_backend.py --only steps --kind "FSDP2 dcoll"    # its memory alone

calls   all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, send and recv between ranks 0 and 1, through
        torch.distributed on both; and dcoll.allreduce_, for what the backend costs over it.
steps   the GPT of examples/ (--layers, --width): no communication, DistributedOptimizer, DistributedDataParallel and
        fully_shard over either backend. Also the processor time of all threads of a rank, which other programs on the
        machine change less than they change the time, and the most memory that a rank had while the steps ran.
groups  new_group() with all ranks, its first all_reduce and its end, on either backend; and the memory that a group
        holds, with its part of what ranks share: of the slowest, or greatest, rank.

A figure is the median over the turns of the time of the slowest rank; a ratio is the median of those within a turn.
"""  # fmt: skip

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from arguments import above_zero, at_least, check_sizes, format_size, message_sizes, parse_size, step_factor
from environment import describe, header
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dcoll as hvd
import dcoll.torch  # registers the backend

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from gpt import GPT

Call = Callable[[], object]
Times = dict[str, list[float]]
ONLY = ("calls", "steps", "groups")
HELD_GROUPS = 20
"""Whose memory is divided by their number."""
OWN_MEMORY = "FSDP2 dcoll, allocate_tensor"  # as in examples/fsdp.py
OVERLAPPED = ("FSDP2 dcoll, overlapped", "FSDP2 overlapped, gloo")  # by overlap_all_gathers(); what ends so is Gloo's
KINDS = ("none", "DistributedOptimizer", "DDP dcoll", "DDP gloo", "FSDP2 dcoll", OWN_MEMORY, "FSDP2 gloo", *OVERLAPPED)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="torch.distributed on dcoll beside Gloo.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--only", choices=ONLY, default=argparse.SUPPRESS, help="one of them (default: all)")
    add("--collective", choices=COLLECTIVES, action="append", default=argparse.SUPPRESS, help="default: all")
    add("--kind", choices=KINDS, action="append", default=argparse.SUPPRESS, help="of steps (default: all)")
    add("-b", "--minbytes", type=parse_size, default=4, metavar="SIZE", help="smallest message")
    add("-e", "--maxbytes", type=parse_size, default=64 << 20, metavar="SIZE", help="largest message")
    add("-f", "--stepfactor", type=step_factor, default=16, metavar="X", help="each size is X times the one before")
    add("--turns", type=at_least(1), default=11, help="how often each kind has its turn")
    add("--ms", type=above_zero, default=20, help="about how long a turn of calls takes, in milliseconds")
    add("--layers", type=at_least(1), default=6, help="of the GPT; 6 and --width 384 are 10.8 million parameters")
    add("--width", type=at_least(1), default=384, help="of the GPT, a multiple of 6")
    add("--batch", type=at_least(1), default=2, help="sequences of 128 bytes per rank and step")
    add("--json", type=Path, metavar="FILE", help="write everything measured there (rank 0)")
    add("--plot", type=Path, metavar="FILE", help="draw the calls (rank 0)")
    parser.set_defaults(datatype="float32", stepbytes=None)
    args = parser.parse_args(argv)
    check_sizes(parser, args, allows_empty=False)
    if args.width % 6:
        parser.error(f"--width {args.width}: allowed is a multiple of 6, the number of heads")
    args.collective = getattr(args, "collective", list(COLLECTIVES))
    args.kind = getattr(args, "kind", list(KINDS))
    args.only = [args.only] if hasattr(args, "only") else list(ONLY)
    return args


def call_of(name: str, nbytes: int, group: Any) -> Call:
    """One call of a collective on `nbytes`: of a rank's input, or of the output where that is the larger."""
    n, rank = dist.get_world_size(), dist.get_rank()
    count = max(nbytes // 4, 1)
    whole, other = torch.ones(-(-count // n) * n), torch.ones(-(-count // n) * n)
    share = torch.ones(whole.numel() // n)
    if name == "all_reduce":
        tensor = torch.zeros(count)
        return lambda: dist.all_reduce(tensor, group=group)
    if name == "all_gather":
        return lambda: dist.all_gather_single(whole, share, group=group)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_single(share, whole, group=group)
    if name == "broadcast":
        return lambda: dist.broadcast(whole, 0, group=group)
    if name == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole, group=group)

    def there_and_back() -> None:
        if rank == 0:
            dist.send(whole, 1, group=group)
            dist.recv(whole, 1, group=group)
        elif rank == 1:
            dist.recv(whole, 0, group=group)
            dist.send(whole, 0, group=group)

    return there_and_back


def turn(call: Call, repeats: int) -> tuple[float, float]:
    """Microseconds of a call, and of the processor for it, of the slowest rank."""
    call()
    hvd.barrier()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        call()
    spent = torch.tensor([time.perf_counter() - begin, time.process_time() - cpu_begin]) / repeats * 1e6
    each, cpu = hvd.allreduce(spent, op=hvd.Max).tolist()
    return each, cpu


def measure(kinds: dict[str, Call], turns: int, ms: float) -> tuple[Times, Times]:
    """Times and processor times. ms = 0: one call a turn."""
    repeats = {}
    for name, call in kinds.items():
        turn(call, 1)
        repeats[name] = max(1, min(2000, int(1e3 * ms / turn(call, 3)[0]))) if ms else 1
    times: Times = {name: [] for name in kinds}
    cpu: Times = {name: [] for name in kinds}
    for _ in range(turns):
        for name, call in kinds.items():
            for found, value in zip((times, cpu), turn(call, repeats[name]), strict=True):
                found[name].append(value)
    return times, cpu


def ratio(times: Times, kind: str, base: str) -> float:
    return statistics.median(one / two for one, two in zip(times[kind], times[base], strict=True))


def calls(args: argparse.Namespace, gloo: Any) -> list[dict[str, Any]]:
    rows = []
    for name in args.collective:
        say(
            f"\n| {name} | dcoll us | Gloo us | Gloo / dcoll |"
            + (" dcoll.allreduce_ us |" if name == "all_reduce" else "")
        )
        say("| --- | ---: | ---: | ---: |" + (" ---: |" if name == "all_reduce" else ""))
        for size in message_sizes(args):
            kinds = {"dcoll": call_of(name, size, None), "gloo": call_of(name, size, gloo)}
            if name == "all_reduce":
                tensor = torch.zeros(max(size // 4, 1))
                kinds["dcoll.allreduce_"] = lambda tensor=tensor: hvd.allreduce_(tensor, op=hvd.Sum)
            times, _ = measure(kinds, args.turns, args.ms)
            median = {kind: statistics.median(found) for kind, found in times.items()}
            row = {
                "collective": name,
                "bytes": size,
                "median_us": median,
                "ratio": ratio(times, "gloo", "dcoll"),
                "us": times,
            }
            rows.append(row)
            more = f" {median['dcoll.allreduce_']:.1f} |" if name == "all_reduce" else ""
            say(f"| {format_size(size)} | {median['dcoll']:.1f} | {median['gloo']:.1f} | {row['ratio']:.1f} |{more}")
    return rows


def step_of(kind: str, args: argparse.Namespace, gloo: Any) -> Call:
    torch.manual_seed(0)
    model: torch.nn.Module = GPT(args.layers, 6, args.width, 128)
    tokens = torch.randint(256, (args.batch, 129), generator=torch.Generator().manual_seed(dist.get_rank()))
    group = gloo if kind.endswith("gloo") else dist.group.WORLD
    if kind.startswith("DDP"):
        model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    elif kind.startswith("FSDP2"):
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if kind == OWN_MEMORY and hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
                module.set_allocate_memory_from_process_group_for_comm(True)
        if kind in OVERLAPPED:
            dcoll.torch.overlap_all_gathers(model)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if kind == "DistributedOptimizer":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()

    return step


def steps(args: argparse.Namespace, gloo: Any) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of what was measured before
    times, cpu = measure({kind: step_of(kind, args, gloo) for kind in args.kind}, args.turns, 0)

    def over(found: Times, kind: str) -> str:
        if "none" not in found:
            return "-"
        return f"{statistics.median(a - b for a, b in zip(found[kind], found['none'], strict=True)) / 1e3:.1f}"

    say("\n| step | median ms | over none, ms | processor ms | over none, ms | ratio to DistributedOptimizer |")
    say("| --- | ---: | ---: | ---: | ---: | ---: |")
    for kind in args.kind:
        median, cpu_median = (statistics.median(found[kind]) / 1e3 for found in (times, cpu))
        base = f"{ratio(times, kind, 'DistributedOptimizer'):.3f}" if "DistributedOptimizer" in times else "-"
        say(f"| {kind} | {median:.1f} | {over(times, kind)} | {cpu_median:.1f} | {over(cpu, kind)} | {base} |")
    peak = float(hvd.allreduce(torch.tensor(peak_mib()), op=hvd.Max))
    say(f"\nThe most memory that a rank had meanwhile: {peak:.0f} MiB.")
    return {"us": times, "cpu_us": cpu, "peak_mib": peak}


def use_group(backend: str) -> Any:
    group = dist.new_group(backend=backend)
    dist.all_reduce(torch.zeros(1), group=group)
    return group


def held_kib() -> float:
    """Of this process, with its part of the memory that ranks share."""
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    return sum(float(line[1]) for line in lines if line[0] in ("Anonymous:", "Pss_Shmem:"))


def kib_of_a_group(backend: str) -> float:
    hvd.barrier()
    before = held_kib()
    hvd.barrier()
    made = [use_group(backend) for _ in range(HELD_GROUPS)]
    hvd.barrier()
    each = torch.tensor((held_kib() - before) / HELD_GROUPS)
    hvd.barrier()
    for group in made:
        dist.destroy_process_group(group)
    return float(hvd.allreduce(each, op=hvd.Max))


def groups(args: argparse.Namespace) -> dict[str, Any]:
    kib = {name: kib_of_a_group(name) for name in ("dcoll", "gloo")}  # first: what was freed is used again
    kinds: dict[str, Call] = {
        name: lambda name=name: dist.destroy_process_group(use_group(name))  # type: ignore[misc]
        for name in kib
    }
    times, _ = measure(kinds, args.turns, args.ms)
    median = {kind: statistics.median(found) for kind, found in times.items()}
    say("\n| a group | ms | KiB |\n| --- | ---: | ---: |")
    for name, memory in kib.items():
        say(f"| {name} | {median[name] / 1e3:.2f} | {memory:.0f} |")
    return {"median_us": median, "ratio": ratio(times, "gloo", "dcoll"), "us": times, "kib": kib}


def peak_mib() -> float:
    """Resident, with what it shares with other ranks."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


def say(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["collective"] for row in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(3.4 * len(names), 3.4), squeeze=False, sharey=True)
    for axis, name in zip(axes[0], names, strict=True):
        for kind, color in (("dcoll", "#c1121f"), ("gloo", "#0077b6")):
            points = [(row["bytes"], row["median_us"][kind]) for row in rows if row["collective"] == name]
            axis.plot(*zip(*points, strict=True), "o-", color=color, label=kind, markersize=4)
        axis.set(title=name, xlabel="bytes", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("microseconds per call (median)")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("dcoll")
    gloo = dist.new_group(backend="gloo")
    about = describe()
    say(header(about))
    if dist.get_world_size() == 1 and "calls" in args.only and "send_recv" in args.collective:
        args.collective = [name for name in args.collective if name != "send_recv"]
        say("# send_recv left out: it is between two ranks")
    found: dict[str, Any] = {"environment": about}
    if "calls" in args.only:
        found["calls"] = calls(args, gloo)
    if "steps" in args.only:
        found["steps"] = steps(args, gloo)
    if "groups" in args.only:
        found["groups"] = groups(args)
    if hvd.rank() == 0 and args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if hvd.rank() == 0 and args.plot is not None and found.get("calls"):
        plot(found["calls"], args.plot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
