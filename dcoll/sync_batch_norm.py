"""What scripts import from horovod.torch.sync_batch_norm."""

from dcoll.collectives.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
