"""The methods that bench/convergence.py compares: a compressor for each, made anew for every run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dcoll import Compression


@dataclass(frozen=True)
class Method:
    """A way to compress, and its colour in plots."""

    make: Callable[[], Any]
    color: str


PLAIN = "none"
METHODS = {
    PLAIN: Method(lambda: Compression.none, "#000000"),
    "fp16": Method(lambda: Compression.fp16, "#0077b6"),
    "bf16": Method(lambda: Compression.bf16, "#00b4d8"),
    "int8": Method(lambda: Compression.int8, "#2a9d8f"),
    "int8-no-feedback": Method(lambda: Compression.int8(feedback=False), "#8d6e63"),
    "topk": Method(lambda: Compression.topk(ratio=0.01), "#c1121f"),
    "topk-no-feedback": Method(lambda: Compression.topk(ratio=0.01, feedback=False), "#e09f3e"),
    "powersgd": Method(lambda: Compression.powersgd(rank=4), "#7b2cbf"),
}
