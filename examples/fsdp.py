"""PyTorch's fully_shard (FSDP2) on dcoll: each rank keeps its share of parameters, gradients and optimizer state.

    torchrun --nproc-per-node 2 examples/fsdp.py
    mpirun -n 2 --bind-to core python examples/fsdp.py
"""  # fmt: skip

import argparse
import time

import torch
import torch.distributed as dist
from gpt import GPT
from text import Windows
from torch.distributed.fsdp import fully_shard

import dcoll.torch  # the backend too; PyTorch 2.14 and later find that without


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A small GPT, sharded.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--backend", default="dcoll", help="of torch.distributed")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks")
    parser.add_argument("--width", type=int, default=384, help="model width, a multiple of 6")
    parser.add_argument("--block", type=int, default=128, help="bytes of context")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    return parser.parse_args()


def shard(model: torch.nn.Module) -> torch.nn.Module:
    """Block by block, so that one is gathered while another computes."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for module in model.modules():  # buffers out of memory that the node's ranks share (PyTorch 2.13 and later)
        if hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
            module.set_allocate_memory_from_process_group_for_comm(True)
    dcoll.torch.overlap_all_gathers(model)
    return model


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = shard(GPT(args.layers, 6, args.width, args.block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    windows = Windows(args.batch, args.block, rank)
    begin = time.perf_counter()
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = model(*windows.next())
        loss.backward()
        optimizer.step()
        if step % 10 == 9 or step + 1 == args.steps:
            mean = loss.detach().reshape(1)
            dist.all_reduce(mean)
            if rank == 0:
                each = (time.perf_counter() - begin) / (step + 1)
                print(f"step {step + 1:4d}  loss {mean.item() / size:6.3f}  {1e3 * each:7.1f} ms/step", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
