"""What clang finds wrong with locks: python tests/thread_safety.py build/cmake-... (which `make build` made).

csrc/base/thread_safety.h has the annotations: which lock guards a variable, and which a function needs. g++ does not
know them, so all that includes that header is read once more, by clang, in the units of that build (eight files each).
Where there is no clang, this says so and is not a failure: the annotations cost nothing and no build needs them.
"""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "csrc/base/thread_safety.h"
CACHE = ["ccache"] if shutil.which("ccache") else []  # of what it found nothing wrong with
CHECK = [*CACHE, "clang++", "-fsyntax-only", "-Wno-everything", "-Wthread-safety", "-Werror=thread-safety"]
# What is wrong here clang must find, or nothing it says of the rest means anything.
WRONG = """#include "base/thread_safety.h"
struct Counter {
  dcoll::Mutex mutex;
  int count DCOLL_GUARDED_BY(mutex) = 0;
  int read() { return count; }
};
int read(Counter& counter) { return counter.read(); }
"""


def kept(command: str) -> list[str]:
    """Of g++'s command what changes the meaning of a file: folders, macros and the language."""
    words = shlex.split(command)
    found = []
    for at, word in enumerate(words):
        if word == "-isystem":
            found += words[at : at + 2]
        elif word.startswith(("-I", "-D", "-std=")):
            found.append(word)
    return found


@functools.cache
def included_by(source: Path) -> list[Path]:
    found = re.findall(r'^\s*#\s*include\s+"([^"]+)"', source.read_text(), re.MULTILINE)
    return [path for name in found if (path := ROOT / "csrc" / name).exists()]


def has_annotations(source: Path) -> bool:
    """Whether it includes the header, itself or by others."""
    seen, left = {source}, [source]
    while left:
        more = [path for path in included_by(left.pop()) if path not in seen]
        seen.update(more)
        left += more
    return HEADER in seen


def check(source: Path, options: list[str], folder: Path) -> str:
    """What clang finds; empty: nothing."""
    done = subprocess.run([*CHECK, *options, str(source)], cwd=folder, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr


def main() -> int:
    if shutil.which("clang++") is None:
        print("thread safety: skipped, for there is no clang++ (Debian's package clang)")
        return 0
    build = Path(sys.argv[1]).resolve()
    commands: dict[Path, list[str]] = {}  # what several libraries are made of, once
    for entry in json.loads((build / "compile_commands.json").read_text()):
        source = (build / entry["file"]).resolve()
        ours = source.is_relative_to(ROOT / "csrc") or source.parent.name == "Unity"
        if source.suffix in (".cc", ".cxx") and ours and has_annotations(source):
            commands[source] = kept(entry["command"])
    assert commands, f"no file includes {HEADER}"
    with tempfile.TemporaryDirectory() as name:
        wrong = Path(name) / "wrong.cc"
        wrong.write_text(WRONG)
        found = check(wrong, ["-std=c++20", f"-I{ROOT / 'csrc'}"], build)
        assert "reading variable 'count' requires holding mutex 'mutex'" in found, (
            f"clang misses what is wrong:\n{found}"
        )
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = "".join(pool.map(lambda one: check(*one, build), commands.items()))
    print(found or f"thread safety: {len(commands)} units with annotations, every guarded variable under its lock")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
