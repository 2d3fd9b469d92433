"""torch.compile leaves the backend's own functions alone: what they do, the core does behind its back."""

import types

import torch

_DYNAMO = torch._C._dynamo.eval_frame


def left_alone(*classes: type) -> None:
    """Neither trace the methods of these classes nor what they call. Costs a call nothing, as a wrapper would."""
    if not hasattr(_DYNAMO, "_FrameExecStrategy"):
        return
    skip = _DYNAMO._FrameAction.SKIP
    for owner in {one for made in classes for one in made.__mro__ if one.__module__.startswith("dcoll.")}:
        for member in vars(owner).values():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, types.FunctionType):
                function._torchdynamo_disable = True  # type: ignore[attr-defined]
                function._torchdynamo_disable_msg = "dcoll's backend"  # type: ignore[attr-defined]
                _DYNAMO.set_code_exec_strategy(function.__code__, _DYNAMO._FrameExecStrategy(skip, skip))
