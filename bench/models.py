"""Models of which a step is little work, so that what communication costs beside it can be seen."""

import torch
from torch import nn


class Small(nn.Module):
    """1,000 parameters of 32 elements. Each is used once, by one addition to the one row there is."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.zeros(32)) for _ in range(1000)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for w in self.w:
            x = x + w
        return x.sum()

    @staticmethod
    def input(_: int) -> torch.Tensor:
        return torch.randn(32)


class Eighty(nn.Module):
    """40 layers of 256 x 256 with biases: 80 parameters, 10.5 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(40)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).sum()

    @staticmethod
    def input(rows: int) -> torch.Tensor:
        return torch.randn(rows, 256)


MODELS: dict[str, type[Small] | type[Eighty]] = {"small": Small, "eighty": Eighty}
