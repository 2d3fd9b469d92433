"""dcoll as a backend of torch.distributed: `import dcoll.torch`, then `init_process_group("dcoll")`.

What PyTorch builds on process groups runs on it: DistributedDataParallel, FSDP, tensor and pipeline parallel. See
docs/torch.md.
"""

import torch

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
    raise ImportError(
        f"dcoll.torch got PyTorch {torch.__version__}, but needs 2.13 or later. dcoll's own calls need 2.4"
    )

from dcoll.torch.fsdp import overlap_all_gathers
from dcoll.torch.registration import register

__all__ = ["overlap_all_gathers"]

register()
