"""The compiled libraries, as the linker left them: what cmake/flags.cmake asks for is there. SECURITY.md says so."""

import shutil
import subprocess
from pathlib import Path

import pytest

import dcoll

LIBRARIES = sorted(Path(dcoll.__file__).parent.glob("*.so"))

pytestmark = pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf: a part of binutils")


def readelf(option: str, library: Path) -> str:
    command = ["readelf", "-W", option, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={"LC_ALL": "C"}).stdout


def test_the_core_and_the_module_are_among_them() -> None:
    assert {path.name.partition(".")[0] for path in LIBRARIES} >= {"_C", "libdcoll"}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_tables_of_the_linker_are_read_only(library: Path) -> None:
    """Full RELRO: all symbols are bound when the library is loaded, and the tables are read-only from then on."""
    assert "GNU_RELRO" in readelf("--program-headers", library)
    assert "BIND_NOW" in readelf("--dynamic", library)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_no_memory_is_writable_and_executable(library: Path) -> None:
    """Neither the stack, nor a segment, nor code that the linker has to write to."""
    headers = readelf("--program-headers", library).splitlines()
    segments = [line.split() for line in headers if line.strip().startswith(("LOAD", "GNU_STACK"))]
    flags = {f"{words[0]} {''.join(words[6:-1])}" for words in segments}  # "LOAD RE"
    assert "GNU_STACK RW" in flags, flags
    assert not [one for one in flags if "W" in one.split()[1] and "E" in one.split()[1]], flags
    assert "TEXTREL" not in readelf("--dynamic", library)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_stacks_are_protected_and_functions_fortified(library: Path) -> None:
    imported = [line.split() for line in readelf("--dyn-syms", library).splitlines() if " UND " in line]
    names = {words[7].partition("@")[0] for words in imported if len(words) > 7}  # the first symbol has no name
    assert "__stack_chk_fail" in names
    if library.name.startswith("libdcoll.so"):  # the others call no function of which there is a fortified twin
        assert {name for name in names if name.endswith("_chk")} - {"__stack_chk_fail"}
