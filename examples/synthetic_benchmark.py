"""Images per second of a convolutional network on random data: Horovod's pytorch_synthetic_benchmark.py, with dcoll.

    mpirun -n 2 python examples/synthetic_benchmark.py
    mpirun -n 2 python examples/synthetic_benchmark.py --fp16-allreduce

It differs from a script for Horovod in the import alone.
"""  # fmt: skip

import argparse
import statistics
import timeit

import torch
import torch.nn.functional as F
from torch import nn

import dcoll as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Images per second of a residual network on random data, with dcoll.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum instead of averaging")
    parser.add_argument("--batch-size", type=int, default=16, help="images per rank and step")
    parser.add_argument("--image-size", type=int, default=32, help="pixels in each direction")
    parser.add_argument("--width", type=int, default=32, help="channels of the first layer")
    parser.add_argument("--num-warmup-batches", type=int, default=5, help="batches before the clock starts")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="batches per iteration")
    parser.add_argument("--num-iters", type=int, default=10, help="iterations, each of which is a line")
    return parser.parse_args()


class Block(nn.Module):
    """Two convolutions and a way around them (He et al., "Deep Residual Learning", 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10),
    )  # fmt: skip


def main() -> None:
    args = parse_arguments()
    hvd.init()
    torch.set_num_threads(1)  # per rank, of which there is one per core
    model = make_model(args.width)

    # Adasum takes care of the scale itself.
    scaler = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * scaler)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    data = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    target = torch.randint(0, 10, (args.batch_size,))

    def benchmark_step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()

    def log(text: str) -> None:
        if hvd.rank() == 0:
            print(text, flush=True)

    log(f"Batch size: {args.batch_size}")
    log(f"Number of ranks: {hvd.size()}")
    timeit.timeit(benchmark_step, number=args.num_warmup_batches)
    speeds = []
    for i in range(args.num_iters):
        seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
        speeds.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"Iter #{i}: {speeds[-1]:.1f} img/sec per rank")

    mean, spread = statistics.mean(speeds), 1.96 * statistics.pstdev(speeds)
    log(f"Img/sec per rank: {mean:.1f} +-{spread:.1f}")
    log(f"Total img/sec on {hvd.size()} rank(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")


if __name__ == "__main__":
    main()
