"""dcoll as a backend of torch.distributed: `import dcoll.torch`, then `init_process_group("dcoll")`.

What PyTorch builds on process groups runs on it: DistributedDataParallel, FSDP, tensor and pipeline parallel. See
docs/torch.md.
"""

from dcoll.torch.registration import register

register()
