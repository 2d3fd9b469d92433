"""Which backward is running: what autograd knows, and tells only in private."""

import sys

import torch

graph_task = torch._C._current_graph_task_id
"""The number of the backward that runs on this thread."""

_run_backward = torch.autograd.graph._engine_run_backward.__code__


def is_nested() -> bool:
    """True inside a backward that runs inside another one on this thread."""
    depth = 0
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        depth += frame.f_code is _run_backward
    return depth > 1
