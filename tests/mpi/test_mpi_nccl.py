"""Collectives by NCCL, on the emulated device and by a library of ours that stands for NCCL (emulated_nccl.cc)."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import checks_device
import checks_device_pull
import checks_nccl
import checks_nccl_compression
import checks_optimizer
import checks_process_sets
import pytest
from mpirun import HERE, expect, launch, names_of_checks, run_checks

from dcoll import _C

pytestmark = pytest.mark.mpi

LAYOUTS = [
    (2, ()),
    (3, (("DCOLL_GPU_ENGINE", "nccl"),)),
    (3, (("DCOLL_TRANSPORT", "mpi"),)),
    (3, (("DCOLL_NODES", "0,0,1"),)),
]


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = Path(_C.__file__).parent
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    made = tmp_path_factory.mktemp("nccl") / "libnccl.so.2"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread"]
    command += [f"-I{HERE.parents[1] / 'csrc'}", str(HERE / "emulated_nccl.cc"), "-o", str(made)]
    subprocess.run([*command, f"-L{package}", f"-Wl,-rpath,{package}", "-ldcoll"], check=True)
    return made


def on_emulated(nccl: Path, *more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return ("DCOLL_DEVICE", "emulated"), ("DCOLL_NCCL", str(nccl)), *more


@pytest.mark.parametrize("check", names_of_checks(checks_nccl))
@pytest.mark.parametrize(("n", "env"), LAYOUTS, ids=str)
def test_nccl(nccl: Path, n: int, env: tuple[tuple[str, str], ...], check: str) -> None:
    expect(run_checks("checks_nccl", n, on_emulated(nccl, *env)), check)


@pytest.mark.parametrize("check", names_of_checks(checks_nccl_compression))
@pytest.mark.parametrize(("n", "env"), [*LAYOUTS, (2, (("DCOLL_COMPRESS_LOCAL", "1"),))], ids=str)
def test_16_bits(nccl: Path, n: int, env: tuple[tuple[str, str], ...], check: str) -> None:
    expect(run_checks("checks_nccl_compression", n, on_emulated(nccl, *env)), check)


@pytest.mark.parametrize("check", names_of_checks(checks_device_pull))
@pytest.mark.parametrize(("n", "env"), [LAYOUTS[1], LAYOUTS[3]], ids=str)
def test_pulls(nccl: Path, n: int, env: tuple[tuple[str, str], ...], check: str) -> None:
    expect(run_checks("checks_device_pull", n, on_emulated(nccl, ("CHECKS_WAY", "NCCL"), *env)), check)


OF_DEVICES_TOO = [
    pytest.param(module.__name__, check, id=f"{module.__name__}-{check}")
    for module in (checks_device, checks_optimizer, checks_process_sets)
    for check in names_of_checks(module)
]


@pytest.mark.parametrize(("module", "check"), OF_DEVICES_TOO)
def test_of_devices_too(nccl: Path, module: str, check: str) -> None:
    expect(run_checks(module, 3, on_emulated(nccl)), check)


def job(nccl: Path, program: str, n: int = 3, **env: str) -> str:
    settings = dict(on_emulated(nccl)) | {"DCOLL_LOG_LEVEL": "info", "DCOLL_TIMEOUT": "60"} | env
    done = launch(n, "-c", "import torch, dcoll as hvd\nfrom dcoll import _C\n" + program, preloaded=True, **settings)
    assert done.returncode == 0, done.text
    return done.text


def test_a_library_that_comes_late(nccl: Path) -> None:
    """Who has asked for it in vain finds it later, as when torch is imported by then."""
    text = job(
        nccl,
        f"""
import os
os.environ["DCOLL_NCCL"] = "/none/libnccl.so"
assert hvd.nccl_built() == 0
os.environ["DCOLL_NCCL"] = "{nccl}"
hvd.init()
hvd.broadcast_(torch.ones(10), 0)
""",
    )
    assert "collectives on GPUs use NCCL" in text, text


REDUCES = """
import time
hvd.init()
begin = time.monotonic()
for _ in range(3):
    one = torch.ones(10)
    hvd.allreduce_(one, op=hvd.Sum)
    assert (one == hvd.size()).all()
    hvd.broadcast_(one, 1)
print("went on", hvd.rank(), time.monotonic() - begin < 10)
"""


@pytest.mark.parametrize(
    ("before", "env", "why"),
    [
        ("", {"DCOLL_NCCL": "/none/libnccl.so"}, "rank 0: no NCCL: /none/libnccl.so: cannot open shared object file"),
        ("_C.place_emulated('one')", {}, "ranks 0, 1 share a GPU, which NCCL refuses"),
        ("", {"CHECKS_NCCL": "init 2"}, "rank 2: emulated:0: ncclCommInitRankConfig failed: unhandled system error"),
        ("", {"CHECKS_NCCL": "begun 2"}, "rank 2: emulated:0: ncclCommInitRankConfig failed: unhandled system error"),
        ("", {"CHECKS_NCCL": "lost 2"}, "rank 2: emulated:0: NCCL failed: unhandled system error"),
        (
            "",
            {"CHECKS_NCCL": "never 2", "DCOLL_TIMEOUT": "2.5"},
            r"rank \d: NCCL's ranks have not met within 2.5 s \(DCOLL_TIMEOUT\)",
        ),
    ],
)
def test_ranks_that_do_without_it(nccl: Path, before: str, env: dict[str, str], why: str) -> None:
    """They say why, once, and go on; a failed beginning of one rank too, of which the others hear at once. Where it is
    demanded it is an error, on every rank."""
    text = job(nccl, before + REDUCES, **env)
    assert len(re.findall(f"collectives on GPUs do not use NCCL: {why}", text)) == 1, text
    assert len(re.findall(r"went on \d True", text)) == 3, text
    assert text.count("what began in vain has been aborted") == ("begun 2" in env.values()), text
    demanding = f"try:{REDUCES}".replace("\n", "\n    ") + "\nexcept hvd.DcollError as e:\n    print('got', e)\n"
    text = job(nccl, f"{before}\n{demanding}", DCOLL_GPU_ENGINE="nccl", **env)
    assert len(re.findall(f"DCOLL_GPU_ENGINE=nccl, but {why}", text)) >= 3, text
    assert "went on" not in text


CALLS_BY_HOST = {
    "nccl": """
_C.EMULATED_DEVICE += hvd.rank() == 1
for _ in range(3):
    hvd.broadcast_(torch.ones(10), 0)
""",
    "dcoll": """
_C.share_emulated(hvd.rank() != 1)
for _ in range(3):
    hvd.allreduce_(torch.ones(5_000_000))
""",
}


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ("nccl", "the tensor is on emulated:0, and NCCL began"),
        ("dcoll", "its memory cannot be shown to other processes"),
    ],
)
def test_that_single_calls_go_by_the_host_is_told_once(nccl: Path, engine: str, why: str) -> None:
    """By the rank that is the reason: its tensor is on another GPU than before, or there is no room to show it."""
    text = job(nccl, f"hvd.init()\nhvd.broadcast_(torch.ones(10), 0)\n{CALLS_BY_HOST[engine]}", DCOLL_GPU_ENGINE=engine)
    told = re.findall(r"warning rank (\d).*a collective of tensors on devices goes through host memory.*: (.*)", text)
    assert [(rank, words[: len(why)]) for rank, words in told] == [("1", why)], text


@pytest.mark.parametrize("shows", [True, False])
def test_how_memory_is_opened_is_told_once(nccl: Path, shows: bool) -> None:
    """Or why it is not, by the rank that is the reason."""
    calls = (
        f"hvd.init()\n_C.share_emulated({shows} or hvd.rank() != 1)\nfor _ in range(2): hvd.allreduce_(torch.ones(9))"
    )
    text = job(nccl, calls, DCOLL_GPU_ENGINE="dcoll")
    way = (
        "collectives of tensors on devices stay there, in memory that the ranks have opened of each other by file descr"
    )
    why = (
        r"warning rank 1.*collectives of tensors on devices go through host memory from now on: emulated:0: its memory "
        "cannot be shown to other processes: emulated:0: shows no memory, as a test has asked for"
    )
    assert (text.count(way), len(re.findall(why, text))) == ((1, 0) if shows else (0, 1)), text


def test_a_gpu_without_kernels(nccl: Path) -> None:
    """Of one rank: what would be scaled there goes another way on all of them, by the host, and the rest by NCCL."""
    text = job(
        nccl,
        """
hvd.init()
_C.let_emulated_compute(hvd.rank() != 1)
for op, want in [(hvd.Sum, 4.5), (hvd.Average, 1.5), (hvd.Sum, 4.5)]:
    one = torch.ones(10)
    hvd.allreduce_(one, op=op, postscale_factor=1.5)
    assert (one == want).all(), one
    hvd.allreduce_(one, op=hvd.Sum)
    assert (one == 3 * want).all(), one
    hvd.allreduce_(one, op=hvd.Sum, compression=hvd.Compression.bf16)
    assert (one == 9 * want).all(), one
print("went on", hvd.rank())
""",
        DCOLL_COMPRESS_LOCAL="1",
    )
    assert text.count("went on") == 3, text
    assert "collectives on GPUs use NCCL" in text, text
    assert "it has no kernels, as a test has asked for" in text, text


def test_what_is_timed_of_both_ways(nccl: Path) -> None:
    """All of a call: that a rank comes late costs both ways the same."""
    text = job(
        nccl,
        """
import time
hvd.init()
one = hvd.empty(40_000).fill_(1)
for _ in range(9):
    if hvd.rank() == 1:
        time.sleep(0.06)
    hvd.allreduce_(one)
""",
        n=2,
        CHECKS_NCCL_MS="20",
    )
    assert "go in memory that ranks have opened" in text, text


@pytest.mark.parametrize("fails", ["call 1 4", "late 1 4"])
def test_a_call_that_fails(nccl: Path, fails: str) -> None:
    """Its rank, device and NCCL's words on every rank, also on those in whose streams a kernel waits for it."""
    text = job(nccl, """
hvd.init()
try:
    for _ in range(10):
        hvd.broadcast_(torch.ones(10), 0)
except hvd.DcollError as e:
    print("got", type(e).__name__, e, "end")
""", CHECKS_NCCL=fails)  # fmt: skip
    assert text.count("got") == 3, text
    want = {"call": "ncclBroadcast failed: unhandled system error", "late": "NCCL failed: remote error"}[fails[:4]]
    assert text.count(f"emulated:0: {want} (on rank 1)") >= 3, text


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_a_device_that_fails_behind_a_call(nccl: Path, compression: str) -> None:
    """Its stream never ends by itself: NCCL's part in it waits for other ranks. It is aborted before anybody waits."""
    text = job(nccl, f"""
hvd.init()
try:
    for _ in range(10):
        x = torch.ones(10)
        hvd.allreduce_(x, op=hvd.Sum, postscale_factor=0.5, compression=hvd.Compression.{compression})
except hvd.DcollError as e:
    print("got", e, "end")
""", CHECKS_NCCL="break 1 4", DCOLL_GPU_ENGINE="nccl", DCOLL_COMPRESS_LOCAL="1")  # fmt: skip
    assert text.count("emulated:0: a copy or a kernel failed, as a test has asked for (on rank 1)") >= 3, text


CAST = "allreduce_(torch.ones(10), compression=hvd.Compression.fp16)"


@pytest.mark.parametrize("call", ["broadcast_(torch.ones(10), 0)", CAST])
@pytest.mark.parametrize(("fate", "error"), [("kill", "PeerError"), ("hang", "TimeoutError")])
def test_a_rank_that_does_not_come(nccl: Path, fate: str, error: str, call: str) -> None:
    """It has agreed on the call, and dies in it or waits for ever."""
    program = f"""
import time
hvd.init()
begin = time.monotonic()
try:
    for _ in range(10):
        hvd.{call}
except hvd.DcollError as e:
    print("got", type(e).__name__, time.monotonic() - begin < 15)
"""
    done = launch(3, "-c", "import torch, dcoll as hvd\n" + program, preloaded=True, options=("--continuous",),
                  **dict(on_emulated(nccl)), DCOLL_TIMEOUT="5", CHECKS_NCCL=f"{fate} 1 4",
                  DCOLL_COMPRESS_LOCAL="1")  # fmt: skip
    assert done.stdout.count(f"got {error} True") == (2 if fate == "kill" else 3), done.text


def test_a_kernel_that_waits_leaves_its_core_to_others(nccl: Path) -> None:
    """Those it waits for may need it. Rank 1 has agreed on the call, and never exchanges anything. A thread that spins
    takes all there is of a core or, where others want it too, is taken off it about as often as others sleep."""
    program = """
import resource, time
hvd.init()
def used():
    now = resource.getrusage(resource.RUSAGE_SELF)
    return time.monotonic(), now.ru_utime + now.ru_stime, now.ru_nivcsw, now.ru_nvcsw
begin = used()
try:
    for _ in range(10):
        hvd.alltoall(torch.ones(3), splits=[1, 1, 1])
except hvd.DcollError:
    took, ran, was_taken_off, slept = (now - then for now, then in zip(used(), begin))
    rests = ran < took / 2 and 4 * was_taken_off < slept
    print("rests" if rests else "spins", hvd.rank(), took, ran, was_taken_off, slept)
"""
    done = launch(3, "-c", "import torch, dcoll as hvd\n" + program, preloaded=True, options=("--continuous",),
                  **dict(on_emulated(nccl)), DCOLL_TIMEOUT="5", CHECKS_NCCL="hang 1 4")  # fmt: skip
    assert done.stdout.count("rests") == 3, done.text
