"""Settings of all Python tests: what random numbers begin from, and what may be missing.

TESTS_SEED gives back the seed of an earlier run, which the header names; each run has another. What hypothesis finds is
kept as an @example, what the stress test finds in test_stress.KEPT.

Tests skip with the reason "needs WHAT: ..." (WHAT: mpi, mpi4py, root, gpu, ...). TESTS_NEED=WHAT,WHAT (or all) makes
these skips failures, where they must not be missing. All skips are counted and named at the end of a run.
"""

import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

# tests/mpi compares with the same reference as tests/python.
sys.path.append(str(Path(__file__).parent / "python"))
sys.path.append(str(Path(__file__).parent / "mpi"))
# Ranks outnumber cores on most machines that run the tests: torch's own threads would only fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as in the Makefile
os.environ.pop("PYTHONUNBUFFERED", None)  # a line of a rank is one write: ranks of a job may share one pipe
# A test that would wait for ever fails, and says which ranks were waited for.
os.environ.setdefault("DCOLL_TIMEOUT", "20")
# Each TCPStore of PyTorch's looks its peer's address up by DNS, for a message that nobody sees. Where a name server
# loses a query, that would be 5 seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Measured constants of links are not the user's.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / "build" / "cache")
SEED = int(os.environ.setdefault("TESTS_SEED", str(random.SystemRandom().randrange(10**6))))  # of the jobs too

# Not hypothesis's own profile for CI, which draws the same examples for ever.
hypothesis.settings.register_profile("dcoll", derandomize=False, print_blob=True, deadline=None)
hypothesis.settings.load_profile("dcoll")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-seed", None) is None:
        config.option.hypothesis_seed = SEED


def pytest_report_header() -> str:
    return f"seed: TESTS_SEED={SEED}"


@pytest.fixture
def german(tmp_path: Path) -> Path:
    """LOCPATH of a locale "de_DE.UTF-8", which writes 1.5 as 1,5."""
    command = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")]
    if shutil.which(command[0]):
        subprocess.run(command, check=False, capture_output=True)
    if not (tmp_path / "de_DE.UTF-8" / "LC_NUMERIC").exists():
        pytest.skip("needs locales: no German one can be made here (apt-get install locales)")
    return tmp_path


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that start mpirun themselves are skipped where there is none, like those that do so through mpirun.py."""
    if item.get_closest_marker("mpi"):
        import mpirun

        mpirun.find_launcher()


def must_not_be_missing(reason: str) -> bool:
    """Whether TESTS_NEED names what a skip is for want of."""
    needed = os.environ.get("TESTS_NEED", "").split(",")
    what = re.match(r"needs (\w+):", reason)
    return "all" in needed or (what is not None and what[1] in needed)


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""


def checked(report: pytest.TestReport | pytest.CollectReport) -> None:
    """A skip for want of what is needed is a failure."""
    if report.skipped and not hasattr(report, "wasxfail") and must_not_be_missing(reason_of(report)):
        report.outcome = "failed"
        report.longrepr = f"TESTS_NEED={os.environ['TESTS_NEED']}, but the test would be skipped: {reason_of(report)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    checked(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    checked(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skips = Counter(reason_of(report) for report in terminalreporter.getreports("skipped"))
    if skips:
        terminalreporter.section(f"{skips.total()} skipped (TESTS_NEED=WHAT makes those that need WHAT failures)")
        for reason, count in skips.most_common():
            terminalreporter.line(f"{count} x {reason}")
