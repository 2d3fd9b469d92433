"""Every public name of horovod.torch 0.28.1, with its parameters in their order and their defaults."""

import inspect
from typing import Any

import pytest

import dcoll as hvd

NO = hvd.Compression.none
ALL = hvd.global_process_set
FACTORS = {"prescale_factor": 1.0, "postscale_factor": 1.0}
REQUIRED: Any = inspect.Parameter.empty

REDUCE = {"average": None, "name": None, "op": None, **FACTORS, "process_set": ALL}
REDUCE_COMPRESSED = {"average": None, "name": None, "compression": NO, "op": None, **FACTORS, "process_set": ALL}
GATHER = {"name": None, "process_set": ALL}
BROADCAST = {"root_rank": REQUIRED, "name": None, "process_set": ALL}
SCATTER = {"name": None, "op": hvd.Average, "process_set": ALL, **FACTORS}
SCATTER_COMPRESSED = {"name": None, "compression": NO, "op": hvd.Average, "process_set": ALL, **FACTORS}
ALLTOALL = {"splits": None, "name": None, "process_set": ALL}
ONE = {"tensor": REQUIRED}
MANY = {"tensors": REQUIRED}

FUNCTIONS: dict[str, dict[str, Any]] = {
    "init": {"comm": None, "process_sets": None},
    "shutdown": {},
    "is_initialized": {},
    "rank": {},
    "size": {},
    "local_rank": {},
    "local_size": {},
    "cross_rank": {},
    "cross_size": {},
    "is_homogeneous": {},
    "mpi_threads_supported": {},
    "mpi_enabled": {},
    "mpi_built": {},
    "gloo_enabled": {},
    "gloo_built": {},
    "nccl_built": {},
    "ddl_built": {},
    "ccl_built": {},
    "cuda_built": {},
    "rocm_built": {},
    "add_process_set": {"process_set": REQUIRED},
    "remove_process_set": {"process_set": REQUIRED},
    "allreduce": ONE | REDUCE_COMPRESSED,
    "allreduce_": ONE | REDUCE,
    "allreduce_async": ONE | REDUCE,
    "allreduce_async_": ONE | REDUCE,
    "grouped_allreduce": MANY | REDUCE_COMPRESSED,
    "grouped_allreduce_": MANY | REDUCE,
    "grouped_allreduce_async": MANY | REDUCE,
    "grouped_allreduce_async_": MANY | REDUCE,
    "sparse_allreduce_async": ONE | {"name": REQUIRED, "op": REQUIRED, "process_set": ALL},
    "allgather": ONE | GATHER,
    "allgather_async": ONE | GATHER,
    "grouped_allgather": MANY | GATHER,
    "grouped_allgather_async": MANY | GATHER,
    "broadcast": ONE | BROADCAST,
    "broadcast_": ONE | BROADCAST,
    "broadcast_async": ONE | BROADCAST,
    "broadcast_async_": ONE | BROADCAST,
    "alltoall": ONE | ALLTOALL,
    "alltoall_async": ONE | ALLTOALL,
    "reducescatter": ONE | SCATTER_COMPRESSED,
    "reducescatter_async": ONE | SCATTER,
    "grouped_reducescatter": MANY | SCATTER_COMPRESSED,
    "grouped_reducescatter_async": MANY | SCATTER,
    "barrier": {"process_set": ALL},
    "poll": {"handle": REQUIRED},
    "synchronize": {"handle": REQUIRED},
    "broadcast_parameters": {"params": REQUIRED, "root_rank": REQUIRED},
    "broadcast_optimizer_state": {"optimizer": REQUIRED, "root_rank": REQUIRED, "model": None},
    "broadcast_object": {"obj": REQUIRED, "root_rank": 0, "name": None, "process_set": ALL},
    "allgather_object": {"obj": REQUIRED, "name": None},
    "ProcessSet": {"ranks_or_comm": REQUIRED},
    "SyncBatchNorm": {
        "num_features": REQUIRED,
        "eps": 1e-05,
        "momentum": 0.1,
        "affine": True,
        "track_running_stats": True,
    },
}
_ALGO = {"algo": ""}
NEW_PARAMETERS = {
    "allgather_object": {"process_set": ALL},
    "allreduce": _ALGO,
    "allreduce_": _ALGO,
    "allreduce_async": _ALGO,
    "allreduce_async_": _ALGO,
}
"""Ours, behind Horovod's."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters(name: str) -> None:
    found = inspect.signature(getattr(hvd, name)).parameters.values()
    assert all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in found)
    want = FUNCTIONS[name] | NEW_PARAMETERS.get(name, {})
    assert [(one.name, one.default) for one in found] == list(want.items())
    assert name in hvd.__all__
    assert inspect.getdoc(getattr(hvd, name))


@pytest.mark.parametrize("name", ["Average", "Sum", "Adasum", "Min", "Max", "Product"])
def test_operators(name: str) -> None:
    assert isinstance(getattr(hvd, name), hvd.ReduceOp)


def test_other_names() -> None:
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert {"none", "fp16"} <= set(dir(hvd.Compression))
    assert all(hasattr(hvd.ProcessSet, name) for name in ("process_set_id", "ranks", "mpi_comm", "size", "rank"))
    assert callable(hvd.DistributedOptimizer)
    assert inspect.ismodule(hvd.elastic)
