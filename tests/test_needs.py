"""The settings of all tests (conftest.py): seeds, and skips that may not be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os
import random
import hypothesis
import hypothesis.strategies as st
import pytest

@pytest.mark.parametrize("reason", ["needs moon: it is day", "needs moon: it is day", "tired"])
def test_skipped(reason):
    pytest.skip(reason)

@pytest.mark.parametrize("module", [0])
@hypothesis.given(st.integers(0, 1 << 60))
@hypothesis.settings(max_examples=5, database=None)
def test_drawn(module, number):
    with open("drawn", "a") as file:
        file.write(f"{number} ")
"""


def run(folder: Path, **env: str) -> str:
    (folder / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (folder / "test_it.py").write_text(TESTS)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TESTS_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "."],
        cwd=folder, env=clean | {"CI": "true"} | env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.parametrize(("need", "outcome"), [
    ("", "1 passed, 3 skipped"), ("mpi,moon", "2 failed, 1 passed, 1 skipped"),
])  # fmt: skip
def test_skips_are_named_and_may_be_failures(need: str, outcome: str, tmp_path: Path) -> None:
    told = run(tmp_path, TESTS_NEED=need)
    assert outcome in told
    if need == "":
        assert "3 skipped (" in told
        assert "2 x needs moon: it is day\n1 x tired" in told
    else:
        assert f"TESTS_NEED={need}, but the test would be skipped: needs moon: it is day" in told


def test_seeds_move_and_come_back(tmp_path: Path) -> None:
    def drawn(**env: str) -> str:
        told = run(tmp_path, **env)
        assert f"seed: TESTS_SEED={env.get('TESTS_SEED', '')}" in told, told
        text = (tmp_path / "drawn").read_text()
        (tmp_path / "drawn").unlink()
        return text

    first = drawn(TESTS_SEED="5")
    assert first == drawn(TESTS_SEED="5")
    assert first != drawn()
