"""Horovod's own tests of its torch API, unmodified, with dcoll in its place, and which of them differ.

They are in Horovod's repository alone (github.com/horovod/horovod, here as of 0.28.1), not in its package: HOROVOD is
the path of a checkout. `make test-horovod HOROVOD=PATH` runs this file.
"""

import json
import os
from pathlib import Path

import pytest
from horovod_tests import TESTS
from mpirun import HERE, SKIPPED, launch

pytestmark = pytest.mark.mpi

_GPU = "it needs a GPU"
_GLOO = "Horovod can begin anew with Gloo alone; dcoll can, which checks_collectives.py checks"
PASSED_OVER = {
    "test_broadcast_state_gpu": "Horovod skips it always: it hangs on some GPUs",
    "test_delta_optimizer": _GPU,
    "test_gpu_required": _GPU,
    "test_horovod_allreduce_cpu_gpu_error": _GPU,
    "test_horovod_allreduce_multi_gpu": _GPU,
    "test_horovod_alltoall_splits_on_gpu": _GPU,
    "test_horovod_grouped_allreduce_cpu_gpu_error": _GPU,
    "test_horovod_is_initialized": _GLOO,
    "test_horovod_reinit": _GLOO,
    "test_horovod_sync_batch_norm": _GPU,
    "test_model_parallelism": _GPU,
    "test_timeline_api": "Horovod skips it always: its issue 2496",
}
"""What Horovod's tests skip themselves, with Horovod too."""
DIFFERENT = {
    "test_broadcast_state_no_grad": (
        "got a builtins.NoneType",
        "it wants the zeros that broadcast_optimizer_state() leaves in .grad there; here .grad stays None",
    ),
    "test_synchronize_step_warning": (
        "assert len(ws) == 1",
        "it wants a warning of step() after synchronize(); here nothing is reduced twice, and nothing warns",
    ),
}
"""What fails on purpose, with which words, and why: each has its line in docs/migration.md."""
_POLL = (
    "hvd.poll() always returns True",
    "it wants poll() to be False once in a row of small operations; poll() brings them on here, and so the rank that "
    "is behind the other may find all of them done",
)
BY_CHANCE = {
    "test_global_barrier_op": (
        "assertTrue(barrier_time >= 5)",
        "it wants the barrier to take 5 seconds on the rank that waits for one that sleeps so long; but each takes its "
        "own time from where it begins, and the one that sleeps may begin first",
    ),
    "test_horovod_allgather_async_fused": _POLL,
    "test_horovod_allreduce_async_fused": _POLL,
    "test_horovod_reducescatter_async_fused": _POLL,
}
"""What passes or fails as the ranks happen to be scheduled, with which words, and why."""
RANKS = 2
LEAST_PASSED = 101 - len(BY_CHANCE)
"""What a runner that finds no tests would fall below."""


def results_of(checkout: Path, folder: Path) -> list[dict[str, str]]:
    """What became of every test, rank by rank. GPUs are hidden: the tests want one for each rank, or two."""
    script = str(HERE / "horovod_tests.py")
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "CUDA_VISIBLE_DEVICES": ""}
    done = launch(RANKS, script, str(checkout), str(folder), timeout=600, DCOLL_TIMEOUT="20", **alone)
    assert done.returncode == 0, done.text[-5000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


Words = dict[str, tuple[str, str]]


def surprises(
    results: list[dict[str, str]], passed_over: dict[str, str], different: Words, by_chance: Words
) -> list[str]:
    """Every test that did otherwise than it is listed, in the order in which they ran, and those that are no more."""
    expected = dict.fromkeys(passed_over, "skipped") | dict.fromkeys(different, "failed")
    listed = different | by_chance
    gone = (expected.keys() | listed.keys()) - results[0].keys()
    found = [f"{name} is listed, but there is no such test" for name in sorted(gone)]
    for name in results[0]:
        for rank, result in enumerate(results):
            text = result.get(name, "it did not run")
            outcome = "passed" if not text else "skipped" if text.startswith(SKIPPED) else "failed"
            wanted = expected.get(name, "passed")
            if outcome == "failed" and name in listed:
                as_listed = listed[name][0] in text
            else:
                as_listed = outcome == wanted
            if not as_listed:
                found.append(f"{name} {outcome} on rank {rank} and is listed as {wanted}\n{text[-2000:]}")
    return found


def test_all_but_those_that_differ(horovod: Path) -> None:
    checkout = Path(os.environ.get("HOROVOD", "")).resolve()
    if not os.environ.get("HOROVOD") or not (checkout / TESTS).exists():
        pytest.skip(f"needs horovod: a checkout of its repository at HOROVOD (how: {Path(__file__).name})")
    results = results_of(checkout, horovod)
    found = surprises(results, PASSED_OVER, DIFFERENT, BY_CHANCE)
    assert not found, "\n--- ".join(["", *found])
    assert sum(text == "" for text in results[0].values()) >= LEAST_PASSED


def heads(texts: list[str]) -> list[str]:
    return [text.splitlines()[0] for text in texts]


CHECKOUT = """
import unittest
import pytest
import horovod.torch as hvd
import torch

class TorchTests(unittest.TestCase):
    def test_one_fails(self):
        assert hvd.rank() == 0

    def test_passes(self):
        hvd.init()
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2

    @pytest.mark.skip(reason="always")
    def test_marked(self):
        raise AssertionError

    def test_skips(self):
        self.skipTest("here")
"""


def test_what_is_not_as_listed_is_told(horovod: Path) -> None:
    """With other tests in Horovod's place: a list that nothing can break would be none."""
    checkout = horovod / "checkout"
    (checkout / TESTS).parent.mkdir(parents=True)
    (checkout / TESTS).write_text(CHECKOUT)
    results = results_of(checkout, horovod)
    skips = {"test_marked": f"{SKIPPED}always", "test_skips": f"{SKIPPED}here"}
    assert results[0] == {"test_one_fails": "", "test_passes": ""} | skips
    assert results[1].keys() == results[0].keys()
    assert heads(surprises(results, skips, {}, {})) == ["test_one_fails failed on rank 1 and is listed as passed"]
    different = {"test_gone": ("", "why"), "test_one_fails": ("hvd.rank() == 0", "why")}
    assert heads(surprises(results, {"test_marked": "why"}, different, {})) == [
        "test_gone is listed, but there is no such test",
        "test_one_fails passed on rank 0 and is listed as failed",
        "test_skips skipped on rank 0 and is listed as passed",
        "test_skips skipped on rank 1 and is listed as passed",
    ]
    different = {"test_one_fails": ("hvd.rank() == 1", "why")}
    assert heads(surprises([results[1]] * 2, skips, different, {})) == [
        f"test_one_fails failed on rank {rank} and is listed as failed" for rank in range(2)
    ]
    assert surprises(results, skips, {}, {"test_one_fails": ("hvd.rank() == 0", "why")}) == []
