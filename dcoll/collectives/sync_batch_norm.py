"""Batch normalization over the batches of all ranks."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from dcoll.collectives import movement, reductions
from dcoll.errors import ArgumentError
from dcoll.job import world
from dcoll.ops import Sum


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """Batch normalization whose mean and variance, in training, are those of the batches of all ranks together.

    num_features: C of inputs of shape (N, C, ...); N may differ between ranks, and be 0 on some.
    eps, momentum, affine, track_running_stats: as in torch.nn.BatchNorm2d.

    All ranks must call forward, and backward, in the same order. Gradients of weight and bias are those of this rank's
    outputs, as DistributedOptimizer expects them. Raises ArgumentError for inputs of fewer than two dimensions, and
    ValueError when all ranks together have one value per channel.

        layer = hvd.SyncBatchNorm(16)
        layer(torch.randn(8, 16, 4, 4)).sum().backward()
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ArgumentError(f"SyncBatchNorm got an input of shape {list(input.shape)}, but takes (N, C, ...)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The input, normalized; with this rank's running statistics in evaluation."""
        self._check_input_dim(input)
        use_batch = self.training or self.running_mean is None
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if not use_batch:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        normalize = cast(Callable[..., tuple[torch.Tensor, ...]], _Normalize.apply)
        output, mean, variance, count = normalize(input, self.weight, self.bias, self.eps)
        if self.training and self.running_mean is not None and self.running_var is not None:
            momentum = self.momentum
            if momentum is None:  # the average over all batches so far
                momentum = 1.0 / float(self.num_batches_tracked)  # type: ignore[arg-type]
            with torch.no_grad():
                unbiased = variance * (count / (count - 1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        return output


def _per_channel(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return value.view(1, -1, *[1] * (like.dim() - 2))


class _Normalize(torch.autograd.Function):
    """(input - mean) / sqrt(variance + eps) * weight + bias, with the moments over all ranks."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, ...]:
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        mean, variance, count = _moments_of_all_ranks(input.to(wide))
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(input, weight, mean, inverse, count)
        wide_weight, wide_bias = (None if one is None else one.to(wide) for one in (weight, bias))
        output = F.batch_norm(input.to(wide), mean, variance, wide_weight, wide_bias, False, 0.0, eps)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, inverse, count = ctx.saved_tensors
        gradient = gradient.to(mean.dtype)
        normal = (input.to(mean.dtype) - _per_channel(mean, input)) * _per_channel(inverse, input)
        rest = [dim for dim in range(input.dim()) if dim != 1]
        sums = torch.stack([gradient.sum(rest), (gradient * normal).sum(rest)])
        own = sums.clone()
        reductions.allreduce_(sums, op=Sum, name="SyncBatchNorm.backward")
        to_input = None
        if ctx.needs_input_grad[0]:
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            center, slope = (_per_channel(one / count, input) for one in sums)
            to_input = ((gradient - center - normal * slope) * _per_channel(scale, input)).to(input.dtype)
        to_weight = own[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        to_bias = own[0].to(weight.dtype) if ctx.needs_input_grad[2] else None
        return to_input, to_weight, to_bias, None


def _moments_of_all_ranks(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and biased variance per channel, and the number of values per channel. The host waits for none of them.

    Moments are combined as by Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing sample
    variances", 1979): sums of squares would lose the variance of inputs far from zero.
    """
    channels = input.shape[1]
    count = input.numel() // channels if channels else 0
    rest = [dim for dim in range(input.dim()) if dim != 1]
    if count:
        variance, mean = torch.var_mean(input, rest, correction=0)
    else:
        mean = variance = input.new_zeros(channels)
    own = torch.cat([mean, variance, mean.new_full((1,), count)]).unsqueeze(0)
    everybody = movement.allgather(own, name="SyncBatchNorm.forward") if world.size() > 1 else own
    means, variances, counts = everybody[:, :channels], everybody[:, channels:-1], everybody[:, -1:]
    total = counts.sum()
    if count <= 1 and total <= 1:  # else this rank alone has enough
        raise ValueError(
            f"SyncBatchNorm needs more than one value per channel over all ranks in training; got {int(total)}, the "
            f"input of this rank has shape {list(input.shape)}"
        )
    mean = (means * counts).sum(0) / total
    variance = ((variances + (means - mean).square()) * counts).sum(0) / total
    return mean, variance, total
