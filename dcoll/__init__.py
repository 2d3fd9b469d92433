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
from dcoll.collectives import (
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    empty,
    empty_like,
    reducescatter,
    reducescatter_async,
)
from dcoll.compression import Compression
from dcoll.errors import (
    ArgumentError,
    DcollError,
    HorovodInternalError,
    MismatchError,
    PeerError,
    TimeoutError,
    TransportError,
)
from dcoll.handle import Handle, poll, synchronize
from dcoll.ops import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from dcoll.world import (
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

if TYPE_CHECKING:
    from dcoll import elastic
    from dcoll.functions import broadcast_optimizer_state, broadcast_parameters
    from dcoll.optimizer import DistributedOptimizer
    from dcoll.sync_batch_norm import SyncBatchNorm

# What needs torch, and where it is: imported when first asked for.
_NEEDS_TORCH = {
    "DistributedOptimizer": "dcoll.optimizer",
    "SyncBatchNorm": "dcoll.sync_batch_norm",
    "broadcast_optimizer_state": "dcoll.functions",
    "broadcast_parameters": "dcoll.functions",
    "elastic": "dcoll.elastic",
}


def __getattr__(name: str) -> Any:
    module = _NEEDS_TORCH.get(name)
    if module is None:
        raise AttributeError(f"module 'dcoll' has no attribute {name!r}")
    import importlib

    found = importlib.import_module(module)
    value = found if name == "elastic" else getattr(found, name)
    globals()[name] = value
    return value


__all__ = [
    "Adasum",
    "ArgumentError",
    "Average",
    "Compression",
    "DcollError",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "PeerError",
    "Product",
    "ReduceOp",
    "Sum",
    "SyncBatchNorm",
    "TimeoutError",
    "TransportError",
    "__version__",
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
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
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
    "rocm_built",
    "shutdown",
    "size",
    "synchronize",
]
