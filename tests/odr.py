"""Whether equal names are equal things in all of csrc: python tests/odr.py build/asan (which `make sanitize` makes).

Two types or functions of one name are one to the linker, whichever it meets first; in different libraries nothing else
would notice. All is compiled once more, at -O0 and for link-time optimization, and linked into one, the core, the
bindings and the plugins: then g++ compares every type and every definition of a name with the others. It is compiled in
the units of that build, of eight files each: two things of one name in the same unit have been an error there.
test_layout.py reads the sources for the same, which takes no time and sees less: no members, no templates' instances.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIBRARIES = re.compile(r"CMakeFiles/(dcoll_core|_C|dcoll_mpi|dcoll_ucx)\.dir/")
LTO = ["-O0", "-flto", "-fno-fat-lto-objects", "-w"]
# What is linked stays in the compiler's own form: names are compared, and no code is made.
LINK = ["-O0", "-flto", "-r", "-flinker-output=rel", "-fPIC", "-Werror=odr", "-Werror=lto-type-mismatch"]


def compile_to(target: Path, command: list[str], folder: Path) -> Path:
    """The compiler's own command with another output."""
    at = command.index("-o")
    left_out = ("-O2", "-O3", "-flto", "-Werror")
    kept = [w for w in command[:at] + command[at + 2 :] if w not in left_out and not w.startswith("-fsanitize")]
    subprocess.run([*kept, *LTO, "-o", str(target)], cwd=folder, check=True)
    return target


def link(objects: list[Path], compiler: str) -> str:
    """What it finds; empty: nothing."""
    with tempfile.TemporaryDirectory() as folder:
        command = [compiler, *LINK, *map(str, objects), "-o", f"{folder}/all.o"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr


def prove(folder: Path, compiler: str) -> None:
    """That it finds a type that is two."""
    objects = []
    for number, member in enumerate(("int", "double")):
        source = folder / f"prove{number}.cc"
        source.write_text(
            f"struct Twice {{ {member} x; ~Twice(); }}; Twice* made{number}() {{ return new Twice{{}}; }}\n"
        )
        command = [compiler, "-fPIC", "-c", str(source), "-o", ""]
        objects.append(compile_to(folder / f"prove{number}.o", command, folder))
    assert "Twice" in link(objects, compiler), "g++ no longer finds a type that is two"


def main() -> int:
    build = Path(sys.argv[1]).resolve()
    entries = json.loads((build / "compile_commands.json").read_text())
    commands = [shlex.split(entry["command"]) for entry in entries if LIBRARIES.search(entry["command"])]
    compiler = next(word for word in commands[0] if Path(word).name != "ccache")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prove(folder, compiler)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            jobs = [
                pool.submit(compile_to, folder / f"{number}.o", command, build)
                for number, command in enumerate(commands)
            ]
            objects = [job.result() for job in jobs]
        found = link(objects, compiler)
    print(found or f"{len(objects)} units: every name is one thing")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
