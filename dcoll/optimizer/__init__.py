"""DistributedOptimizer, whose gradients are reduced in buckets while backward runs. Needs torch."""

from dcoll.optimizer.distributed_optimizer import DistributedOptimizer
from dcoll.optimizer.frozen_adamw import FrozenAdamW

__all__ = ["DistributedOptimizer", "FrozenAdamW"]
