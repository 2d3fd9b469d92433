"""Gradients of small parameters, taken all at once when backward has ended rather than one by one by hooks.

For autograd to call a hook costs one to two microseconds, whatever the hook does: more than everything else that is
done for a small gradient. And reducing a few kilobytes while backward runs gains nothing. So the biases and norms of a
model have no hook, and their buckets are the last.

After a backward in which other hooks were called, every late gradient that is there counts. One that went through late
parameters alone is noticed by their gradients: they came, or torch has written to them.

That holds for the thread that made the optimizer. A backward on another one may run at the same time and be of another
model, so the first such gives all parameters hooks, which know.
"""

from collections.abc import Sequence

import torch

from dcoll import _C

_ALL_LATE_BYTES = 1 << 20


def late_ones(params: Sequence[torch.Tensor], most_bytes: int) -> list[int]:
    """Which parameters are so small, as long as there are not too many of them."""
    late, total = [], 0
    for i, p in enumerate(params):
        if p.nbytes <= most_bytes and total + p.nbytes <= _ALL_LATE_BYTES:
            late.append(i)
            total += p.nbytes
    return late


class LateGradients:
    """Those of one GradientSync. Without any, nothing here does anything."""

    def __init__(self) -> None:
        self._params: list[torch.Tensor] = []
        self._hooks: list[_C.GradientHook] = []
        self._marks = 0
        self.none_left = False
        """They are known to be None."""

    def set(self, params: list[torch.Tensor], hooks: list[_C.GradientHook]) -> None:
        self._params, self._hooks, self.none_left = params, hooks, False

    def __bool__(self) -> bool:
        return bool(self._params)

    def register(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Have autograd call their hooks one by one, as it does those of other parameters."""
        handles = []
        for p, hook in zip(self._params, self._hooks, strict=True):
            frozen = not p.requires_grad
            p.requires_grad_()  # torch takes a hook of no other parameter
            handles.append(p.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            p.requires_grad_(not frozen)
        return handles

    def take(self) -> None:
        """Bring those that are there into their buckets."""
        self.none_left = False
        _C.take_gradients(self._hooks, self._params)

    def before_backward(self) -> None:
        self._marks = 0 if self.none_left else _C.gradient_marks(self._params)
        self.none_left = False

    def changed(self) -> bool:
        """Whether the backward came by one of them."""
        marks = _C.gradient_marks(self._params)
        self.none_left = marks == 0
        return marks != self._marks
