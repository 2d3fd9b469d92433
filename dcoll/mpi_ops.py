"""What scripts import from horovod.torch.mpi_ops: all of dcoll's names."""

from dcoll import *  # noqa: F403
