"""What the tests of GradientSync share."""

import torch
from torch import nn

from dcoll import _C
from dcoll.gradients import GradientSync


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
    return GradientSync(
        comm,
        model.parameters(),
        lambda p: names.get(id(p), "?"),
        bucket_bytes=40,
        first_bucket_bytes=20,
        **options,  # type: ignore[arg-type]
    )


def clear(model: nn.Module, sync: GradientSync, set_to_none: bool = True) -> None:
    sync.before_zero_grad()
    model.zero_grad(set_to_none)
