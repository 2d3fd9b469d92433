"""bench/convergence.py without its jobs: arguments, what is left to do, the table and the plot."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import convergence
import convergence_plot


def run_of(method: str, seed: int, loss: float, **more: object) -> dict[str, object]:
    curve = [(1, 2 * loss), (2, loss)]
    return {"task": "gpt", "method": method, "seed": seed, "loss": loss, "curve": curve, "ranks_agree": True,
            "seconds": 1.0} | more  # fmt: skip


def row_of(runs: list[dict[str, object]], method: str) -> dict[str, object]:
    return next(row for row in convergence.summarize(runs)["gpt"] if row["method"] == method)


PLAIN = [run_of("none", seed, loss) for seed, loss in enumerate((1.99, 2.0, 2.01))]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--methods", "none,zip"], "zip: allowed are none, fp16,"),
        (["--methods", ","], "no name: allowed are none"),
        (["--tasks", "imagenet"], "imagenet: allowed are digits, gpt"),
        (["--seeds", "0"], "at least 1"),
        (["--methods", "none", "--ranks", "1"], "at least 2"),
        (["--methods", "none", "--ranks", "65"], "allowed is at most 64"),
        (["--methods", "none", "--resume"], "needs --json"),
        (["--tasks", "digits", "--methods", "frozen"], "--methods frozen: of --tasks gpt alone"),
    ],
)
def test_wrong_arguments_are_explained(argv, message, capsys):
    with pytest.raises(SystemExit):
        convergence.parse(argv)
    assert message in capsys.readouterr().err


def test_differences_are_those_of_the_seeds_that_both_have():
    runs = [*PLAIN, run_of("int8", 0, 1.995), run_of("int8", 1, 2.005), run_of("topk", 0, 2.5)]
    int8 = row_of(runs, "int8")
    assert int8["difference"] == pytest.approx(0.005 / 1.995)
    assert int8["standard_error"] == pytest.approx(0.0, abs=1e-12)
    assert int8["within_spread"] is True
    assert int8["within_1_percent"] is True
    topk = row_of(runs, "topk")
    assert topk["within_spread"] is None  # a seed has no spread
    assert topk["within_1_percent"] is False
    assert row_of(PLAIN, "none")["deviation"] == pytest.approx(0.01)
    far = row_of([*PLAIN, *(run_of("bf16", seed, 2.012) for seed in range(3))], "bf16")
    assert (far["within_spread"], far["within_1_percent"]) == (False, True)
    better = row_of([*PLAIN, *(run_of("bf16", seed, 1.9) for seed in range(3))], "bf16")
    assert (better["within_spread"], better["within_1_percent"]) == (False, True)


def test_table_and_plot_of_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [*PLAIN, run_of("int8", 0, 1.995, ranks_agree=False, options={"codec": "int8", "feedback": True})]
    document = {"ranks": 2, "steps": {"digits": 2, "gpt": 2}, "runs": runs, "summary": convergence.summarize(runs)}
    text = convergence.markdown(document)
    assert "| none | 3 | 2.0000 | 0.0100 | 1.9900 to 2.0100 | - | - | - | - | yes | 1.0 |" in text
    assert "| int8 | 1 | 1.9950 | - | 1.9950 to 1.9950 | +0.25% | - | yes | - | no | 1.0 |" in text
    assert "int8: codec int8, feedback True." in text
    assert "digits" not in text
    convergence.plot(document, convergence.TASKS, tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_percents_are_of_plains_mean():
    plain, other = {0: {5: 1.0}, 1: {5: 3.0}, 2: {5: 9.0}}, {0: {5: 1.2}, 1: {5: 2.8}}
    found = convergence_plot.percent_from_plain(other, plain)
    assert found == {0: {5: pytest.approx(10)}, 1: {5: pytest.approx(-10)}}


def test_resuming_does_what_is_missing_and_refuses_other_settings(tmp_path):
    file = tmp_path / "c.json"
    argv = ["--methods", "none,int8", "--seeds", "2", "--ranks", "2", "--resume", "--json", str(file)]
    args = convergence.parse(argv)
    assert convergence.new_document(args)["runs"] == []  # nothing to go on from yet
    document = convergence.new_document(args) | {"runs": [run_of("none", 0, 2.0)]}
    convergence.save(document, file)
    runs = convergence.new_document(args)["runs"]
    assert runs == json.loads(json.dumps(document["runs"]))
    assert convergence.missing_runs(args, "gpt", runs) == [("int8", 0), ("none", 1), ("int8", 1)]
    assert len(convergence.missing_runs(args, "digits", runs)) == 4
    args.methods = ["none", "topk-frozen"]  # of which digits, that has no AdamW, knows the first
    assert convergence.missing_runs(args, "digits", runs) == [("none", 0), ("none", 1)]
    assert convergence.missing_runs(args, "gpt", runs) == [("topk-frozen", 0), ("none", 1), ("topk-frozen", 1)]
    with pytest.raises(SystemExit, match="give the same, or another file"):
        convergence.new_document(convergence.parse([*argv, "--steps-gpt", "7"]))
