"""One rank of a job that runs a module of checks: python run_checks.py MODULE FOLDER (see mpirun.py)."""

import importlib
import json
import sys
import traceback
from pathlib import Path

import pytest
from mpirun import SKIPPED, names_of_checks

import dcoll as hvd


def main(module_name: str, folder: str) -> None:
    module = importlib.import_module(module_name)
    hvd.init()
    results: dict[str, str] = {}
    for name in names_of_checks(module):
        try:
            getattr(module, name)()
            results[name] = ""
        except pytest.skip.Exception as skipped:
            results[name] = f"{SKIPPED}{skipped}"
        except (Exception, pytest.fail.Exception):
            results[name] = traceback.format_exc()
        # Written at once: what a rank found out must survive whatever the next check does to it.
        (Path(folder) / f"{hvd.rank()}.json").write_text(json.dumps(results))
        hvd.allgather_object(name)  # a rank that failed half-way meets the others here, or ends the job


if __name__ == "__main__":
    main(*sys.argv[1:])
