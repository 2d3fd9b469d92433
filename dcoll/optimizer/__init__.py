"""DistributedOptimizer, whose gradients are reduced in buckets while backward runs. Needs torch."""

from dcoll.optimizer.distributed_optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
