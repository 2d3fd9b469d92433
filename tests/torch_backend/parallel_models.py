"""Small models of the tests, and how they train in one process."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

STEPS, BATCH, WIDTH = 4, 24, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def model(blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(WIDTH, 1)).double()


def batches() -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Of the whole job: all ranks draw the same."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=draw, dtype=torch.float64)
        yield x, x.sum(1, keepdim=True).tanh()


def train(
    net: nn.Module, share: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole, steps: int = STEPS
) -> list[float]:
    """The losses of this rank's share."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for x, y in list(batches())[:steps]:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(share(x)), share(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained() -> dict[str, torch.Tensor]:
    """What one process comes to."""
    net = model()
    train(net)
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def near(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )
