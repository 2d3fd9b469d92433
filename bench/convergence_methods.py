"""The methods that bench/convergence.py compares: a compressor for each, made anew for every run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dcoll import Compression

BLOCK = 256  # elements that share a scale, as in the core's int8


def round_to_int8(tensor: torch.Tensor) -> torch.Tensor:
    """Each block's multiples of its greatest magnitude / 127, as float32 again."""
    flat = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)
    scale = flat.abs().amax(1, keepdim=True) / 127
    rounded = (flat / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_() * scale
    return rounded.flatten()[: tensor.numel()].view(tensor.shape)


class Int8NoFeedback:
    """What Compression.int8 sends, but what is lost stays lost. Rounded twice too: what goes out, and the average.

    Blocks begin at each gradient's own start, the core's at those of a bucket's parts.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return round_to_int8(tensor), None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        return round_to_int8(tensor)


@dataclass(frozen=True)
class Method:
    """A way to compress, and the name in dcoll.Compression that it needs ("": none)."""

    make: Callable[[], Any]
    needs: str
    color: str


PLAIN = "none"
# Attributes of Compression are looked up when a run begins: an older dcoll lacks some.
_there: Any = Compression
METHODS = {
    PLAIN: Method(lambda: _there.none, "none", "#000000"),
    "fp16": Method(lambda: _there.fp16, "fp16", "#0077b6"),
    "bf16": Method(lambda: _there.bf16, "bf16", "#00b4d8"),
    "int8": Method(lambda: _there.int8, "int8", "#2a9d8f"),
    "int8-no-feedback": Method(lambda: Int8NoFeedback, "", "#8d6e63"),
    "topk": Method(lambda: _there.topk(ratio=0.01), "topk", "#c1121f"),
    "topk-no-feedback": Method(lambda: _there.topk(ratio=0.01, feedback=False), "topk", "#e09f3e"),
    "powersgd": Method(lambda: _there.powersgd(rank=4), "powersgd", "#7b2cbf"),
}


def available() -> list[str]:
    """The methods that this dcoll has."""
    return [name for name, method in METHODS.items() if not method.needs or hasattr(Compression, method.needs)]
