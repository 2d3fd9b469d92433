"""The methods that bench/convergence.py compares: a compressor for each, made anew for every run.

A quarter of a run's steps is top-k's warm-up. "late": in so many gradients travel as they are, as torch's
start_powerSGD_iter has it; "frozen": and AdamW's second moments stay what they are from then on, as in 1-bit Adam;
"beta": AdamW's first moment forgets sooner, since what comes late has a memory of its own.
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
    freezes: bool = False
    """AdamW's second moments stay."""
    beta1: float | None = None
    """AdamW's first beta, in place of the task's."""

    @property
    def needs_adamw(self) -> bool:
        return self.freezes or self.beta1 is not None


def quarter(steps: int) -> int:
    """When what is late begins."""
    return max(1, steps // 4)


def topk(steps: int) -> Any:
    return Compression.topk(ratio=0.01, start_step=quarter(steps))


def powersgd(steps: int) -> Any:
    return Compression.powersgd(rank=4, start_step=quarter(steps))


PLAIN = "none"
SHORT_BETA = 0.6
"""PowerSGD's best first beta of 0.9, 0.8, 0.6, 0.5, 0.3 and 0."""
METHODS = {
    PLAIN: Method(lambda _: Compression.none, "#000000"),
    "fp16": Method(lambda _: Compression.fp16, "#0077b6"),
    "bf16": Method(lambda _: Compression.bf16, "#00b4d8"),
    "int8": Method(lambda _: Compression.int8, "#2a9d8f"),
    "int8-no-feedback": Method(lambda _: Compression.int8(feedback=False), "#8d6e63"),
    "topk": Method(lambda _: Compression.topk(ratio=0.01), "#c1121f"),
    "topk-warmup": Method(lambda steps: Compression.topk(ratio=0.01, warmup_steps=quarter(steps)), "#f77f00"),
    "topk-momentum": Method(
        lambda steps: Compression.topk(ratio=0.01, momentum=0.9, warmup_steps=quarter(steps)), "#d62ad0", True
    ),
    "topk-late": Method(topk, "#6a040f"),
    "topk-late-warmup": Method(
        lambda steps: Compression.topk(ratio=0.01, start_step=quarter(steps), warmup_steps=quarter(steps)), "#bc6c25"
    ),
    "topk-frozen": Method(topk, "#ff006e", freezes=True),
    "topk-no-feedback": Method(lambda _: Compression.topk(ratio=0.01, feedback=False), "#e09f3e"),
    "powersgd": Method(lambda _: Compression.powersgd(rank=4), "#7b2cbf"),
    "powersgd-late": Method(powersgd, "#3a0ca3"),
    "powersgd-frozen": Method(powersgd, "#4895ef", freezes=True),
    "frozen": Method(lambda _: Compression.none, "#606c38", freezes=True),
    "beta": Method(lambda _: Compression.none, "#8a817c", beta1=SHORT_BETA),
    "topk-beta": Method(lambda _: Compression.topk(ratio=0.01), "#ff7096", beta1=SHORT_BETA),
    "topk-late-beta": Method(topk, "#a4133c", beta1=SHORT_BETA),
    "powersgd-beta": Method(lambda _: Compression.powersgd(rank=4), "#b388eb", beta1=SHORT_BETA),
    "powersgd-late-beta": Method(powersgd, "#5a189a", beta1=SHORT_BETA),
}
