"""torch.compile leaves the backend's own functions alone: what they do, the core does behind its back."""

import types
from collections.abc import Callable
from typing import Any

import torch

_DYNAMO = torch._C._dynamo.eval_frame


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Neither traced nor what it calls. Costs a call nothing, as a wrapper would."""
    if isinstance(function, types.FunctionType) and hasattr(_DYNAMO, "_FrameExecStrategy"):
        skip = _DYNAMO._FrameAction.SKIP
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = "dcoll's backend"  # type: ignore[attr-defined]
        _DYNAMO.set_code_exec_strategy(function.__code__, _DYNAMO._FrameExecStrategy(skip, skip))
    return function


def left_alone(*classes: type) -> None:
    """The methods of these classes."""
    for owner in {one for made in classes for one in made.__mro__ if one.__module__.startswith("dcoll.")}:
        for member in vars(owner).values():
            function = member.fget if isinstance(member, property) else member
            alone(function)  # type: ignore[arg-type]
