"""The engines bench/peers.py knows: what each is, whether it is here, and how its job is started.

Peers that need their own MPI or their own packages live in virtual environments that `make bench-peers` makes.
"""

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arguments import MPI_DTYPES

from dcoll.runner.command_lines import Mpirun, find_mpirun
from dcoll.runner.hosts import UsageError
from interleaved.coordinator import Launch

HERE = Path(__file__).resolve().parent
ALL_DTYPES = (*MPI_DTYPES, "float16", "bfloat16")


class Unavailable(Exception):
    """The engine cannot run here; the text says why and what to do."""


@dataclass(frozen=True)
class Setup:
    """What all jobs of a run have in common."""

    ranks: int
    cpus: tuple[int, ...]  # one per rank; empty: no pinning
    dtype: str
    max_bytes: int
    cache_bytes: int  # 0: the same buffer again and again
    socket: str
    venvs: Path
    build: Path


@dataclass(frozen=True)
class Engine:
    """A job, and the columns that it fills: column -> variant of the adapter."""

    name: str
    adapter: str
    columns: dict[str, str]
    title: str
    dtypes: tuple[str, ...]
    launch: Callable[["Engine", Setup], Launch]
    is_peer: bool = True


def worker(engine: Engine, setup: Setup, python: str, library: str = "") -> list[str]:
    options = {
        "dtype": setup.dtype, "max_bytes": setup.max_bytes, "cache_bytes": setup.cache_bytes, "library": library,
    }  # fmt: skip
    return worker_command(python, setup.socket, engine.name, engine.adapter, setup.ranks, setup.cpus, options)


def worker_command(
    python: str, socket: str, job: str, adapter: str, ranks: int, cpus: tuple[int, ...], options: dict[str, Any]
) -> list[str]:
    named = {"socket": socket, "job": job, "adapter": adapter, "ranks": str(ranks), "cpus": ",".join(map(str, cpus))}
    arguments = [f"--{name}={value}" for name, value in named.items()]
    return [python, str(HERE / "worker.py"), *arguments, f"--options={json.dumps(options)}"]


def environment(**more: str) -> dict[str, str]:
    """Ours, without what another launcher may have left in it, one thread per rank."""
    foreign = ("OMPI_COMM_", "PMI_", "PMIX_", "BENCH_")
    mine = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    return mine | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | more


def venv_python(setup: Setup, name: str) -> Path:
    python = setup.venvs / name / "bin" / "python"
    if not python.exists():
        raise Unavailable(f"no virtual environment {setup.venvs / name}: `make bench-peers` makes it")
    return python


def by_itself(command: list[str], ranks: int, shared_fd: int = -1, **more: str) -> Launch:
    """One process per rank, without a launcher."""
    environments = [environment(BENCH_RANK=str(rank), **more) for rank in range(ranks)]
    return Launch([command] * ranks, environments, shared_fd)


@functools.cache
def mpirun_at_hand() -> Mpirun:
    """dcoll's choice."""
    try:
        return find_mpirun()
    except UsageError as error:
        raise Unavailable(str(error)) from None


def with_mpi_at_hand(engine: Engine, setup: Setup) -> Launch:
    return by_mpirun(worker(engine, setup, sys.executable), setup.ranks)


def by_mpirun(command: list[str], ranks: int) -> Launch:
    mpirun = mpirun_at_hand()
    options = ["--bind-to", "none"] if mpirun.kind == "openmpi" else []
    more = {
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }  # fmt: skip
    return Launch([[mpirun.path, *options, "-n", str(ranks), *command]], [environment(**more)])


def with_mpich(engine: Engine, setup: Setup) -> Launch:
    python = venv_python(setup, "mpich")
    job = [str(python.parent / "mpiexec"), "-n", str(setup.ranks), *worker(engine, setup, str(python))]
    return Launch([job], [environment()])


def with_intel_mpi(engine: Engine, setup: Setup) -> Launch:
    python = venv_python(setup, "intelmpi")
    root = python.parents[1]
    job = [str(root / "bin" / "mpiexec.hydra"), "-n", str(setup.ranks), *worker(engine, setup, str(python))]
    return Launch([job], [environment(**intel_environment(root, setup), I_MPI_FABRICS="shm")])


def intel_environment(root: Path, setup: Setup) -> dict[str, str]:
    path = os.pathsep.join([str(root / "bin"), os.environ.get("PATH", "")])
    found = {"I_MPI_ROOT": str(root), "I_MPI_PIN": "0", "LD_LIBRARY_PATH": str(root / "lib"), "PATH": path}
    # Who waits gives its core to others by sched_yield(): what Intel MPI does where it finds fewer cores by itself.
    return found if setup.cpus else found | {"I_MPI_THREAD_YIELD": "2"}


def with_gloo(engine: Engine, setup: Setup) -> Launch:
    return by_itself(worker(engine, setup, sys.executable), setup.ranks)


def with_deepspeed(engine: Engine, setup: Setup) -> Launch:
    python = venv_python(setup, "deepspeed")
    # The operator is compiled once, by `make bench-peers`. It names its shared memory by this address and port.
    more = {"TORCH_EXTENSIONS_DIR": str(python.parents[1] / "ops"), "DS_ACCELERATOR": "cpu",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid()),
            "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])}  # fmt: skip
    launch = by_itself(worker(engine, setup, str(python)), setup.ranks, **more)
    segment = f"deepspeed_allreduce_buffer_{os.getuid()}_{more['MASTER_ADDR']}_{more['MASTER_PORT']}"
    return replace(launch, leaves=tuple(Path(f"/dev/shm/{segment}_{rank}") for rank in range(setup.ranks)))


def with_oneccl(engine: Engine, setup: Setup) -> Launch:
    python = venv_python(setup, "oneccl")
    root = python.parents[1]
    options = ["-O2", "-std=c++17", f"-I{root}/include"]
    libraries = [f"-L{root}/lib", "-lccl", f"-Wl,-rpath,{root}/lib"]
    library = compiled(setup, HERE / "oneccl.cc", os.environ.get("CXX", "c++"), options, libraries)
    # Its collectives run on the caller's thread, which is pinned; a second thread on the same core only slows them. But
    # that thread never yields: with more ranks than cores a call would last as long as the system's time slices do.
    waiting = {"CCL_WORKER_OFFLOAD": "0"} if setup.cpus else {"CCL_WORKER_OFFLOAD": "1", "CCL_YIELD": "sched_yield"}
    more = {"CCL_ROOT": str(root), "CCL_LOG_LEVEL": "error", **waiting}
    job = [str(root / "bin" / "mpiexec.hydra"), "-n", str(setup.ranks), *worker(engine, setup, str(python), library)]
    return Launch([job], [environment(**intel_environment(root, setup), **more)])


def with_bare(engine: Engine, setup: Setup) -> Launch:
    library = compiled(setup, HERE / "bare.c", os.environ.get("CC", "cc"), ["-O3", "-march=native"], [])
    fd = os.memfd_create("bench-bare")  # anonymous: nothing is left behind, however the run ends
    return by_itself(worker(engine, setup, sys.executable, library), setup.ranks, fd, BENCH_SHARED_FD=str(fd))


def compiled(setup: Setup, source: Path, compiler: str, options: list[str], libraries: list[str]) -> str:
    """The shared library of one source file, compiled unless that was done before with the same command."""
    command = [compiler, *options, "-shared", "-fPIC", str(source), *libraries]
    digest = hashlib.sha256(repr(command).encode() + source.read_bytes()).hexdigest()[:16]
    target = setup.build / f"{source.stem}-{digest}.so"
    if target.exists():
        return str(target)
    setup.build.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True, timeout=120, check=True)
    except OSError as error:
        raise Unavailable(f"{source.name} needs a compiler: {error}") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[0]
        raise Unavailable(f"{source.name} does not compile: {last}") from None
    partial.rename(target)
    return str(target)


PLAIN = "plain"
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("dcoll", "adapters.Dcoll", {"dcoll mapped": "mapped", "dcoll plain": PLAIN}, "dcoll.allreduce_",
               ALL_DTYPES, with_mpi_at_hand, is_peer=False),
        Engine("mpi4py", "adapters.Mpi4py", {"mpi4py": PLAIN}, "mpi4py over the MPI at hand", MPI_DTYPES,
               with_mpi_at_hand),
        Engine("intelmpi", "adapters.Mpi4py", {"intelmpi": PLAIN}, "mpi4py over Intel MPI", MPI_DTYPES, with_intel_mpi),
        Engine("mpich", "adapters.Mpi4py", {"mpich": PLAIN}, "mpi4py over MPICH", MPI_DTYPES, with_mpich),
        Engine("gloo", "adapters.Gloo", {"gloo": PLAIN}, "torch.distributed over Gloo", ALL_DTYPES, with_gloo),
        Engine("deepspeed", "adapters.DeepSpeed", {"deepspeed": PLAIN}, "DeepSpeed's shared-memory operator",
               ("float32", "float16", "bfloat16"), with_deepspeed),
        Engine("oneccl", "adapters.OneCcl", {"oneccl": PLAIN}, "Intel oneCCL", ALL_DTYPES, with_oneccl),
        Engine("bare", "adapters.Bare", {"memcpy": "memcpy", "bare": "bare"}, "limits of the hardware", MPI_DTYPES,
               with_bare, is_peer=False),
    )
}  # fmt: skip
