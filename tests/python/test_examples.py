"""The examples' parts and the README, in one process. What needs several ranks is in tests/mpi."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dcoll import _C

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import demo  # noqa: E402
import progress  # noqa: E402
import train_digits  # noqa: E402
import train_gpt  # noqa: E402
from gpt import GPT  # noqa: E402


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("main", [train_digits.main, train_gpt.main, demo.main])
def test_help_explains_every_option(main, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script", "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    options = re.findall(r"^  (?:-\w, )?(--[\w-]+)(.*(?:\n {10,}.*)*)", capsys.readouterr().out, re.MULTILINE)
    assert options
    assert [name for name, rest in options if len(rest.split()) < 3] == []


def test_digits_trains_checkpoints_and_resumes_without_mpirun(tmp_path):
    checkpoint, result = tmp_path / "digits.pt", tmp_path / "result.json"
    common = ["examples/train_digits.py", "--batch", "64", "--checkpoint", str(checkpoint), "--json", str(result)]
    text = run(*common, "--epochs", "1")
    assert "epoch 1/1" in text
    assert "1 rank(s) x 1 thread(s): test accuracy" in text
    assert set(os.listdir(tmp_path)) == {"digits.pt", "result.json"}  # no temporary file is left
    text = run(*common, "--epochs", "2", "--resume")
    assert "epoch 1/2" not in text
    assert "epoch 2/2" in text
    outcome = json.loads(result.read_text())
    assert (outcome["first_epoch"], outcome["epochs"], outcome["ranks"]) == (1, 2, 1)
    assert torch.load(checkpoint, weights_only=True)["epochs"] == 2


def test_digits_split_is_fixed_and_disjoint():
    (train, _), (test, _) = train_digits.load_data()
    (again, _), _ = train_digits.load_data()
    assert torch.equal(train, again)
    assert len(test) == train_digits.TEST_SAMPLES
    assert len(train) + len(test) == 1797


def test_learning_rate_warms_up_to_the_scaled_rate_and_ends_at_zero(monkeypatch):
    monkeypatch.setattr(train_digits.hvd, "size", lambda: 4)
    args = SimpleNamespace(lr=0.5, batch=train_digits.REFERENCE_BATCH, warmup_epochs=2.0, epochs=10)
    assert [train_digits.learning_rate(args, epoch) for epoch in (0.0, 1.0, 2.0, 6.0, 10.0)] == [
        0.5, 1.25, 2.0, 1.0, 0.0,
    ]  # fmt: skip


def test_gpt_has_the_announced_number_of_parameters():
    assert round(sum(p.numel() for p in GPT(6, 6, 384, 256).parameters()) / 1e6, 1) == 10.8


def test_gpt_sees_only_the_past():
    torch.manual_seed(0)
    model = GPT(2, 2, 16, 8)
    x = torch.randint(256, (1, 8))
    changed = x.clone()
    changed[0, 5] += 1
    states = [model.blocks(model.token(t % 256) + model.position.weight) for t in (x, changed)]
    assert torch.equal(states[0][:, :5], states[1][:, :5])
    assert not torch.equal(states[0][:, 5:], states[1][:, 5:])


def test_gpt_text_is_capped_and_the_same_every_time():
    text = train_gpt.read_text(100_001)
    assert len(text) == 100_001
    assert torch.equal(text, train_gpt.read_text(100_001))


def test_gpt_ranks_read_disjoint_shards():
    args = SimpleNamespace(max_bytes=30_000, block=16, batch=4, seed=0)
    shards = [train_gpt.Batches(args, rank, 3).shard for rank in range(3)]
    assert torch.equal(torch.cat(shards), train_gpt.read_text(30_000))
    x, y = train_gpt.Batches(args, 1, 3).next()
    assert x.shape == y.shape == (4, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])
    with pytest.raises(SystemExit, match="lower --block"):
        train_gpt.Batches(SimpleNamespace(max_bytes=50, block=16, batch=4, seed=0), 0, 3)


def test_progress_prints_lines_where_there_is_no_terminal(capsys):
    with progress.Progress("lines", total=2) as shown:
        shown.advance("step")
        shown.milestone("half")
    assert capsys.readouterr().out == "half\n"
    with progress.Progress("off", total=2) as hidden:
        hidden.advance("step")
        hidden.milestone("half")
    assert capsys.readouterr().out == ""


def test_progress_bar_counts_the_steps(capsys):
    with progress.Progress("bar", total=3, done=1) as shown:
        shown.advance("first")
        shown.advance("last")
        shown.milestone("not on a bar")
    text = capsys.readouterr().out
    assert "3/3 steps" in text
    assert "last" in text
    assert "not on a bar" not in text


def test_demo_binds_each_rank_only_where_there_are_cores(monkeypatch):
    assert 1 <= demo.physical_cores() <= os.cpu_count()
    monkeypatch.setattr(demo, "find_mpirun", lambda: SimpleNamespace(path="mpirun", kind="openmpi"))
    monkeypatch.setattr(demo, "physical_cores", lambda: 2)
    assert demo.mpirun_command(2) == ["mpirun", "-n", "2", "--bind-to", "core:if-supported"]
    monkeypatch.setattr(demo, "physical_cores", lambda: 1)
    assert demo.mpirun_command(2) == ["mpirun", "-n", "2", "--oversubscribe", "--bind-to", "none"]


def test_readme_lists_every_setting_as_the_core_has_it():
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `(DCOLL_\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", readme, re.MULTILINE)
    assert rows == [row[:4] for row in _C.settings()]


def test_readme_plain_script_runs(tmp_path):
    block = re.search(r"<!-- before -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "before.py"
    script.write_text(block[1])
    run(str(script))


@pytest.mark.parametrize("document", ["README.md", "docs/tuning.md", "docs/troubleshooting.md"])
def test_documents_link_to_files_and_settings_that_exist(document):
    text = (ROOT / document).read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)]
    assert [link for link in links if link and not (ROOT / document).parent.joinpath(link).exists()] == []
    elsewhere = {"DCOLL_CUDA", "DCOLL_MPI", "DCOLL_UCX", "DCOLL_REQUIRE_GPU"}  # read when dcoll is built or tested
    known = {row[0] for row in _C.settings()} | elsewhere
    assert set(re.findall(r"\bDCOLL_[A-Z_]+\b", text)) - known == set()
