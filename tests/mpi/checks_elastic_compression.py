"""What compression has lost, in elastic training and with another number of ranks, where something is encoded."""

import contextlib
import io
from typing import Any

import torch

import dcoll as hvd
from dcoll.compression.residuals import KEY

COUNT = 6000
COMPRESSIONS = (hvd.Compression.topk(0.05), hvd.Compression.int8)


def gradients(steps: int) -> torch.Tensor:
    """Whole numbers: what is sent of top-k and what is kept are exact."""
    return torch.randint(-50, 51, (steps, COUNT), generator=torch.Generator().manual_seed(hvd.rank())).float()


def model_and_optimizer(compression: Any, **options: Any) -> tuple[torch.nn.Module, Any]:
    """The gradient is what the weight is multiplied by."""
    model = torch.nn.Linear(COUNT, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, hvd.DistributedOptimizer(optimizer, compression=compression, op=hvd.Sum, **options)


def reduced(model: Any, optimizer: Any, gradient: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    (model.weight * gradient).sum().backward()
    optimizer.step()
    grad: torch.Tensor = model.weight.grad[0].double()
    return grad


def kept(optimizer: Any) -> torch.Tensor:
    error: torch.Tensor = optimizer.state_dict()[KEY]["lost"][0]["error"].double()
    return error.flatten()


def assert_all_there(arrived: torch.Tensor, optimizer: Any, given: torch.Tensor, **options: Any) -> None:
    """arrived, on all ranks alike, and what the ranks keep are the sum of what they were given."""
    found = arrived + hvd.allreduce(kept(optimizer), op=hvd.Sum, **options)
    torch.testing.assert_close(found, hvd.allreduce(given.double(), op=hvd.Sum, **options), rtol=0, atol=1e-2)


def check_a_commit_has_what_was_lost() -> None:
    """Steps behind it are undone, on every rank, in the residuals too."""
    given = gradients(6)
    for compression in COMPRESSIONS:
        model, optimizer = model_and_optimizer(compression)
        state = hvd.elastic.TorchState(model, optimizer, step=0, arrived=torch.zeros(COUNT, dtype=torch.float64))
        undone: list[int] = []

        def train(state: hvd.elastic.TorchState, undone: list[int] = undone) -> None:
            while state.step < len(given):
                state.arrived = state.arrived + reduced(state.model, state.optimizer, given[state.step])
                state.step += 1
                if state.step == 5 and not undone:
                    undone.append(state.step)
                    hvd.allreduce(torch.ones(3 + hvd.rank()))
                if state.step % 3 == 0:
                    state.commit()

        with contextlib.redirect_stderr(io.StringIO()):
            hvd.elastic.run(train)(state)
        assert undone
        assert kept(optimizer).any()
        assert_all_there(state.arrived, optimizer, given.sum(0))


def check_another_number_of_ranks() -> None:
    """Each rank takes back its own, a new one begins with zeros, and a rank alone gets its own back at once."""
    gradient = gradients(1)[0]
    sets = [hvd.global_process_set]
    sets += [hvd.add_process_set(range(n)) for n in range(1, hvd.size())]
    for compression in COMPRESSIONS:
        for before, after in [(a, b) for a in sets for b in sets if a is not b and a.size() > 1]:
            saved, lost = None, torch.zeros(COUNT, dtype=torch.float64)
            if before.included():
                model, optimizer = model_and_optimizer(compression, process_set=before)
                reduced(model, optimizer, gradient)
                saved, lost = optimizer.state_dict(), kept(optimizer).clone()
                saved[KEY]["process"] = "of another job"
            of_rank_0 = hvd.broadcast_object(saved, root_rank=0)
            if not after.included():
                continue
            model, optimizer = model_and_optimizer(compression, process_set=after)
            optimizer.load_state_dict(saved or of_rank_0)
            if after.size() == 1:
                torch.testing.assert_close(reduced(model, optimizer, gradient), gradient + lost, rtol=0, atol=1e-2)
                assert torch.equal(reduced(model, optimizer, gradient), gradient.double())
                continue
            assert torch.equal(kept(optimizer), lost)
            arrived = reduced(model, optimizer, gradient)
            assert_all_there(arrived, optimizer, gradient + lost, process_set=after)
