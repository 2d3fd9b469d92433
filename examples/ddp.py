"""PyTorch's DistributedDataParallel on dcoll: the script of any backend, with another word.

    torchrun --nproc-per-node 2 examples/ddp.py
    mpirun -n 2 --bind-to core python examples/ddp.py
    torchrun --nproc-per-node 2 examples/ddp.py --backend gloo    # to compare
"""  # fmt: skip

import argparse
import time

import torch
import torch.distributed as dist
from gpt import GPT
from text import Windows
from torch.nn.parallel import DistributedDataParallel

import dcoll.torch  # noqa: F401 - the backend; PyTorch 2.14 and later find it without


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A small GPT, data-parallel.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--backend", default="dcoll", help="of torch.distributed")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks")
    parser.add_argument("--width", type=int, default=384, help="model width, a multiple of 6")
    parser.add_argument("--block", type=int, default=128, help="bytes of context")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(args.layers, 6, args.width, args.block), gradient_as_bucket_view=True)
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
