"""A few seconds of the stress test; `make stress` runs minutes of it."""

import json
import os
from pathlib import Path

import pytest
from mpirun import launch

pytestmark = pytest.mark.mpi

STRESS = Path(__file__).parent.parent / "stress" / "stress.py"
SEED = int(os.environ["TESTS_SEED"])
KEPT: list[tuple[int, int]] = [(2, 3)]
"""(ranks, seed): the first of all, and each that found something."""


def hashes(n: int, report: Path, seed: int = SEED, **env: str) -> list[str]:
    done = launch(n, str(STRESS), "--seed", str(seed), "--rounds", "2", "--report", str(report), preloaded=True, **env)
    assert done.returncode == 0, f"--seed {seed}: {done.text}"
    found: list[str] = json.loads(report.read_text())["hashes"]
    return found


@pytest.mark.parametrize(("n", "seed"), [*KEPT, (5, SEED)])
def test_no_wrong_byte_and_the_same_bits_again(n: int, seed: int, tmp_path: Path) -> None:
    assert hashes(n, tmp_path / "1.json", seed) == hashes(n, tmp_path / "2.json", seed, DCOLL_SPIN_US="20")


def test_by_messages_alone(tmp_path: Path) -> None:
    assert len(hashes(3, tmp_path / "report.json", DCOLL_TRANSPORT="mpi")) == 2


@pytest.mark.parametrize(("n", "nodes"), [(4, "0,1"), (5, "0,0,1,2,2")], ids=str)
def test_on_two_levels(n: int, nodes: str, tmp_path: Path) -> None:
    assert len(hashes(n, tmp_path / "report.json", DCOLL_NODES=nodes, DCOLL_CALIBRATE="force")) == 2
