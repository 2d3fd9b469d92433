"""`torch.distributed` learns the name "dcoll"."""

from typing import Any

import torch.distributed as dist

from dcoll.torch import start
from dcoll.torch.compiler import left_alone
from dcoll.torch.process_group import BACKENDS_IN_PYTHON, NAME, DcollBackend, DcollProcessGroup, opened
from dcoll.torch.work import Done, Work


def create(made: Any, options: Any = None) -> Any:
    """What init_process_group() and new_group() call."""
    if not BACKENDS_IN_PYTHON:
        return DcollProcessGroup(made)
    backend = DcollBackend(made.group_rank, made.group_size)
    opened(backend, made)
    return backend


def register() -> None:
    """The entry point: torch calls it where somebody names the backend before importing dcoll.torch."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
        start.install()
        left_alone(DcollBackend, DcollProcessGroup, Work, Done)
