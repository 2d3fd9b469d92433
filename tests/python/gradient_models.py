"""What the tests of GradientSync share."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dcoll import _C
from dcoll.compression import Compressor
from dcoll.optimizer.gradients import GradientSync

LATE = {"bytes": 0}
"""Up to which size the gradients of sync_of() are late."""


@pytest.fixture(autouse=True, params=[0, 4096], ids=["hooks", "late"])
def hooked_and_late(request: pytest.FixtureRequest) -> Iterator[int]:
    """Every test of GradientSync, with gradients that hooks take and with gradients that are taken together."""
    LATE["bytes"] = request.param
    yield request.param
    LATE["bytes"] = 0


class Halved(Compressor):
    """A compressor in Python."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


class Toy(nn.Module):
    """y = sum of w_i * x over the chosen i: the gradient of w_i is x, of the others None."""

    def __init__(self, count: int = 4, width: int = 5) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.zeros(width)) for _ in range(count)])

    def forward(self, x: float, use: list[int]) -> torch.Tensor:
        return torch.stack([(self.w[i] * (x + i)).sum() for i in use]).sum()

    def grads(self) -> list[float | None]:
        return [None if p.grad is None else p.grad.to_dense()[0].item() for p in self.w]


def sync_of(comm: _C.Communicator, model: nn.Module, **options: object) -> GradientSync:
    names = {id(p): name for name, p in model.named_parameters()}
    options = {"late_bytes": LATE["bytes"], "bucket_bytes": 40, "first_bucket_bytes": 20} | options
    sync = GradientSync(
        comm,
        model.parameters(),
        lambda p: names.get(id(p), "?"),
        **options,  # type: ignore[arg-type]
    )
    object.__setattr__(model, "sync", sync)  # as long as the model: hooks would keep it, but late gradients have none
    return sync


def clear(model: nn.Module, sync: GradientSync, set_to_none: bool = True) -> None:
    sync.before_zero_grad(set_to_none)
    model.zero_grad(set_to_none)
