"""The command line of dcoll.plan: what it says about a described job."""

import re

import pytest

from dcoll import _C, plan


def test_a_call_is_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan.main(["explain", "--bytes", "1M", "--memory", "mapped"])
    assert "--memory is of a call in a job" in capsys.readouterr().err


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert plan.main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def test_all_candidates_are_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, "--bytes", "16M", "--nodes", "4")
    candidates = {name for collective, name, _ in _C.plan.algorithms() if collective == "all_reduce"}
    for name in {name for _, name, _ in _C.plan.algorithms()}:
        assert (f"\n  {name} " in text) == (name in candidates)
    assert "16 MiB on 4 ranks" in text
    assert "built in, not measured" in text


def test_a_slower_link_is_predicted_to_take_longer(capsys: pytest.CaptureFixture[str]) -> None:
    def best_us(rate: str) -> float:
        text = explained(capsys, "--bytes", "16M", "--nodes", "4", "--rate", rate)
        assert "built in but for what was given" in text
        return float(text.split(" us predicted")[0].split()[-1])

    # 2 (n-1)/n S at 1 Gbit/s are 201 ms.
    assert 200e3 < best_us("1gbit") < 230e3
    assert 8 < best_us("1gbit") / best_us("10gbit") < 10.5


def test_two_levels(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, "--bytes", "1M", "--nodes", "3", "--ranks-per-node", "4")
    first, second = text.splitlines()[:2]
    assert first.startswith("hierarchical: ")
    assert "for 1 MiB on 12 ranks of 3 nodes (agreement " in first
    between = second.split(":")[0]
    assert first.endswith(f" by {between})")
    assert "on 3 ranks" in second


@pytest.mark.parametrize(
    ("options", "ranks", "nodes"),
    [
        ("--ranks-per-node 3,1,2", 6, 3),
        ("-n 6 --nodes 3 --ranks-per-node 3,1,2", 6, 3),
        ("-n 8 --nodes 4", 8, 4),
        ("-n 7 --ranks-per-node 3", 7, 3),
        ("--nodes 3 --ranks-per-node 2", 6, 3),
        ("--ranks-per-node 2", 4, 2),
    ],
)
def test_described_nodes(options: str, ranks: int, nodes: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"on {ranks} ranks of {nodes} nodes" in explained(capsys, "--bytes", "1M", *options.split())


@pytest.mark.parametrize(
    "options", ["-n 7 --nodes 2", "-n 2 --nodes 4", "-n 7 --ranks-per-node 3,1,2", "--nodes 2 --ranks-per-node 3,1,2"]
)
def test_nodes_that_cannot_be(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan.main(["explain", "--bytes", "1M", *options.split()])
    assert options.replace(" -", ", -") + " do not fit each other" in capsys.readouterr().err


def test_what_rides_on_the_agreement_has_nothing_between_nodes() -> None:
    rides = _C.plan.hierarchical(nodes=plan.blocks([2] * 4), bytes=8 << 10)
    assert rides["between"] is None
    assert rides["between_us"] == 0
    assert rides["total_us"] == rides["agreement_us"]
    cut = _C.plan.hierarchical(nodes=plan.blocks([2] * 4), bytes=(8 << 10) + 1)
    assert cut["between"] is not None
    assert cut["total_us"] == sum(cut[stage] for stage in ("agreement_us", "in_node_us", "between_us"))
    with pytest.raises(ValueError, match="all 8 ranks are on one"):
        _C.plan.hierarchical(nodes=plan.blocks([8]), bytes=1 << 20)


def test_two_levels_share_the_network_of_a_node() -> None:
    constants = {"network": {"beta_us_per_byte": 8e-3}}
    bytes = 64 << 20
    flat = 2 * (4 - 1) / 4 * bytes * 8e-3  # what a node must send at the least
    for per_node in (2, 4):
        cost = _C.plan.hierarchical(nodes=plan.blocks([per_node] * 4), bytes=bytes, constants=constants)
        assert flat < cost["total_us"] < 1.1 * flat


@pytest.mark.parametrize(
    ("option", "value", "text"), [("--rate", "fast", "is not a rate"), ("--latency", "5", "is not a time")]
)
def test_wrong_values(option: str, value: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan.main(["explain", "--bytes", "1M", option, value])
    assert text in capsys.readouterr().err


def test_unknown_constants_are_refused() -> None:
    with pytest.raises(ValueError, match="no constant is called 'memroy'"):
        _C.plan.select("all_reduce", 1 << 20, range(4), constants={"memroy": {}})
    with pytest.raises(ValueError, match="a link has no constant 'beta'"):
        _C.plan.select("all_reduce", 1 << 20, range(4), constants={"network": {"beta": 1.0}})
    known = {"memory", "network", "gamma_us_per_byte", "handshake_us", "shared_cores"}
    assert set(_C.plan.constants()) == known


def test_the_measured_handshake_is_shown_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    measured = _C.plan.constants() | {"handshake_us": 512.25}
    nodes = plan.blocks([2] * 4)
    assert _C.plan.hierarchical(nodes=nodes, bytes=1 << 20, constants=measured)["agreement_us"] == 512.25
    assert "handshake of all ranks: 512.2 us, measured" in plan.explain("all_reduce", 1 << 20, nodes, measured)
    assert "handshake" not in explained(capsys, "--bytes", "1M", "--nodes", "4", "--ranks-per-node", "2")


def test_few_carriers_on_shared_cores() -> None:
    def between_us(bytes: int, shared: bool) -> float:
        # A message's own way is long: two carriers halve it.
        network = {"beta_us_per_byte": 8e-5, "transit_us_per_byte": 8e-3}
        constants = {"network": network, "shared_cores": shared}
        cost = _C.plan.hierarchical(nodes=plan.blocks([2] * 4), bytes=bytes, constants=constants)
        return float(cost["between_us"])

    assert between_us(64 << 10, shared=True) > between_us(64 << 10, shared=False)
    assert between_us(1 << 20, shared=True) == between_us(1 << 20, shared=False)


def test_compression_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, "--bytes", "64M", "--nodes", "4", "--rate", "100mbit", "--compression")
    for codec in plan.CODECS:
        assert re.search(rf"^  {codec} .* us +[\d.]+x  {codec} \(coding", text, re.M), text
    short = explained(capsys, "--bytes", "64K", "--nodes", "4", "--rate", "100mbit", "--compression")
    assert short.count("in full: it is too short") == len(plan.CODECS)
    assert "nothing is compressed inside one node" in explained(capsys, "--bytes", "1M", "-n", "4", "--compression")
    assert "Compression.auto" not in explained(capsys, "--bytes", "64M", "--nodes", "4")
    with pytest.raises(SystemExit):
        plan.main(["explain", "--bytes", "1M", "--collective", "broadcast", "--compression"])
    assert "--compression is of an all_reduce, but --collective is broadcast" in capsys.readouterr().err


def test_a_codec_that_is_none_cannot_be_measured() -> None:
    with pytest.raises(ValueError, match="'' is no codec"):
        _C.plan.coding("")
    with pytest.raises(ValueError, match="'' is no codec"):
        _C.plan.encoded("", 1 << 20, [0, 1], 1e-5, 1e-5)
    with pytest.raises(ValueError, match="No codec 'int4'"):
        _C.plan.coding("int4")
