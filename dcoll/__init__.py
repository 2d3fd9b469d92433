"""dcoll: gradients averaged by a compiled ring and tree all-reduce engine, with Horovod's names.

    import dcoll as hvd

    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

and `mpirun -n 4 python train.py`. Neither torch nor NumPy is imported before something needs it.
"""

import sys
from typing import TYPE_CHECKING, Any

try:
    from dcoll._C import __version__
except ImportError as error:
    if sys.orig_argv[-3:] == ["-m", "dcoll", "doctor"]:
        from dcoll.doctor import examine

        raise SystemExit(examine()) from None
    raise ImportError(
        f"dcoll's compiled core cannot be loaded ({error}). Run `python -m dcoll doctor`: it says why and what to do."
    ) from error
from dcoll.collectives.handle import Handle, poll, synchronize
from dcoll.collectives.memory import empty, empty_like
from dcoll.collectives.movement import (
    allgather,
    allgather_async,
    allgather_object,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    grouped_allgather,
    grouped_allgather_async,
)
from dcoll.collectives.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from dcoll.collectives.stats import stats
from dcoll.collectives.uneven import Join, join
from dcoll.compression.codecs import Compression
from dcoll.errors import (
    ArgumentError,
    DcollError,
    HorovodInternalError,
    JoinedError,
    MismatchError,
    PeerError,
    TimeoutError,
    TransportError,
)
from dcoll.job.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from dcoll.job.timeline import start_timeline, stop_timeline
from dcoll.job.world import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from dcoll.ops import Adasum, Average, BitAnd, BitOr, BitXor, Max, Min, Product, ReduceOp, Sum
from dcoll.runner.api import run

if TYPE_CHECKING:
    from dcoll import elastic
    from dcoll.collectives.sync_batch_norm import SyncBatchNorm
    from dcoll.optimizer import DistributedOptimizer
    from dcoll.optimizer.starting_state import broadcast_optimizer_state, broadcast_parameters

# What needs torch, and where it is: imported with torch, or when first asked for.
_NEEDS_TORCH = {
    "DistributedOptimizer": "dcoll.optimizer",
    "SyncBatchNorm": "dcoll.sync_batch_norm",
    "broadcast_optimizer_state": "dcoll.functions",
    "broadcast_parameters": "dcoll.functions",
}
_MODULES = ("common", "elastic", "functions", "mpi_ops", "optimizer", "sync_batch_norm")
"""Modules that scripts name as attributes, hvd.mpi_ops say, without importing them."""


def _import_the_rest() -> None:
    """All that needs torch, and then no `__getattr__`: CPython 3.11 caches no attribute of a module that has one, which
    costs each dcoll.allreduce_ of a script 20 ns.
    """
    import importlib

    for name in _MODULES:
        importlib.import_module(f"dcoll.{name}")
    for name, module in _NEEDS_TORCH.items():
        globals()[name] = getattr(sys.modules[module], name)
    globals().pop("__getattr__", None)


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH or name in _MODULES:
        _import_the_rest()
    if name not in globals():
        raise AttributeError(f"module 'dcoll' has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__path__"})


__all__ = [
    "Adasum",
    "ArgumentError",
    "Average",
    "BitAnd",
    "BitOr",
    "BitXor",
    "Compression",
    "DcollError",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "Join",
    "JoinedError",
    "Max",
    "Min",
    "MismatchError",
    "PeerError",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "SyncBatchNorm",
    "TimeoutError",
    "TransportError",
    "__version__",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "empty",
    "empty_like",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
]

if "torch" in sys.modules:
    _import_the_rest()
