"""Every public name of horovod.torch 0.28.1, with its parameters in their order and their defaults."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dcoll as hvd
from dcoll.common import util

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
    "start_timeline": {"file_path": REQUIRED, "mark_cycles": False},
    "stop_timeline": {},
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
    "join": {"device": -1},
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
OPTIMIZER = {
    "optimizer": REQUIRED,
    "named_parameters": None,
    "compression": NO,
    "backward_passes_per_step": 1,
    "op": hvd.Average,
    "gradient_predivide_factor": 1.0,
    "num_groups": 0,
    "groups": None,
    "sparse_as_dense": False,
    "process_set": ALL,
}
NO_FUNCTIONS = {"Average", "Sum", "Adasum", "Min", "Max", "Product", "HorovodInternalError", "Compression", "elastic",
                "global_process_set"}  # fmt: skip
NAMES = {*FUNCTIONS, *NO_FUNCTIONS, "DistributedOptimizer"}
_ALGO = {"algo": ""}
NEW_PARAMETERS = {
    "allgather_object": {"process_set": ALL},
    "allreduce": _ALGO,
    "allreduce_": _ALGO | {"compression": NO},
    "allreduce_async": _ALGO | {"compression": NO},
    "allreduce_async_": _ALGO | {"compression": NO},
    "grouped_allreduce_": {"compression": NO},
    "grouped_allreduce_async": {"compression": NO},
    "grouped_allreduce_async_": {"compression": NO},
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


def defaults(function: Any) -> dict[str, Any]:
    """Of the parameters that may be given by position."""
    found = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in found if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_the_optimizers_parameters() -> None:
    assert list(defaults(hvd.DistributedOptimizer).items()) == list(OPTIMIZER.items())


def test_other_names() -> None:
    assert len(NAMES) == 68  # the 67 that horovod.torch exports, and is_homogeneous of its mpi_ops
    assert set(hvd.__all__) >= NAMES


def test_completion_offers_the_public_names_alone() -> None:
    offered = {name for name in dir(hvd) if name == "__version__" or not name.startswith("__")}
    assert offered == set(hvd.__all__)
    assert {"DistributedOptimizer", "broadcast_parameters", "SyncBatchNorm", "elastic"} <= offered
    assert all(hasattr(hvd, name) for name in offered)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert {"none", "fp16"} <= set(dir(hvd.Compression))
    assert all(hasattr(hvd.ProcessSet, name) for name in ("process_set_id", "ranks", "mpi_comm", "size", "rank"))
    assert callable(hvd.DistributedOptimizer)
    assert inspect.ismodule(hvd.elastic)


# What scripts import, by the module of horovod.torch that it is in.
MODULES = {
    "mpi_ops": {*FUNCTIONS, "Average", "Sum", "Adasum", "Min", "Max", "Product", "HorovodInternalError",
                "Compression", "ProcessSet", "global_process_set"}
               - {"broadcast_object", "allgather_object", "broadcast_parameters", "broadcast_optimizer_state"},
    "functions": {"broadcast_object", "allgather_object", "broadcast_parameters", "broadcast_optimizer_state"},
    "optimizer": {"DistributedOptimizer"},
    "compression": {"Compression", "Compressor", "NoneCompressor", "FP16Compressor"},
    "sync_batch_norm": {"SyncBatchNorm"},
    "elastic": {"run", "TorchState", "ElasticSampler"},
    "elastic.state": {"TorchState", "StateHandler", "ModelStateHandler", "OptimizerStateHandler",
                      "SamplerStateHandler", "get_handler_registry", "set_handler_registry"},
    "elastic.sampler": {"ElasticSampler"},
    "common.exceptions": {"HorovodInternalError", "HostsUpdatedInterrupt"},
    "common.elastic": {"ObjectState", "State"},
    "common.process_sets": {"ProcessSet", "global_process_set", "add_process_set", "remove_process_set"},
    "common.util": {"check_extension", "cuda_built", "env", "extension_available", "gloo_built", "gpu_available",
                    "mpi_built", "nccl_built", "num_rank_is_power_2", "split_list"},
}  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_modules_that_scripts_import(module: str) -> None:
    found = importlib.import_module(f"dcoll.{module}")
    for name in MODULES[module]:
        value = getattr(found, name)
        assert name == "run" or name not in hvd.__all__ or value is getattr(hvd, name)


def test_modules_are_attributes_without_an_import_of_theirs() -> None:
    modules = [module for module in MODULES if "." not in module]
    program = f"import inspect, dcoll\nfor module in {modules}: assert inspect.ismodule(getattr(dcoll, module)), module"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_what_dcoll_does_not_use_is_not_built() -> None:
    others = ("gloo_enabled", "gloo_built", "ddl_built", "ccl_built", "rocm_built")
    assert all(getattr(hvd, name)() is False for name in others)
    assert hvd.cuda_built() is True  # collectives take CUDA tensors in every build
    assert hvd.nccl_built() == 0 or hvd.nccl_built() >= 21400  # a version: 2.14
    assert type(hvd.mpi_built()) is bool


def test_nccl_is_looked_for_where_torch_brings_it() -> None:
    """`import dcoll` imports no torch, whose import loads NCCL."""
    program = "import sys, dcoll; assert 'torch' not in sys.modules; dcoll.nccl_built(); assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", program], env=os.environ | {"DCOLL_NCCL": ""}, check=True, timeout=60)


ELASTIC = {"run", "State", "ObjectState", "TorchState", "ElasticSampler", "HostsUpdatedInterrupt"}
METHODS = {
    "State": ["save", "restore", "sync", "reset", "register_reset_callbacks", "commit", "check_host_updates",
              "on_reset", "on_hosts_updated"],
    "ElasticSampler": ["set_epoch", "record_batch", "get_indices", "state_dict", "load_state_dict", "reset"],
}  # fmt: skip


def test_elastic() -> None:
    elastic = hvd.elastic
    assert set(elastic.__all__) >= ELASTIC
    assert defaults(elastic.run) == {"func": REQUIRED}
    assert defaults(elastic.TorchState) == {"model": None, "optimizer": None}
    assert defaults(elastic.ObjectState) == {"bcast_object": REQUIRED, "get_rank": REQUIRED}
    assert defaults(elastic.ElasticSampler) == {"dataset": REQUIRED, "shuffle": True, "seed": 0}
    assert elastic.HostsUpdatedInterrupt(skip_sync=True).skip_sync is True
    assert issubclass(elastic.TorchState, elastic.ObjectState)
    assert issubclass(elastic.ObjectState, elastic.State)
    for name, methods in METHODS.items():
        assert all(callable(getattr(getattr(elastic, name), method)) for method in methods)
    # Where Horovod has them: scripts add handlers of their own types.
    assert elastic.state.TorchState is elastic.TorchState
    assert defaults(elastic.state.get_handler_registry) == {}
    assert defaults(elastic.state.set_handler_registry) == {"registry": REQUIRED}
    assert inspect.isclass(elastic.state.StateHandler)


RUN = {
    "func": REQUIRED, "args": (), "kwargs": None, "num_proc": 1, "min_num_proc": None, "max_num_proc": None,
    "slots": None, "reset_limit": None, "cooldown_range": None, "hosts": None, "hostfile": None,
    "host_discovery_script": None, "start_timeout": None, "ssh_port": None, "ssh_identity_file": None,
    "disable_cache": None, "output_filename": None, "verbose": None, "use_gloo": None, "use_mpi": None,
    "mpi_args": None, "network_interface": None, "network_interfaces": None, "executable": None, "np": None,
    "min_np": None, "max_np": None,
}  # fmt: skip


def test_run() -> None:
    assert list(defaults(hvd.run).items()) == list(RUN.items())


ROOT = Path(__file__).parents[2]


def test_every_name_has_its_row_in_the_migration_table() -> None:
    text = (ROOT / "docs" / "migration.md").read_text()
    rows = [row for row in text.split("## Name by name")[1].split("\n## ")[0].splitlines() if row.startswith("| ")]
    first_cells = {name for row in rows for name in re.findall(r"`(?:horovod\.)?(\w+)", row.split("|")[1])}
    assert NAMES - first_cells == set()


@pytest.mark.parametrize("script", ["mnist", "synthetic_benchmark", "elastic"])
def test_horovods_scripts_use_nothing_that_horovod_has_not(script: str) -> None:
    """So they differ from scripts for Horovod in the import alone."""
    tree = ast.parse((ROOT / "examples" / f"{script}.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in imports if "dcoll" in ast.unparse(node)] == ["import dcoll as hvd"]
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if ast.unparse(node.value) == "hvd"}
    assert "init" in used
    assert used - NAMES == set()
    assert {one.attr for one in attributes if ast.unparse(one.value) == "hvd.elastic"} - ELASTIC == set()
    calls = {ast.unparse(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    given = {word.arg for word in calls["hvd.DistributedOptimizer"].keywords}
    assert given - set(OPTIMIZER) == set()


def test_horovods_small_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [util.split_list(range(5), parts) for parts in (1, 2, 7)] == [
        [range(5)],
        [range(3), range(3, 5)],
        [*(range(i, i + 1) for i in range(5)), range(5, 5), range(5, 5)],
    ]
    assert [n for n in range(-1, 9) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib", "_mpi_lib")
    with pytest.raises(ImportError, match=r"horovod\.mxnet is not available"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__)
    assert util.gpu_available("torch") is torch.cuda.is_available()
    assert not util.gpu_available("tensorflow")
    monkeypatch.setenv("ONE", "1")
    monkeypatch.delenv("TWO", raising=False)
    seen = []

    def body() -> None:
        with util.env(ONE="x", TWO="y", THREE=None):
            seen.append((os.environ["ONE"], os.environ["TWO"], "THREE" in os.environ))
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert seen == [("x", "y", False)]
    assert (os.environ["ONE"], "TWO" in os.environ) == ("1", False)
