"""A small convolutional network on pictures of digits: Horovod's pytorch_mnist.py, with dcoll.

    mpirun -n 2 python examples/mnist.py

The pictures are scikit-learn's (8 x 8 pixels, nothing to download); where it is not installed, noisy ones are made up.
It differs from a script for Horovod in the import alone.
"""  # fmt: skip

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import dcoll as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small convnet on pictures of digits with dcoll.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--batch-size", type=int, default=32, help="pictures per rank and step")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training set")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of one rank")
    parser.add_argument("--momentum", type=float, default=0.5, help="of SGD")
    parser.add_argument("--seed", type=int, default=42, help="of the weights and the order of the pictures")
    parser.add_argument("--log-interval", type=int, default=10, help="steps between lines")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum instead of averaging")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0, help="divide by this before the sum")
    return parser.parse_args()


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """1437 pictures to train on, 360 to test with."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        draw = torch.Generator().manual_seed(0)
        labels = torch.randint(0, 10, (1797,), generator=draw)
        shapes = torch.rand(10, 1, 8, 8, generator=draw)
        images = shapes[labels] + 0.3 * torch.randn(1797, 1, 8, 8, generator=draw)
    else:
        digits = load()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
        labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=3, padding=1)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(80, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.view(-1, 80)))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def metric_average(value: float, name: str) -> float:
    return float(hvd.allreduce(torch.tensor(value), name=name))


def main() -> None:
    args = parse_arguments()
    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # per rank, of which there is one per core

    # Every rank works on its own share of the pictures.
    train_set, test_set = load_digits()
    train_sampler: DistributedSampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    test_sampler: DistributedSampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test_set, batch_size=100, sampler=test_sampler)

    model = Net()
    # The batch grows with the number of ranks, and the learning rate with it; Adasum needs no such scaling.
    scaler = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scaler, momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    def train(epoch: int) -> None:
        model.train()
        train_sampler.set_epoch(epoch)
        for step, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            if step % args.log_interval == 0 and hvd.rank() == 0:
                print(f"Train Epoch: {epoch} [{step * len(data)}/{len(train_sampler)}]\tLoss: {loss.item():.6f}")

    def test() -> None:
        model.eval()
        loss, correct = 0.0, 0.0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                loss += F.nll_loss(output, target, reduction="sum").item()
                correct += output.argmax(1).eq(target).sum().item()
        loss = metric_average(loss / len(test_sampler), "avg_loss")
        accuracy = metric_average(correct / len(test_sampler), "avg_accuracy")
        if hvd.rank() == 0:
            print(f"\nTest set: Average loss: {loss:.4f}, Accuracy: {100 * accuracy:.2f}%\n", flush=True)

    for epoch in range(1, args.epochs + 1):
        train(epoch)
        test()


if __name__ == "__main__":
    main()
