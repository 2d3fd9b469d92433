"""On which device the checks are: the emulated one with DCOLL_DEVICE=emulated, one that torch is made to see
(pretend_cuda.py) with CHECKS_DEVICE=pretended, else a GPU."""

import os

import torch

from dcoll import _C

EMULATED = _C.emulates_device()
PRETENDED = os.environ.get("CHECKS_DEVICE") == "pretended"
DEVICE = torch.device("cpu" if EMULATED else "cuda")
NAME = "emulated" if EMULATED or PRETENDED else "cuda"

HERE = DEVICE if EMULATED or PRETENDED or os.environ.get("CHECKS_DEVICE") == "cuda" else torch.device("cpu")
"""Of checks that are of the CPU too."""

if os.environ.get("CHECKS_GPU") == "own":  # each rank has one to itself
    torch.cuda.set_device(int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]))

if PRETENDED:
    import pretend_cuda

    pretend_cuda.pretend()


def is_there(tensor: torch.Tensor) -> bool:
    return tensor.device.type == DEVICE.type
