"""The examples, the benchmark and the README's script on two ranks under mpirun, with the smallest of settings."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mpirun import python_for

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import demo  # noqa: E402

pytestmark = pytest.mark.mpi


def start(command: list[str]) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment, check=False)


def mpirun(*script: str, ranks: int = 2, preloaded: bool = True) -> str:
    """preloaded: ranks have torch when they begin. Not where mpi4py or Gloo ends with the interpreter."""
    python = python_for(*map(str, range(ranks))) if preloaded else (sys.executable,)
    done = start([*demo.mpirun_command(ranks), *python, *script])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_digits_interrupted_and_resumed_ends_as_if_never_interrupted(tmp_path):
    """Two epochs in one go or in two: the same bits, momentum included. (Warm-up hides the total number of epochs.)"""
    whole, parts, result = tmp_path / "whole.pt", tmp_path / "parts.pt", tmp_path / "result.json"
    script = ["examples/train_digits.py", "--json", str(result), "--checkpoint"]
    text = mpirun(*script, str(whole), "--epochs", "2")
    assert text.count("epoch 1/2") == text.count("epoch 2/2") == 1  # rank 0 alone reports
    mpirun(*script, str(parts), "--epochs", "1")
    text = mpirun(*script, str(parts), "--epochs", "2", "--resume")
    assert text.count("epoch 1/2") == 0
    assert text.count("epoch 2/2") == 1
    outcome = json.loads(result.read_text())
    assert (outcome["ranks"], outcome["first_epoch"], outcome["epochs"]) == (2, 1, 2)
    expected, got = (torch.load(file, weights_only=True) for file in (whole, parts))
    assert got["epochs"] == expected["epochs"] == 2
    assert [name for name, value in expected["model"].items() if not torch.equal(value, got["model"][name])] == []
    momenta = [state["state"] for state in (expected["optimizer"], got["optimizer"])]
    assert all(torch.equal(momenta[0][i]["momentum_buffer"], momenta[1][i]["momentum_buffer"]) for i in momenta[0])


def test_digits_without_checkpoint_ends_on_every_rank_with_one_message(tmp_path):
    script = ["examples/train_digits.py", "--resume", "--checkpoint", str(tmp_path / "missing.pt")]
    done = start([*demo.mpirun_command(2), *python_for("0", "1"), *script])
    assert done.returncode != 0
    assert done.stderr.count("cannot resume from") == 1


def test_gpt_is_trained_as_by_ddp(tmp_path):
    """Two ranks: a + b has one order, and halves are exact, so that dcoll and Gloo give the same bits."""
    losses = {}
    for backend in ("dcoll", "ddp-gloo"):
        result = tmp_path / f"{backend}.json"
        size = ["--layers", "2", "--heads", "2", "--width", "32", "--block", "16", "--batch", "2"]
        text = mpirun("examples/train_gpt.py", "--backend", backend, *size, "--steps", "4", "--report-every", "1",
                      "--max-bytes", "100000", "--json", str(result), preloaded=False)  # fmt: skip
        assert "tokens/s" in text
        reports = json.loads(result.read_text())["reports"]
        assert [report["step"] for report in reports] == [1, 2, 3, 4]
        shares = [report["communication_share"] for report in reports]
        assert all(0 <= share <= 1 for share in shares) if backend == "dcoll" else shares == [None] * 4
        losses[backend] = [report["loss"] for report in reports]
    assert losses["dcoll"] == losses["ddp-gloo"]


def test_readme_script_keeps_the_ranks_equal(tmp_path):
    block = re.search(r"<!-- after -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "after.py"
    script.write_text(
        block[1]
        + "weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()\n"
        + "gathered = hvd.allgather_object(weights)\n"
        + "assert hvd.size() == len(gathered) == 2 and gathered[0] == gathered[1]\n"
        + "if hvd.rank() == 0: print('equal')\n"
    )
    assert mpirun(str(script)) == "equal\n"


@pytest.mark.parametrize("ranks", [1, 2])
def test_benchmark_measures_every_column(tmp_path, ranks):
    result = tmp_path / "result.json"
    text = mpirun("bench/all_reduce.py", "-b", "4", "-e", "64K", "-f", "128", "-n", "5", "-w", "1", "-o", "avg",
                  "--peer", "mpi4py", "--peer", "gloo", "--json", str(result),
                  ranks=ranks, preloaded=False)  # fmt: skip
    assert "# Out of bounds values : 0 OK" in text
    assert len(re.findall(r"avg +plain", text)) == len(re.findall(r"avg +mapped", text)) == 3
    document = json.loads(result.read_text())
    assert document["environment"]["ranks"] == ranks == len(document["environment"]["per_rank"])
    assert [row["size"] for row in document["rows"]] == [4, 4, 512, 512, 65536, 65536]
    for row in document["rows"]:
        for column in ("out_of_place", "in_place", "mpi4py", "gloo"):
            assert row[column]["iters"] == 5
            assert len(row[column]["median_us_of_rank"]) == ranks
            assert row[column]["busbw"] == row[column]["algbw"] * 2 * (ranks - 1) / ranks


def test_benchmark_of_the_python_calls_and_of_one_algorithm():
    text = mpirun("bench/all_reduce.py", "-b", "1K", "-e", "1K", "-n", "5", "-t", "bfloat16", "--call", "python",
                  "--algo", "ring", "--mapped", "0")  # fmt: skip
    assert "DCOLL_ALGO=ring" in text
    assert "# Out of bounds values : 0 OK" in text


def test_demo_fails_below_the_required_accuracy():
    done = start([sys.executable, "examples/demo.py", "--epochs", "1"])
    assert done.returncode == 1
    assert "is not above 97%" in done.stderr
    assert re.search(r"^ +2 +1 +128 +\d+\.\d\d% +[\d,]+ +\d+\.\d\dx$", done.stdout, re.MULTILINE)


def test_horovods_scripts():
    text = mpirun("examples/mnist.py", "--epochs", "1")
    assert re.search(r"Test set: Average loss: \d\.\d+, Accuracy: \d+\.\d+%", text)
    text = mpirun("examples/synthetic_benchmark.py", "--num-iters", "2", "--num-batches-per-iter", "1",
                  "--num-warmup-batches", "1", "--batch-size", "2", "--width", "4", "--use-adasum",
                  "--fp16-allreduce")  # fmt: skip
    assert "Number of ranks: 2" in text
    assert re.search(r"^Total img/sec on 2 rank\(s\): \d+", text, re.MULTILINE)
    text = mpirun("examples/elastic.py", "--epochs", "1", "--fail-at", "12")
    assert "back to epoch 0 batch 10" in text
    assert "epoch 1/1: accuracy" in text
