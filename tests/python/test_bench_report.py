"""The benchmarks' numbers: exact inputs and sums, paired ratios, tables, the plot, overlap and memory."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
sys.path.append(
    str(Path(__file__).parents[2] / "bench" / "interleaved")
)  # a worker's modules see each other without a package

import check
import overlap
from interleaved import plot, report


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "float64"])
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
@pytest.mark.parametrize("count", [1, 7, check.BLOCK - 1, check.BLOCK + 1])
def test_the_expected_sum_is_the_sum_of_the_inputs(dtype, ranks, count):
    itemsize = check.numpy_dtype(dtype).itemsize
    patterns = [check.Pattern(dtype, rank, ranks) for rank in range(ranks)]
    total = torch.zeros(count, dtype=getattr(torch, dtype))
    for pattern in patterns:
        raw = np.zeros(count * itemsize, np.uint8)
        pattern.fill(raw)
        total += torch.from_numpy(raw).view(total.dtype)
    raw = total.view(torch.uint8).numpy()
    assert [pattern.count_wrong(raw) for pattern in patterns] == [0] * ranks
    raw[-itemsize:] += 1
    assert patterns[0].count_wrong(raw) == 1


def test_sums_differ_from_element_to_element():
    for ranks in (1, 2, 4, 8):
        block = check.Pattern("float32", 0, ranks).result
        assert len(np.unique(block)) > ranks


def test_a_ratio_pairs_the_turns_of_a_round():
    # Both twice as slow in the second round, then one turn missing: the ratio stays 3.
    assert report.paired_ratio([3.0, 6.0, 9.0, 1.0], [1.0, 2.0, 3.0, None]) == 3.0
    assert report.paired_ratio([None, 1.0], [1.0, None]) is None
    assert report.paired_ratio([], []) is None


def test_spread_takes_medians_and_skips_missing_turns():
    assert report.spread([None, None]) is None
    found = report.spread([1e-6 * value for value in range(1, 12)] + [None])
    assert {key: round(value, 6) for key, value in found.items()} == {
        "time_us": 6, "p10_us": 2, "p90_us": 10, "rounds": 11,
    }  # fmt: skip
    assert report.spread([5e-6]) == pytest.approx({"time_us": 5, "p10_us": 5, "p90_us": 5, "rounds": 1})


SAMPLES = {
    4: {
        "dcoll mapped": [2e-6, 4e-6], "dcoll plain": [4e-6, 8e-6], "mpi4py": [1e-6, 2e-6], "gloo": [2e-4, 4e-4],
        "memcpy": [1e-8, 2e-8], "bare": [1e-6, 2e-6],
    },
    65536: {
        "dcoll mapped": [1e-5, 1e-5], "dcoll plain": [2e-5, 2e-5], "mpi4py": [1e-4, 1e-4], "gloo": [None, None],
        "memcpy": [5e-6, 5e-6], "bare": [9e-6, 9e-6],
    },
}  # fmt: skip


def make_document(**more):
    kinds = {
        "dcoll mapped": "own",
        "dcoll plain": "own",
        "mpi4py": "peer",
        "gloo": "peer",
        "memcpy": "limit",
        "bare": "limit",
    }
    return {
        "environment": {"date": "today", "cpu": "a CPU"},
        "arguments": {"ranks": 2, "cpus": [0, 1], "dtype": "float32", "rounds": 2, "turn_s": 0.05, "rotate": False},
        "columns": {name: {"kind": kind, "label": name.upper()} for name, kind in kinds.items()},
        "rows": report.summarize(SAMPLES, ["dcoll mapped", "dcoll plain"], ["mpi4py", "gloo"]),
        "left_out": {}, "wrong": {}, "idle_cpu_share": {},
    } | more  # fmt: skip


def test_rows_have_times_ratios_and_the_fastest_peer():
    small, large = make_document()["rows"]
    assert small["columns"]["dcoll mapped"]["time_us"] == pytest.approx(3.0)
    assert (small["fastest_peer"], large["fastest_peer"]) == ("mpi4py", "mpi4py")
    assert small["peer_over"]["dcoll mapped"] == pytest.approx({"mpi4py": 0.5, "gloo": 100.0})
    assert large["peer_over"] == {
        "dcoll mapped": pytest.approx({"mpi4py": 10.0}), "dcoll plain": pytest.approx({"mpi4py": 5.0}),
    }  # fmt: skip
    assert large["limit_over"]["dcoll mapped"] == pytest.approx({"bare": 0.9, "memcpy": 0.5})


def test_markdown_holds_the_tables():
    text = report.markdown(make_document())
    assert "| bytes | DCOLL MAPPED | DCOLL PLAIN | MPI4PY | GLOO | MEMCPY | BARE |" in text
    assert "| 4 | 3 | 6 | 1.5 | 300 | 0.015 | 1.5 |" in text
    assert "| 64 Ki | 10 | 20 | 100 | - | 5 | 9 |" in text
    assert "| 64 Ki | mpi4py | 10.0 | 5.00 | 90% | 50% |" in text
    assert "| 4 | 0.50 / 0.25 | 100 / 50.0 |" in text
    assert "the same buffer again and again; ranks pinned to CPUs 0, 1" in text
    assert text.endswith("Every engine ran, and every result was exact.\n")


def test_markdown_tells_what_is_missing_and_what_misleads():
    idle = {"oneccl": 0.5, "mpi4py": 0.01}
    document = make_document(left_out={"mpich": "no environment"}, wrong={"gloo": {"4": 3}}, idle_cpu_share=idle)
    text = report.markdown(document)
    assert "- mpich: left out: no environment" in text
    assert "- gloo: WRONG RESULTS: 3 elements at 4 bytes" in text
    assert "- oneccl: used 50% of a core while others were measured" in text
    assert "- mpi4py" not in text
    assert "Every engine ran" not in text


def test_markdown_without_peers_is_times_alone():
    document = make_document()
    document["rows"] = report.summarize({4: {"bare": [1e-6], "memcpy": [1e-6]}}, [], [])
    document["columns"] = {name: document["columns"][name] for name in ("bare", "memcpy")}
    text = report.markdown(document)
    assert "| 4 | 1 | 1 |" in text
    assert "fastest" not in text


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plot.plot(make_document(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_overlap_arguments_are_split_from_the_scripts():
    args = overlap.parse(["--rounds", "3", "--memory", "--", "--batch", "2"])
    assert (args.rounds, args.memory, args.training) == (3, True, ["--batch", "2"])
    assert overlap.parse([]).training == []


def test_a_step_takes_as_long_as_its_slowest_rank():
    answers = [
        {"step_s": [1.0, 2.0], "waited_s": 0.5, "cpu_s": 2.0},
        {"step_s": [3.0, 1.0], "waited_s": 0.1, "cpu_s": 4.0},
    ]
    summary = {"step_s": 2.5, "cpu_s": 1.5, "alone_s": 0.4, "waited_s": 0.05}
    assert overlap.summarize_turn(answers, [0.2, 0.4]) == summary
    untold = [{"step_s": [1.0], "waited_s": None, "cpu_s": 1.0}]
    assert overlap.summarize_turn(untold, [0.0])["waited_s"] == 0.0


def test_exposed_and_hidden_come_from_paired_rounds():
    def one(step, alone):
        return {"step_s": step, "cpu_s": 0.9 * step, "alone_s": alone, "waited_s": 0.0}

    turns = {
        "none": [one(1.0, 0.0), one(2.0, 0.0), None],
        "dcoll": [one(1.1, 0.4), one(2.1, 0.4), one(50.0, 0.4)],
        "ddp-gloo": [None, None, None],
    }
    rows = overlap.summarize(turns, tokens=210)
    assert set(rows) == {"none", "dcoll"}
    assert rows["dcoll"]["exposed_s"] == pytest.approx(0.1)
    assert rows["dcoll"]["hidden_share"] == pytest.approx(0.75)
    assert rows["dcoll"]["exposed_share"] == pytest.approx((0.1 / 1.1 + 0.1 / 2.1) / 2)
    assert rows["dcoll"]["tokens_per_second"] == pytest.approx(100)
    text = overlap.overlap_table(rows)
    assert "| dcoll | 2100.0 | 1890.0 | 100 | 100.0 | 6.9% | 400.0 | 75% (75% to 75%) | 0.0 |" in text
    # What is lost may be more than communication takes, and noise may gain: neither is cut off.
    turns["dcoll"] = [one(1.5, 0.4), one(1.9, 0.4), None]
    (lost, gained) = overlap.summarize(turns, tokens=210)["dcoll"]["hidden_quartiles"]
    assert (lost, gained) == (pytest.approx(0.125), pytest.approx(0.875))
    turns["dcoll"] = [one(1.8, 0.4), None, None]
    assert overlap.summarize(turns, tokens=210)["dcoll"]["hidden_share"] == pytest.approx(-1.0)
    assert "| none | 1500.0 | 1350.0 | 140 | - | - | - | - | - |" in text


def test_shared_pages_count_once():
    rank = {"peak_rss_kb": 10240, "rss_shmem_kb": 4096, "pss_shmem_kb": 2048, "pss_kb": 0}
    assert overlap.counted_once_kb(rank) == 8192
    memory = {
        name: {"per_rank": [rank, rank], "total_mb": total} for name, total in (("dcoll", 15.0), ("ddp-gloo", 16.0))
    }
    text = overlap.memory_table(memory)
    assert "| dcoll | 15 | -6.2% | 20 | 4 |" in text
    assert "| ddp-gloo | 16 | +0.0% | 20 | 4 |" in text


def test_this_process_has_memory():
    import training

    found = training.memory_of_this_process()
    assert found["peak_rss_kb"] > 10_000
    assert found["pss_shmem_kb"] <= found["rss_shmem_kb"] <= found["peak_rss_kb"]
