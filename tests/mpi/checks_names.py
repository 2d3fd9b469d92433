"""By name, join and stalls, as a script sees them."""

import random

import numpy as np
import pytest
import torch

import dcoll as hvd


def check_names_in_random_order() -> None:
    rng = random.Random(hvd.rank())
    total = sum(range(1, hvd.size() + 1))
    for _ in range(3):
        order = list(range(20))
        rng.shuffle(order)
        tensors = {i: torch.full((10 ** (i % 5),), float((i + 1) * (hvd.rank() + 1))) for i in order}
        handles = {i: hvd.allreduce_async_(tensors[i], op=hvd.Sum, name=f"t{i}") for i in order}
        gathered = hvd.allgather_async(np.array([hvd.rank()]), name="t0")
        assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == hvd.size()
        rng.shuffle(order)
        for i in order:
            assert (hvd.synchronize(handles[i]) == (i + 1) * total).all()
        assert gathered.wait().tolist() == list(range(hvd.size()))


def check_a_name_twice() -> None:
    first = hvd.allreduce_async(torch.ones(3), name="twice") if hvd.rank() == 0 else None
    if first is not None:
        with pytest.raises(hvd.ArgumentError, match=r"twice.*still under way"):
            hvd.allreduce_async(torch.ones(3), name="twice")
    hvd.barrier()
    (first or hvd.allreduce_async(torch.ones(3), name="twice")).wait()


def check_a_mismatch_by_name() -> None:
    good = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="good")
    bad = hvd.allreduce_async(torch.ones(3 + hvd.rank()), name="bad")
    with pytest.raises(hvd.MismatchError, match=r"rank 0 called allreduce .bad. .average of 3 float32.; rank 1 called"):
        bad.wait()
    assert good.wait().tolist() == [hvd.size()] * 2


def check_uneven_batches_train() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(2):
        with hvd.Join([torch.ones(2, 4)] * 3 * hvd.rank()) as batches:  # rank 0 has none at all
            for batch in batches:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
        assert batches.last == hvd.size() - 1
        assert batches.steps == 3 * hvd.rank()
        hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        assert (model.weight.grad == 2.0).all()
        optimizer.step()
    assert hvd.join() in range(hvd.size())
