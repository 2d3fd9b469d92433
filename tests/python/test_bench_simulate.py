"""bench/simulate.py: its arguments, its sweeps, its plots and the published anchors."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import horovod_anchor
import simulate

from dcoll import _C

SMALL = ["--ranks", "4,8,16", "--at", "1M", "-b", "1K", "-e", "64K", "-f", "8", "--at-ranks", "16",
         "--ranks-per-node", "4"]  # fmt: skip


def test_table_json_and_plot(tmp_path, capsys):
    found, plot = tmp_path / "out.json", tmp_path / "out.png"
    pictures = ["--plot", str(plot)] if pytest.importorskip("matplotlib") else []
    assert simulate.main([*SMALL, "--compression", "4", "--json", str(found), *pictures]) == 0
    document = json.loads(found.read_text())
    assert document["arguments"]["algo"] == list(simulate.ALGORITHMS)
    assert {row["ranks"] for row in document["ranks"]} == {4, 8, 16}
    assert {row["bytes"] for row in document["bytes"]} == {1024, 8192, 65536}
    assert {row["algo"] for row in document["ranks"]} == set(simulate.ALGORITHMS)
    assert all(row["us"] > 0 for row in document["ranks"] + document["bytes"])
    assert all(row["inner"] in simulate.FLAT for row in document["ranks"] if row["algo"] == "hierarchical")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "16 comp" in capsys.readouterr().out


def test_thousands_of_ranks():
    args = simulate.parse([])
    for algo in simulate.ALGORITHMS:
        row = simulate.point(args, algo, 4096, 64 << 20, False)
        assert row["events"] < 2_000_000
        assert row["us"] > 2 * 511 / 512 * (64 << 20) * 8e-5 / 8  # no faster than one rank's share through the card


def test_compression_helps_where_the_network_is_slow_only():
    slow = simulate.parse(["--network", "5,0.5,1", "--compression", "4"])
    fast = simulate.parse(["--network", "5,0.5,400", "--compression", "4", "--encode", "1"])
    times = {
        name: [simulate.point(args, "ring", 64, 64 << 20, compressed)["us"] for compressed in (False, True)]
        for name, args in (("slow", slow), ("fast", fast))
    }
    assert times["slow"][1] < times["slow"][0] / 2
    assert times["fast"][1] > times["fast"][0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks", "12"], "12 ranks do not fill nodes of 8"),
        (["--network", "5,1"], "is not a link"),
        (["--network", "5,1,0"], "is not a link"),
        (["--compression", "0.5"], "at least 1"),
        (["-b", "2M", "-e", "1M"], "allowed is 1 to -e bytes"),
        (["--slice", "0"], "at least 1 byte"),
        (["--ranks", "0"], "at least 1"),
        (["--algo", "direct"], "invalid choice"),
        (["--anchor", "all", "--rails", "2", "--algo", "ring"], "there is no --algo, --rails"),
    ],
)
def test_wrong_arguments_are_explained(argv, message, capsys):
    with pytest.raises(SystemExit):
        simulate.parse(argv)
    assert message in capsys.readouterr().err


def test_impossible_clusters_are_explained(capsys):
    assert simulate.main([*SMALL, "--nodes-per-rack", "3"]) == 2
    assert "do not fill racks of 3" in capsys.readouterr().err


def test_simulator_names_what_it_lacks():
    with pytest.raises(_C.ArgumentError, match="no algorithm for all_reduce is called 'bogus'"):
        _C.plan.simulate("all_reduce", "bogus", bytes=8, nodes=2)
    with pytest.raises(_C.ArgumentError, match="hierarchical is an all_reduce"):
        _C.plan.simulate("all_gather", "ring", hierarchical=True, bytes=8, nodes=2)


# Explained at the top of horovod_anchor.py.
EXPLAINED = {("horovod-128", "ResNet-101"): 0.11, ("horovod-512", "VGG-16"): 0.16}


@pytest.mark.parametrize("name", horovod_anchor.ANCHORS)
def test_published_scaling_is_reproduced(name):
    for row in horovod_anchor.reproduce(name)["rows"]:
        assert abs(row["off"]) < EXPLAINED.get((name, row["model"]), 0.10), row


def test_gradients_of_vgg_16():
    parameters = sum(count for count, _ in horovod_anchor.vgg16())
    assert parameters == 138_357_544  # as torchvision counts them
    times = horovod_anchor.ready_times(horovod_anchor.vgg16(), 300.0)
    assert times[-1][0] == pytest.approx(300.0)
    assert times[0][0] > 100.0
