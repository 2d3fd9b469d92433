"""One rank of a job that runs Horovod's own tests of its torch API: horovod_tests.py CHECKOUT FOLDER

CHECKOUT is Horovod's repository. FOLDER has a package named horovod, which is dcoll, and takes the outcomes. pytest
runs the tests, as it does for Horovod: they bear its marks.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from mpirun import SKIPPED

TESTS = Path("test", "parallel", "test_torch.py")
"""Where they are in a checkout."""


class Outcomes:
    """A plugin of pytest: writes "", SKIPPED and why, or a traceback for each test. The file is written after every
    one, so that a job that is ended leaves what it got to."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.failed:
            self.outcomes[name] = report.longreprtext
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.outcomes[name] = SKIPPED + report.longrepr[2].removeprefix("Skipped: ")
        elif report.when == "call":
            self.outcomes[name] = ""
        self.file.write_text(json.dumps(self.outcomes))


def add_what_only_other_tests_use() -> None:
    """Horovod's helpers import it for all of its tests, those of torch do without."""
    threads = ModuleType("horovod.runner.util.threads")
    threads.in_thread = None  # type: ignore[attr-defined]
    sys.modules[threads.__name__] = threads
    for name in ("cloudpickle", "mock"):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = ModuleType(name)


def hide_later_optimizers() -> None:
    """The tests try every optimizer of torch's on biases too, which those that came after them do not all take."""
    if hasattr(torch.optim, "Muon"):
        torch.optim.Muon.__module__ = "later"


def run(checkout: str, folder: str) -> int:
    sys.path.insert(0, folder)  # where horovod is
    sys.dont_write_bytecode = True  # the checkout stays as it is
    import dcoll as hvd

    hvd.init()
    add_what_only_other_tests_use()
    hide_later_optimizers()
    # None of the settings of a project that either of the two folders lies in.
    alone = ["-c", os.devnull, "--rootdir", checkout, "--noconftest", "-p", "no:cacheprovider"]
    outcomes = Outcomes(Path(folder) / f"{hvd.rank()}.json")
    status = pytest.main([*alone, "-q", "--tb=short", "--no-summary", str(Path(checkout) / TESTS)], plugins=[outcomes])
    return 0 if status == pytest.ExitCode.TESTS_FAILED else status


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
