"""The Python tests over another build (sanitizer, compiler, MPI): python tests/built.py build/asan PYTEST-ARGUMENTS.

The folder's python/dcoll has the libraries (DCOLL_OUTPUT_DIR); the package's Python files are put beside them. Every
process of the tests, ranks under mpirun included, writes what its sanitizer finds to the folder's reports, so nothing
is lost in a test that expects its process to end badly.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def library(name: str) -> str:
    """The compiler's own."""
    command = [os.environ.get("CXX", "g++"), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def sanitized(kind: str, reports: Path) -> dict[str, str]:
    """Python itself is not built with the sanitizer, so the runtime is loaded before it."""
    if not kind:
        return {}
    slow = {"DCOLL_TIMEOUT": "60", "TESTS_JOB_SECONDS": "400"}
    if kind == "thread":
        # What Python's, torch's and MPI's code does among itself is not looked at; how it synchronises is understood.
        options = "ignore_noninstrumented_modules=1:second_deadlock_stack=1:exitcode=0"
        return slow | {
            "TSAN_OPTIONS": f"{options}:suppressions={ROOT}/cmake/tsan.supp:log_path={reports}/tsan",
            "LD_PRELOAD": f"{library('libtsan.so')} {library('libstdc++.so')}",
            "DCOLL_ARENA_MB": "4096",  # it leaves a program little address space, and ranks of tests are threads of one
            "PMIX_MCA_gds": "hash",  # not memory at an address that mpirun chooses: it may be ThreadSanitizer's
            "UCX_MEM_MMAP_HOOK_MODE": "none",  # hooks that take locks in threads of which it has seen the end
        }
    assert "address" in kind, f"the Python tests run under AddressSanitizer or ThreadSanitizer, not {kind}"
    # Python and torch keep memory until the end. What torch's and MPI's libraries do among themselves is theirs.
    return slow | {
        "ASAN_OPTIONS": f"detect_leaks=0:detect_odr_violation=0:allocator_may_return_null=1:log_path={reports}/asan",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={reports}/ubsan",
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "PYTHONMALLOC": "malloc",  # every object's end is seen
    }


def without_randomized_addresses() -> list[str]:
    """Older runtimes of ThreadSanitizer do not start where the kernel randomizes addresses widely."""
    setarch = ["setarch", "-R"]
    allowed = shutil.which(setarch[0]) and subprocess.run([*setarch, "true"], check=False, capture_output=True)
    return setarch if allowed and allowed.returncode == 0 else []


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    package, reports = folder / "python", folder / "reports"
    kind = re.search(r"^DCOLL_SANITIZE:\w+=(.*)$", (folder / "CMakeCache.txt").read_text(), re.MULTILINE)
    shutil.copytree(
        ROOT / "dcoll", package / "dcoll", dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("*.so", "mpirun.txt", "__pycache__"),
    )  # fmt: skip
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    # Programs of tests look in their working folder and in PYTHONPATH: neither is the tree, which has its own dcoll.
    env = os.environ | sanitized(kind[1] if kind else "", reports) | {"PYTHONPATH": str(package)}
    start = without_randomized_addresses() if kind and kind[1] == "thread" else []
    imported = [*start, sys.executable, "-c", "import dcoll; print(dcoll._C.__file__)"]
    where = subprocess.run(imported, cwd=package, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert Path(where).is_relative_to(folder), where
    begin = time.monotonic()
    command = [*start, sys.executable, "-m", "pytest", "-p", "no:faulthandler", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    command += [str(ROOT / word) if word.startswith("tests/") else word for word in sys.argv[2:]]
    status = subprocess.run(command, cwd=package, env=env, check=False).returncode
    found = sorted(path for path in reports.iterdir() if path.stat().st_size > 0)
    for path in found:
        print(f"--- {path.name}\n{path.read_text(errors='replace')}")
    print(f"{' '.join(sys.argv[1:])}: {time.monotonic() - begin:.0f} s, {len(found)} reports of sanitizers")
    return status or len(found) > 0


if __name__ == "__main__":
    sys.exit(main())
