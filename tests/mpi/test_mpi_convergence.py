"""bench/convergence.py on two ranks, with a few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.mpi


def convergence(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "bench/convergence.py", "--ranks", "2", "--seeds", "1", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_methods_train_beside_each_other_and_runs_are_kept(tmp_path):
    found, table, plot = (tmp_path / f"c.{ending}" for ending in ("json", "md", "png"))
    steps = ["--steps-digits", "12", "--steps-gpt", "4", "--json", str(found)]
    convergence(*steps, "--methods", "none,int8")
    runs = json.loads(found.read_text())["runs"]
    assert [(run["task"], run["method"]) for run in runs] == [
        ("digits", "none"), ("digits", "int8"), ("gpt", "none"), ("gpt", "int8"),
    ]  # fmt: skip
    assert all(run["ranks_agree"] for run in runs)
    for run in runs:
        losses = dict(run["curve"])
        assert losses[12 if run["task"] == "digits" else 4] == run["loss"]
        assert losses[1] > run["loss"] > 0  # it learns
    for plain, int8 in (runs[:2], runs[2:]):
        assert plain["loss"] != int8["loss"]  # it is compressed
        assert int8["loss"] == pytest.approx(plain["loss"], rel=0.05)

    more = ["--tasks", "gpt", "--methods", "none,int8-no-feedback,topk-frozen"]
    done = convergence(*steps, *more, "--markdown", str(table), "--plot", str(plot), "--resume")
    assert "gpt 1 of 2: int8-no-feedback, seed 0" in done.stderr
    document = json.loads(found.read_text())
    assert document["runs"][:4] == runs
    assert [row["method"] for row in document["summary"]["gpt"]] == ["none", "int8", "int8-no-feedback", "topk-frozen"]
    assert "topk-frozen: freeze_step 1, ratio 0.01, codec topk 0.01, feedback True," in done.stdout
    assert done.stdout == table.read_text()
    assert "| int8-no-feedback | 1 |" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
