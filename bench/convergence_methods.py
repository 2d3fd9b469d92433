"""The methods that bench/convergence.py compares: a compressor for each, made anew for every run.

A quarter of a run's steps is top-k's warm-up, a tenth of them go by before PowerSGD begins.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dcoll import Compression


@dataclass(frozen=True)
class Method:
    """A way to compress, of a run of so many steps, and its colour in plots."""

    make: Callable[[int], Any]
    color: str
    takes_momentum: bool = False
    """The compressor has the momentum, in place of the optimizer."""


PLAIN = "none"
METHODS = {
    PLAIN: Method(lambda _: Compression.none, "#000000"),
    "fp16": Method(lambda _: Compression.fp16, "#0077b6"),
    "bf16": Method(lambda _: Compression.bf16, "#00b4d8"),
    "int8": Method(lambda _: Compression.int8, "#2a9d8f"),
    "int8-no-feedback": Method(lambda _: Compression.int8(feedback=False), "#8d6e63"),
    "topk": Method(lambda _: Compression.topk(ratio=0.01), "#c1121f"),
    "topk-warmup": Method(lambda steps: Compression.topk(ratio=0.01, warmup_steps=steps // 4), "#f77f00"),
    "topk-momentum": Method(
        lambda steps: Compression.topk(ratio=0.01, momentum=0.9, warmup_steps=steps // 4), "#d62ad0", True
    ),
    "topk-no-feedback": Method(lambda _: Compression.topk(ratio=0.01, feedback=False), "#e09f3e"),
    "powersgd": Method(lambda _: Compression.powersgd(rank=4), "#7b2cbf"),
    "powersgd-late": Method(lambda steps: Compression.powersgd(rank=4, start_step=steps // 10), "#3a0ca3"),
}
