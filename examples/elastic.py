"""Training that goes back to its last commit when a collective fails: Horovod's pytorch_mnist_elastic.py, with dcoll.

    mpirun -n 2 python examples/elastic.py
    mpirun -n 2 python examples/elastic.py --fail-at 12     # to see it happen

The state (model, optimizer, sampler, counters) is committed every few batches. --fail-at raises, once and on all ranks,
what a failed collective raises. It differs from a script for Horovod in the import alone.
"""  # fmt: skip

import argparse

import torch
import torch.nn.functional as F
from mnist import Net, load_digits, metric_average
from torch.utils.data import DataLoader

import dcoll as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Elastic training of a small convnet on pictures of digits with dcoll.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--batch-size", type=int, default=32, help="pictures per rank and step")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the training set")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of one rank")
    parser.add_argument("--batches-per-commit", type=int, default=5, help="steps between commits")
    parser.add_argument("--fail-at", type=int, default=-1, metavar="STEP", help="fail once, in this step of all")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)  # per rank, of which there is one per core
    lr = args.lr

    train_set, test_set = load_digits()
    train_sampler = hvd.elastic.ElasticSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    images, labels = test_set.tensors

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    steps = 0  # of this process, also those that were undone

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        nonlocal steps
        while state.epoch < args.epochs:
            state.sampler.set_epoch(state.epoch)
            model.train()
            for data, target in train_loader:
                if steps == args.fail_at:
                    steps += 1
                    raise hvd.HorovodInternalError("told to fail")
                optimizer.zero_grad()
                loss = F.nll_loss(model(data), target)
                loss.backward()
                optimizer.step()
                steps += 1
                state.batch += 1
                state.sampler.record_batch(state.batch, args.batch_size)
                if state.batch % args.batches_per_commit == 0:
                    state.commit()
            state.epoch += 1
            state.batch = 0
            test(state)
            state.commit()

    def test(state: hvd.elastic.TorchState) -> None:
        model.eval()
        mine = slice(hvd.rank(), None, hvd.size())
        with torch.no_grad():
            correct = model(images[mine]).argmax(1).eq(labels[mine]).float().mean().item()
        accuracy = metric_average(correct, "avg_accuracy")
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}/{args.epochs}: accuracy {100 * accuracy:.2f}%", flush=True)

    def on_state_reset() -> None:
        # The number of ranks may be another one now.
        for group in optimizer.param_groups:
            group["lr"] = lr * hvd.size()
        if hvd.rank() == 0:
            print(f"back to epoch {state.epoch} batch {state.batch}", flush=True)

    state = hvd.elastic.TorchState(model, optimizer, sampler=train_sampler, epoch=0, batch=0)
    state.register_reset_callbacks([on_state_reset])
    train(state)
    if hvd.rank() == 0:
        print(f"{steps} steps on {hvd.size()} rank(s)")


if __name__ == "__main__":
    main()
