"""One machine treated as several nodes (DCOLL_NODES): collectives on two levels, and who is named as late."""

from pathlib import Path

import checks_collectives
import checks_learning
import pytest
from mpirun import HERE, expect, launch, names_of_checks, run_checks
from test_mpi_faults import fault

pytestmark = pytest.mark.mpi

LAYOUTS = [(3, "0,1,1"), (4, "0,1")]
"""A node of one rank beside one of two; two of two, round-robin."""


@pytest.mark.parametrize("check", names_of_checks(checks_collectives))
@pytest.mark.parametrize(("n", "nodes"), LAYOUTS, ids=str)
def test_collectives(n: int, nodes: str, check: str) -> None:
    expect(run_checks("checks_collectives", n, (("DCOLL_NODES", nodes),)), check)


@pytest.mark.parametrize("check", names_of_checks(checks_learning))
@pytest.mark.parametrize(("n", "nodes"), [*LAYOUTS, (4, "0,1,2,3")], ids=str)
def test_names_while_constants_are_learnt(n: int, nodes: str, check: str) -> None:
    settings = (("DCOLL_NODES", nodes), ("DCOLL_CALIBRATE", "force"))
    expect(run_checks("checks_learning", n, settings), check)


@pytest.mark.parametrize(("n", "nodes"), [*LAYOUTS, (5, "0,0,0,1,2")], ids=str)
def test_a_job_explains_itself(n: int, nodes: str) -> None:
    done = launch(n, "-m", "dcoll.plan", "explain", "--bytes", "1M", preloaded=True, DCOLL_NODES=nodes)
    assert done.returncode == 0, done.text
    several = len(set(nodes.split(",")))
    assert f"on {n} ranks of {several} nodes (" in done.stdout, done.text
    assert done.stdout.count("hierarchical:") == 1, done.text
    assert done.stdout.startswith("all_reduce of 1048576 bytes of float32, ordinary memory: two levels"), done.text
    assert f"predicted for 1 MiB on {several} ranks" in done.stdout, done.text  # what the nodes do between them


@pytest.mark.parametrize(
    ("options", "env", "path"),
    [
        ("--bytes 1M --memory mapped", {}, "in the memory that all ranks share, form: two-shot"),
        ("--bytes 1M", {}, "in the memory that all ranks share, form: staged"),
        ("--bytes 1M --memory device", {}, "on the devices, if they reach each other"),
        ("--bytes 1M --memory device", {"DCOLL_GPU_ENGINE": "host"}, "copied to the host and back; there a direct"),
        ("--bytes 1M --op adasum", {}, "Adasum's tree of pairs"),
        ("--bytes 1M --collective broadcast", {}, "every rank reads what is for it"),
        ("--bytes 64", {"DCOLL_TRANSPORT": "mpi"}, "with the handshake, whose messages have room"),
        ("--bytes 1M --dtype int8", {"DCOLL_TRANSPORT": "mpi"}, "a schedule of messages"),
        ("--bytes 1M", {"DCOLL_ALGO": "ring"}, "a schedule of messages"),
    ],
)
def test_a_job_says_how_a_call_goes(options: str, env: dict[str, str], path: str) -> None:
    done = launch(2, "-m", "dcoll.plan", "explain", *options.split(), preloaded=True, **env)
    assert done.returncode == 0, done.text
    assert path in done.stdout.splitlines()[0], done.text


def test_a_timeout_names_the_rank_that_is_late(tmp_path: Path) -> None:
    env = {"DCOLL_NODES": "0,1,1", "DCOLL_TIMEOUT": "3", "DCOLL_STALL_CHECK_DISABLE": "1", "DCOLL_CALIBRATE": "off"}
    done = launch(3, str(HERE / "fault.py"), "late_on_two_levels", FAULT_FOLDER=str(tmp_path), timeout=45, **env)
    said = [line for line in done.stdout.splitlines() if "made no progress" in line]
    assert len(said) == 2, done.text
    assert all("waiting for rank 1 of 3" in line for line in said), done.text


def test_nodes_are_numbers() -> None:
    done = fault("caught", 2, DCOLL_NODES="0,x")
    assert done.returncode != 0
    assert "DCOLL_NODES='0,x' is not valid: allowed are numbers like 0,0,1,1" in done.stderr, done.text
