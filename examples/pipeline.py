"""Pipeline parallel on dcoll: the blocks of a small GPT, some on each rank, which pass activations and gradients on.

    torchrun --nproc-per-node 2 examples/pipeline.py
    mpirun -n 2 --bind-to core python examples/pipeline.py
    torchrun --nproc-per-node 2 examples/pipeline.py --backend gloo    # to compare
"""  # fmt: skip

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, VOCABULARY
from text import Windows
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import dcoll.torch  # noqa: F401 - the backend; PyTorch 2.14 and later find it without


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A small GPT, its blocks shared out.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--backend", default="dcoll", help="of torch.distributed")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks, at least one per rank")
    parser.add_argument("--width", type=int, default=384, help="model width, a multiple of 6")
    parser.add_argument("--block", type=int, default=128, help="bytes of context")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--microbatches", type=int, default=4, help="parts of a batch that are under way at once")
    return parser.parse_args()


class Part(nn.Module):
    """One rank's blocks; the first rank has the embeddings too, the last the output, which is not tied to them here."""

    def __init__(self, whole: GPT, rank: int, size: int) -> None:
        super().__init__()
        first, last = rank == 0, rank == size - 1
        count = len(whole.blocks)
        self.token = whole.token if first else None
        self.position = whole.position if first else None
        self.blocks = whole.blocks[rank * count // size : (rank + 1) * count // size]
        self.head = nn.Sequential(whole.norm, nn.Linear(whole.token.embedding_dim, VOCABULARY)) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.token is not None and self.position is not None:
            x = self.token(x) + self.position.weight[: x.shape[1]]
        x = self.blocks(x)
        return x if self.head is None else self.head(x)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same model everywhere, of which each rank keeps its part
    part = Part(GPT(args.layers, 6, args.width, args.block), rank, size)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=args.microbatches, loss_fn=loss_of)
    windows = Windows(args.batch, args.block, 0)
    begin = time.perf_counter()
    for step in range(args.steps):
        optimizer.zero_grad()
        tokens, targets = windows.next()
        losses: list[torch.Tensor] = []
        inputs = (tokens,) if rank == 0 else ()
        schedule.step(*inputs, **({"target": targets, "losses": losses} if rank == size - 1 else {}))
        optimizer.step()
        if rank == size - 1 and (step % 10 == 9 or step + 1 == args.steps):
            each = (time.perf_counter() - begin) / (step + 1)
            mean = torch.stack(losses).mean().item()
            print(f"step {step + 1:4d}  loss {mean:6.3f}  {1e3 * each:7.1f} ms/step", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
