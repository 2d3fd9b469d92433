"""PyTorch's own tests of its backends (torch_tests.py), and which of them do not apply."""

import importlib.util
import json
from pathlib import Path

import pytest
from mpirun import HERE, launch

pytestmark = pytest.mark.mpi

_TEXT = "it wants the text of Gloo's error: ours names the ranks that are missing in other words"
_GPU = "it counts the machine's GPUs, of which there are none"
NOT_FOR_US = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_all_to_all_cuda": _GPU,
    "test_all_to_all_cuda_complex": _GPU,
    "test_all_to_all_full_group_cuda": _GPU,
    "test_barrier_timeout_full_group": _TEXT,
    "test_barrier_timeout_global": _TEXT,
    "test_barrier_timeout_group": "its ranks begin the default group anew at different times, one of them later than "
    "DCOLL_TIMEOUT here",
    "test_batch_isend_irecv_mixed_backend_err": "needs NCCL",
    "test_batch_isend_irecv_op_err": _GPU,
    "test_ddp_logging_data_cpu": "it compares the backend's name with Gloo's",
    "test_monitored_barrier_gloo": _TEXT,
    "test_monitored_barrier_gloo_rank_0_timeout": _TEXT,
    "test_monitored_barrier_gloo_subgroup": _TEXT,
}
RANKS = 4
LEAST_PASSED = 90
"""Of the tests that no rank skips: what a runner that passes over everything would fall below."""


def test_all_but_those_that_do_not_apply(tmp_path: Path) -> None:
    if importlib.util.find_spec("expecttest") is None:
        pytest.skip("needs expecttest: PyTorch's tests import it")
    script = str(HERE.parent / "torch_backend" / "torch_tests.py")
    done = launch(RANKS, script, str(tmp_path), "--but", *NOT_FOR_US, timeout=600, preloaded=True, DCOLL_TIMEOUT="20")
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    failed = {
        f"{name} on rank {rank}": text
        for rank, result in enumerate(results)
        for name, text in result.items()
        if text and not text.startswith("skipped: ")
    }
    assert done.returncode == 0, done.text[-5000:]
    assert not failed, "\n".join(f"--- {where}\n{text[-2000:]}" for where, text in failed.items())
    passed = [name for name in results[0] if all(result[name] == "" for result in results)]
    print(f"{len(passed)} of {len(results[0]) + len(NOT_FOR_US)} tests passed on all ranks")
    assert len(passed) >= LEAST_PASSED, sorted(passed)
