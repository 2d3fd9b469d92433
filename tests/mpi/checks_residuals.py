"""What was lost goes to the same elements, whatever keeps it next and wherever those lie, in jobs that compress."""

import io
import itertools
from typing import Any

import pytest
import torch

import dcoll as hvd
from dcoll.compression.residuals import KEY

SHAPE = (16, 6, 4, 3)
FORMATS = (torch.contiguous_format, torch.channels_last)
ALL = hvd.Compression.topk(1.0)  # what was lost arrives with the next gradients, as it was


def made(compression: Any, memory_format: torch.memory_format) -> tuple[torch.Tensor, Any]:
    p = torch.nn.Parameter(torch.zeros(SHAPE).contiguous(memory_format=memory_format))
    optimizer = torch.optim.SGD([p], lr=1.0)
    return p, hvd.DistributedOptimizer(optimizer, [("conv", p)], compression=compression, op=hvd.Sum)


def step(p: torch.Tensor, optimizer: Any, gradient: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    (p * gradient).sum().backward()
    optimizer.step()
    assert p.grad is not None
    return p.grad.clone()


def check_what_was_lost_stays_with_its_elements() -> None:
    """From each compressor and memory format to each."""
    torch.manual_seed(41 + hvd.rank())
    gradient = torch.randint(-50, 51, SHAPE).float()
    kinds = (hvd.Compression.powersgd(2), hvd.Compression.topk(0.1), hvd.Compression.int8)
    for compression, before in itertools.product(kinds, FORMATS):
        p, optimizer = made(compression, before)
        arrived = step(p, optimizer, gradient)
        missing = hvd.allreduce(gradient, op=hvd.Sum) - arrived
        assert missing.abs().max() > 0.1
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        for after in FORMATS:
            file.seek(0)
            p, optimizer = made(ALL, after)
            optimizer.load_state_dict(torch.load(file))
            again = optimizer.state_dict()[KEY]["lost"][0]["error"].reshape(SHAPE)
            torch.testing.assert_close(hvd.allreduce(again, op=hvd.Sum), missing, rtol=1e-4, atol=1e-2)
            got = step(p, optimizer, torch.zeros(SHAPE))
            torch.testing.assert_close(got, missing, rtol=1e-4, atol=1e-2)


def check_a_flat_one_is_as_the_gradient_lies() -> None:
    """As checkpoints had it that dcoll saved before they had shapes."""
    error = torch.arange(16.0 * 6 * 4 * 3).reshape(SHAPE) + hvd.rank()
    for kind, memory_format in itertools.product((ALL, hvd.Compression.powersgd(2)), FORMATS):
        _, optimizer = made(kind, memory_format)
        flat = error if memory_format is torch.contiguous_format else error.permute(0, 2, 3, 1)
        kept = {"rank": hvd.rank(), "process": "another", "lost": {0: {"error": flat.flatten()}}}
        optimizer.load_state_dict(optimizer.state_dict() | {KEY: kept})
        assert torch.equal(optimizer.state_dict()[KEY]["lost"][0]["error"].reshape(SHAPE), error)


def check_another_length_is_told() -> None:
    _, optimizer = made(hvd.Compression.topk(0.1), torch.channels_last)
    for error in (torch.ones(5, 2), torch.ones(10)):
        kept = {"rank": hvd.rank(), "process": "another", "lost": {0: {"error": error}}}
        with pytest.raises(hvd.ArgumentError, match="has 10 elements, but the parameter has 1152"):
            optimizer.load_state_dict(optimizer.state_dict() | {KEY: kept})
