"""What the examples of torch.distributed train on: the source of Python's standard library, as bytes."""

import sysconfig
from pathlib import Path

import torch


class Windows:
    """Random windows of the text. Who has another `number` draws others."""

    def __init__(self, batch: int, block: int, number: int, most_bytes: int = 4 << 20) -> None:
        text = bytearray()
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += file.read_bytes()
        self.text = torch.frombuffer(text[:most_bytes], dtype=torch.uint8)
        self.batch, self.block = batch, block
        self.draw = torch.Generator().manual_seed(number)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self.text) - self.block, (self.batch, 1), generator=self.draw)
        windows = self.text[starts + torch.arange(self.block + 1)].long()
        return windows[:, :-1], windows[:, 1:]
