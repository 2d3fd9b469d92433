"""Train a small convolutional network on scikit-learn's handwritten digits, data-parallel with dcoll.

    mpirun -n 2 python examples/train_digits.py
    python examples/train_digits.py                  # one rank, no mpirun needed

Every rank draws the same shuffled order from a common seed and takes its own share of each global batch, so N ranks
with batch B do the arithmetic of one rank with batch N*B.
"""  # fmt: skip

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch
import torch.nn.functional as F
from progress import Progress
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import Optimizer

import dcoll as hvd

Data = tuple[torch.Tensor, torch.Tensor]
TEST_SAMPLES = 360
REFERENCE_BATCH = 64  # the global batch that --lr is meant for


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small convnet on scikit-learn's digits with dcoll.",
        epilog="Under mpirun every rank runs this script; --batch is what each of them takes from the global batch.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=24, help="passes over the training set")
    parser.add_argument("--batch", type=int, default=64, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate for a global batch of "
                        f"{REFERENCE_BATCH}; scaled linearly with the global batch")  # fmt: skip
    parser.add_argument("--warmup-epochs", type=float, default=3.0, help="epochs over which the rate rises to its "
                        "scaled value")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the order of the samples")
    parser.add_argument("--threads", type=int, default=1, help="torch threads per rank. One, because each rank should "
                        "own one core: torch would start a thread per core in every rank, all competing")  # fmt: skip
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="written by rank 0 after every epoch")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint, on any number of ranks")
    parser.add_argument("--progress", choices=("auto", "bar", "lines", "off"), default="auto", help="auto: a bar on a "
                        "terminal, lines elsewhere")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there (rank 0)")
    args = parser.parse_args()
    for name in ("epochs", "batch", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint FILE, the file to go on from")
    return args


def stop_all_ranks(message: str) -> NoReturn:
    """For conditions that every rank sees alike: one message, and every rank leaves."""
    if hvd.rank() == 0:
        print(f"train_digits: {message}", file=sys.stderr, flush=True)
    hvd.barrier()
    sys.exit(2)


def load_data() -> tuple[Data, Data]:
    """The training and the test set."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # the split does not follow --seed
    train, test = order[TEST_SAMPLES:], order[:TEST_SAMPLES]
    return (images[train], labels[train]), (images[test], labels[test])


def make_model() -> nn.Module:
    """About 98,000 parameters and 15 MFLOP per sample, forward and backward."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128 * 2 * 2, 10),
    )  # fmt: skip


def learning_rate(args: argparse.Namespace, epoch: float) -> float:
    """Linear scaling rule with gradual warm-up (Goyal et al. 2017, sections 2.1 and 2.2), then linear decay to zero."""
    scaled = args.lr * args.batch * hvd.size() / REFERENCE_BATCH
    if epoch < args.warmup_epochs:
        start = min(args.lr, scaled)
        return float(start + (scaled - start) * epoch / args.warmup_epochs)
    return float(scaled * (args.epochs - epoch) / max(args.epochs - args.warmup_epochs, 1e-9))


def train_epoch(
    args: argparse.Namespace, epoch: int, model: nn.Module, optimizer: Optimizer, data: Data, *, progress: Progress
) -> float:
    """One pass over the training set; returns the mean loss over all ranks."""
    images, labels = data
    global_batch = args.batch * hvd.size()
    steps = len(labels) // global_batch  # the rest is left out; the next shuffle leaves out others
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(args.seed * 100_003 + epoch))
    loss_sum = torch.zeros(1)
    for step in range(steps):
        mine = order[step * global_batch : (step + 1) * global_batch][hvd.rank() :: hvd.size()]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, epoch + step / steps)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine], label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach()
        progress.advance(f"epoch {epoch + 1}/{args.epochs}  loss {loss.item():.3f}")
    return float(hvd.allreduce(loss_sum / steps, name="loss"))


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Each rank tests its share of the samples; the counts are summed."""
    images, labels = data
    mine = slice(hvd.rank(), None, hvd.size())
    correct = (model(images[mine]).argmax(1) == labels[mine]).sum()
    return int(hvd.allreduce(correct.reshape(1), op=hvd.Sum, name="correct")) / len(labels)


def save_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer, epochs_done: int) -> None:
    """A crash while writing leaves the previous checkpoint whole: the rename is atomic."""
    temporary = path.with_name(path.name + ".tmp")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs_done}, temporary)
    os.replace(temporary, path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Rank 0 reads the file, everybody gets its content. Returns the number of epochs done."""
    epochs_done, error = 0, ""
    if hvd.rank() == 0:
        try:
            state = torch.load(path, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            epochs_done = state["epochs"]
        except (OSError, RuntimeError, KeyError) as cause:
            error = f"cannot resume from {path}: {cause}"
    epochs_done, error = hvd.broadcast_object((epochs_done, error), root_rank=0)
    if error:
        stop_all_ranks(error)
    return int(epochs_done)


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    hvd.init()
    train_set, test_set = load_data()
    samples = len(train_set[1])
    steps = samples // (args.batch * hvd.size())
    if steps == 0:
        stop_all_ranks(
            f"--batch {args.batch} on {hvd.size()} ranks is more than the {samples} training samples; at most "
            f"{samples // hvd.size()} fit"
        )

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    first_epoch = load_checkpoint(args.checkpoint, model, optimizer) if args.resume else 0
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    chatty = hvd.rank() == 0
    seconds, loss = 0.0, float("nan")
    kind = args.progress if chatty else "off"
    with Progress(kind, total=args.epochs * steps, done=first_epoch * steps) as progress:
        for epoch in range(first_epoch, args.epochs):
            start = time.perf_counter()
            loss = train_epoch(args, epoch, model, optimizer, train_set, progress=progress)
            seconds += time.perf_counter() - start
            progress.milestone(f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}  {seconds:.1f} s")
            if args.checkpoint and chatty:
                save_checkpoint(args.checkpoint, model, optimizer, epoch + 1)

    trained = max(args.epochs - first_epoch, 0) * steps * args.batch * hvd.size()
    result = {
        "ranks": hvd.size(),
        "threads_per_rank": args.threads,
        "batch_per_rank": args.batch,
        "first_epoch": first_epoch,
        "epochs": args.epochs,
        "loss": loss if trained else None,
        "accuracy": accuracy(model, test_set),
        "train_seconds": seconds,
        "samples_per_second": trained / seconds if trained else None,
    }
    if chatty:
        rate = f"{result['samples_per_second']:,.0f} samples/s" if trained else "nothing left to train"
        print(f"{hvd.size()} rank(s) x {args.threads} thread(s): test accuracy {result['accuracy']:.2%}, {rate}")
        if args.json:
            args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
