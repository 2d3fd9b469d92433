"""Starting: with mpi4py before or after, with a wrong launcher, on one rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpirun import find_mpirun, is_open_mpi, launch

from dcoll.doctor import machine

pytestmark = pytest.mark.mpi

SUM = "import numpy; assert hvd.allreduce(numpy.ones(3), op=hvd.Sum).tolist() == [float(hvd.size())] * 3; "


def has_mpi4py() -> bool:
    code = "from mpi4py import MPI"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    "code",
    [
        "from mpi4py import MPI; import dcoll as hvd; hvd.init(); ",
        "import dcoll as hvd; hvd.init(); from mpi4py import MPI; ",
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; import dcoll as hvd; hvd.init(); ",
    ],
    ids=["before", "after", "uninitialised"],
)
def test_mpi4py(code: str) -> None:
    if not has_mpi4py():
        pytest.skip("needs mpi4py: it is not installed")
    check = "assert MPI.COMM_WORLD.allreduce(hvd.rank()) == 1 and hvd.size() == 2; print('fine')"
    done = launch(2, "-c", code + SUM + check)
    assert done.returncode == 0, done.text
    assert done.stdout.count("fine") == 2, done.text


def test_mpi4py_without_mpirun_joins_its_world() -> None:
    if not has_mpi4py():
        pytest.skip("needs mpi4py: it is not installed")
    code = "from mpi4py import MPI; import dcoll as hvd; hvd.init(); " + SUM + "assert hvd.mpi_enabled(); print('fine')"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_COMM", "PMI"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "fine\n", done.stderr
    assert done.returncode == 0, done.stderr


def test_one_rank_under_mpirun() -> None:
    done = launch(1, "-c", "import dcoll as hvd; hvd.init(); " + SUM + "print(hvd.size())")
    assert done.returncode == 0, done.text
    assert done.stdout.strip() == "1"


def test_it_is_said_which_copy_large_tensors_take() -> None:
    """By every rank, as the kernel has it between processes of this user: ranks as threads may always read."""
    code = "import dcoll as hvd, numpy; hvd.init(); rows = hvd.allgather(numpy.full(300_007, float(hvd.rank()))); "
    done = launch(2, "-c", code + "assert rows.sum() == 300_007", DCOLL_LOG_LEVEL="info")
    assert done.returncode == 0, done.text
    by_kernel = done.stderr.count("large tensors of peers are read by the kernel (process_vm_readv), in one copy")
    by_slots = done.stderr.count("all tensors of peers but mapped ones are read through slots, in two copies")
    if (answer := machine.read_a_sibling()) != "read":
        assert (by_kernel, by_slots) == (0, 2), done.text
        pytest.skip(f"needs ptrace: {answer}")
    assert (by_kernel, by_slots) == (2, 0), done.text


DECIMAL_COMMA = """if True:
    import locale
    import os
    import numpy
    import dcoll as hvd
    from dcoll.job import world
    first = (os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]) == "0"
    sources = []
    for name in ("de_DE.UTF-8", "C"):
        if first:
            locale.setlocale(locale.LC_NUMERIC, name)
        hvd.init()
        assert hvd.allreduce(numpy.ones(300_007), op=hvd.Sum).sum() == 2 * 300_007
        sources.append(world.communicator().constants_source())
        hvd.shutdown()
    print(*sources, sep="\\n", flush=True)
"""


def test_ranks_may_have_different_locales(german: Path, tmp_path: Path) -> None:
    """They compare settings, and rank 0 keeps numbers in a file, which it reads when it has another locale."""
    folder = tmp_path / "cache"
    env = {"LOCPATH": str(german), "DCOLL_CACHE_DIR": str(folder), "DCOLL_CALIBRATE": "auto", "DCOLL_NODES": "0,1"}
    done = launch(2, "-c", DECIMAL_COMMA, DCOLL_FIRST_BUCKET_MB="0.5", **env)
    assert done.returncode == 0, done.text
    sources = sorted(done.stdout.splitlines())
    assert [source.startswith(str(folder)) for source in sources] == [True] * 2 + [False] * 2, done.text
    assert [source.startswith("measured in ") for source in sources[2:]] == [True] * 2, done.text


def test_arenas_of_all_local_ranks_fit_the_address_space() -> None:
    """Of machines with terabytes of memory each rank would take as much by default, of which few fit."""
    code = "import dcoll as hvd; from dcoll.job import world; hvd.init(); " + SUM
    code += "print(*{way for way in world.communicator().transports if way != 'self'})"
    done = launch(3, "-c", code, DCOLL_ARENA_MB=str(1 << 26))  # 64 TiB
    assert done.returncode == 0, done.text
    assert done.stdout.split() == ["shm"] * 3, done.text


def test_what_one_host_alone_refuses_is_told_to_all() -> None:
    code = """if True:
        import os, dcoll as hvd
        second = (os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]) == "1"
        os.environ["DCOLL_TCP_CONGESTION"] = "nope" if second else "auto"
        try:
            hvd.init()
        except hvd.ArgumentError as error:
            print(error)
        os.environ["DCOLL_TCP_CONGESTION"] = "auto"
        hvd.init()
    """
    done = launch(2, "-c", code + "    " + SUM + "print('fine')", DCOLL_TRANSPORT="mpi")
    assert done.returncode == 0, done.text
    assert done.stdout.count("rank 1: DCOLL_TCP_CONGESTION='nope' is not possible here") == 2, done.text
    assert done.stdout.count("fine") == 2, done.text


def test_a_launcher_that_mpi_does_not_know_is_refused() -> None:
    """As when another MPI's mpiexec started the ranks: each would be a job of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_COMM", "PMI", "SLURM"))}
    done = subprocess.run(
        [sys.executable, "-c", "import dcoll; dcoll.init()"],
        env=env | {"PMI_SIZE": "2", "PMI_RANK": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "PMI_SIZE=2" in done.stderr
    assert "sees 1" in done.stderr or "could not be loaded" in done.stderr


SETTINGS = {"DCOLL_CALIBRATE": ("auto", "off"), "DCOLL_SLICE_KB": ("32", "16"), "DCOLL_ALGO": ("ring", "tree")}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_differ_between_ranks(name: str) -> None:
    """Of those that decide what ranks send each other."""
    code = f"""
import os
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
os.environ["{name}"] = {SETTINGS[name]}[rank]
import dcoll
dcoll.init()
"""
    done = launch(2, "-c", code, timeout=40, DCOLL_NODES="0,1")
    assert done.returncode != 0
    assert done.stderr.count("ArgumentError: The ranks are configured differently: rank 0 has ") == 2, done.text
    for value in SETTINGS[name]:
        assert f"{name}={value} " in done.stderr, done.text


FABRICS = ("/sys/class/infiniband", "/sys/class/cxi")
BTL = """
import ctypes
get = ctypes.CDLL(None).getenv
get.restype = ctypes.c_char_p
print("btl", get(b"OMPI_MCA_btl"))
"""


def may_leave_out_libfabric() -> bool:
    """Not what nobody can use, where Open MPI's own file is where its library says."""
    settings = Path(find_mpirun()).resolve().parent.parent / "etc" / "openmpi-mca-params.conf"
    return settings.exists() and not any(Path(fabric).is_dir() and os.listdir(fabric) for fabric in FABRICS)


@pytest.mark.parametrize(
    ("file", "variable", "wanted"),
    [
        ("", "", b"^ofi"),
        ("# btl = sm,self\nbtl_tcp_if_include = lo\n", "", b"^ofi"),
        ("pml = ob1\n btl=sm,self\n", "", None),
        ("", "sm,self", b"sm,self"),
    ],
    ids=["nothing", "another", "file", "variable"],
)
def test_open_mpi_does_without_libfabric(file: str, variable: str, wanted: bytes | None, tmp_path: Path) -> None:
    """To close it takes a second of each start. Not where the user has chosen."""
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi" / "mca-params.conf").write_text(file)
    env = {"HOME": str(tmp_path)} | ({"OMPI_MCA_btl": variable} if variable else {})
    unset = "" if variable else "import os; os.environ.pop('OMPI_MCA_btl', None); "  # mpirun makes it of the file
    done = launch(2, "-c", f"{unset}import dcoll as hvd; hvd.init(); {SUM}{BTL}", **env)
    assert done.returncode == 0, done.text
    if wanted == b"^ofi" and not (is_open_mpi() and may_leave_out_libfabric()):
        wanted = None
    assert done.stdout.splitlines() == [f"btl {wanted!r}"] * 2
