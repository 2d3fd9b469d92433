"""What scripts import from horovod.common.util."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from dcoll.job.world import ccl_built, cuda_built, ddl_built, gloo_built, mpi_built, nccl_built, rocm_built

__all__ = [
    "ccl_built",
    "check_extension",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]

Item = TypeVar("Item")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there are collectives for this framework: of "torch" and "pytorch" alone."""
    return ext_base_name in ("torch", "pytorch")


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """ImportError unless extension_available() of what follows "horovod."."""
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(f"{ext_name} is not available: dcoll has collectives for PyTorch alone, horovod.torch")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is a GPU, and collectives for this framework take its tensors."""
    import torch

    return extension_available(ext_base_name) and cuda_built() and torch.cuda.is_available()


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets environment variables in its block; None leaves one as it is."""
    changed = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """What Adasum asks of the number of ranks."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Item], parts: int) -> list[Sequence[Item]]:
    """Of equal length, but that the first ones are longer by one where they must be: [1, 2, 3, 4, 5] in two parts is
    [1, 2, 3] and [4, 5]."""
    each, more = divmod(len(items), parts)
    return [items[i * each + min(i, more) : (i + 1) * each + min(i + 1, more)] for i in range(parts)]
