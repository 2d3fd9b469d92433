"""AdamW for compressed gradients."""

from collections.abc import Callable
from typing import Any

import torch

from dcoll.errors import ArgumentError

LEAST = 0.01
"""Of the mean of a parameter's second moments: what one of them is at the least, once they stay."""


class FrozenAdamW(torch.optim.AdamW):
    """AdamW whose second moments stay, after `freeze_step` steps, what they are: the warm-up of 1-bit Adam.

    Error feedback delays a part of each gradient, so that many arrive together later. The sum of what arrives is right,
    but its square is not the sum of the squares, so Adam, which divides by it, takes too short a step; and other
    elements, of which nothing arrives, too long ones. With second moments that stay, a step is linear in the gradients,
    and the delay does no more than in SGD with momentum (H. Tang et al., "1-bit Adam", 2021; OnebitAdam in DeepSpeed).

    Let compression begin at that step, not before: second moments are then those of gradients as they are. An element
    of which little has come by then, as of a rare word's embedding, would move far at the next gradient: its second
    moment becomes a hundredth of the mean of its parameter's.

        import torch, dcoll
        from dcoll.optimizer import FrozenAdamW

        dcoll.init()
        model = torch.nn.Linear(20, 10)
        optimizer = dcoll.DistributedOptimizer(
            FrozenAdamW(model.parameters(), lr=1e-3, freeze_step=1000),
            model.named_parameters(),
            compression=dcoll.Compression.powersgd(rank=4, start_step=1000),
        )

    Up to freeze_step it is torch's AdamW, and its state has the same names. A parameter group may have its own
    freeze_step. Raises ArgumentError.
    """

    def __init__(self, params: Any, lr: float = 1e-3, *, freeze_step: int, **options: Any) -> None:
        """options: torch.optim.AdamW's betas, eps and weight_decay."""
        unknown = set(options) - {"betas", "eps", "weight_decay"}
        if unknown:
            raise ArgumentError(
                f"FrozenAdamW got {', '.join(sorted(unknown))}, but takes lr, freeze_step, betas, eps and weight_decay"
            )
        _check(freeze_step)
        super().__init__(params, lr, **options)
        self.defaults["freeze_step"] = freeze_step
        for group in self.param_groups:
            _check(group.setdefault("freeze_step", freeze_step))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch."""
        _check(param_group.get("freeze_step", 1))
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As in torch; also of a state of AdamW, which has no freeze_step."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            group.setdefault("freeze_step", self.defaults["freeze_step"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As in torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step_of(p, p.grad, group)
        return loss

    def _step_of(self, p: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), lr = self.state[p], group["betas"], group["lr"]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["step"] += 1
        step = int(state["step"])
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        p.mul_(1 - lr * group["weight_decay"])
        mean.lerp_(gradient, 1 - beta1)
        if step <= group["freeze_step"]:
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if step == group["freeze_step"]:
            least = square.mean() * LEAST
            state["step"] -= float(least == 0)  # only zeros have come: its time is not over
            square.clamp_(min=least)
        seen = min(step, group["freeze_step"])
        scale = (square / (1 - beta2**seen)).sqrt_().add_(group["eps"])
        p.addcdiv_(mean, scale, value=-lr / (1 - beta1**step))


def _check(freeze_step: object) -> None:
    if isinstance(freeze_step, bool) or not isinstance(freeze_step, int) or freeze_step < 1:
        raise ArgumentError(f"freeze_step is {freeze_step!r}, but must be a number of steps, at least 1")
