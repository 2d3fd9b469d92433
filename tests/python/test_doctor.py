"""python -m dcoll doctor: each trouble is found, and the advice fits. tests/mpi runs it in real jobs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dcoll
from dcoll.doctor import Level, finding, job, machine
from dcoll.doctor.job import Seen
from dcoll.runner import command_lines

PACKAGE = Path(dcoll.__file__).parent


def fake_answers(monkeypatch: pytest.MonkeyPatch, *answers: tuple[str, int, str]) -> None:
    """machine.ask() gives the first answer whose key is part of the command."""

    def ask(*command: str) -> tuple[int, str]:
        text = " ".join(command)
        return next(((status, said) for key, status, said in answers if key in text), (0, ""))

    monkeypatch.setattr(machine, "ask", ask)


def test_this_machine_can_run_dcoll() -> None:
    findings = machine.examine()
    assert [one for one in findings if one.level is Level.BROKEN] == []
    assert {one.what for one in findings} >= {"Python", "compiled core", "MPI", "launcher", "shared memory", "cores"}


def test_what_is_not_fine_has_advice() -> None:
    text = finding.report(
        [finding.fine("a", "b"), finding.note("c", "d", "do e"), finding.broken("f", "g", "do h " * 40)]
    )
    assert "    ok  a: b\n" in text
    assert "  note  c: d\n        -> do e\n" in text
    assert "BROKEN  f: g\n        -> do h" in text
    assert text.endswith("1 broken, 1 note.")
    assert max(len(line) for line in text.splitlines()) <= 112


def test_a_missing_core_is_told_from_one_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_answers(monkeypatch, ("import _C", 1, "ImportError: libdcoll.so: undefined symbol: x"))
    assert "undefined symbol: x" in machine.core().found
    monkeypatch.setattr(machine, "PACKAGE", tmp_path)
    assert "not built" in machine.core().found


def test_without_the_core_import_points_at_the_doctor_who_still_works(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "dcoll", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    # An editable installation would find the module that is missing here.
    (tmp_path / "dcoll" / "_C.py").write_text("raise ImportError('libdcoll.so: cannot open shared object file')\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)

    failed = run("-c", "import dcoll")
    assert failed.returncode == 1
    assert "compiled core cannot be loaded (libdcoll.so: cannot open" in failed.stderr
    assert "python -m dcoll doctor" in failed.stderr
    told = run("-m", "dcoll", "doctor")
    assert told.returncode == 1
    assert "BROKEN  compiled core: not built" in told.stdout


@pytest.mark.parametrize(
    ("launcher", "library", "level"),
    [
        ("mpirun (Open MPI) 5.0.11", "Open MPI v5.0.11 at x", Level.FINE),
        ("mpirun (Open MPI) 4.1.6", "Open MPI v5.0.11 at x", Level.BROKEN),
        ("HYDRA build details:", "Open MPI v5.0.11 at x", Level.BROKEN),
        ("HYDRA build details:", "MPICH Version: 5.0.2 at x", Level.FINE),
        ("mpirun (Open MPI) 5.0.11", "MPICH Version: 5.0.2 at x", Level.BROKEN),
    ],
)
def test_a_launcher_of_another_mpi_is_found(
    launcher: str, library: str, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\necho '{launcher}'\n")
    mpirun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(command_lines, "BUILT_WITH", tmp_path / "missing")
    monkeypatch.setattr(machine, "PLUGIN", mpirun)  # any file: there is a plugin
    fake_answers(monkeypatch, ("load_mpi", 0, library))
    assert machine.launcher().level is level


def test_without_mpi_no_launcher_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_lines.shutil, "which", lambda program, path: None)
    monkeypatch.setattr(machine, "PLUGIN", tmp_path)
    assert machine.launcher().level is Level.BROKEN
    monkeypatch.setattr(machine, "PLUGIN", tmp_path / "missing")
    assert machine.launcher().level is Level.FINE


def test_an_mpi_that_does_not_start_is_broken_and_none_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "PLUGIN", tmp_path)
    fake_answers(monkeypatch, ("load_mpi", 1, "Traceback\nOSError: libmpi.so.40: cannot open shared object file"))
    assert machine.mpi().level is Level.BROKEN
    assert machine.mpi().found == "OSError: libmpi.so.40: cannot open shared object file"
    monkeypatch.setattr(machine, "PLUGIN", tmp_path / "missing")
    assert machine.mpi().level is Level.NOTE


def test_mpi4py_with_another_library_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PLUGIN", tmp_path)
    theirs = ("mpi4py", 0, "Open MPI v5.0.11, package: x")
    fake_answers(monkeypatch, ("load_mpi", 0, "Open MPI v5.0.11, package: y at z"), theirs)
    assert machine.mpi4py().level is Level.FINE
    fake_answers(monkeypatch, ("load_mpi", 0, "MPICH Version: 5.0.2 at z"), theirs)
    assert machine.mpi4py().level is Level.BROKEN


def test_devices_without_kernels_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_answers(monkeypatch, ("cuda_built", 0, "False"), ("nvidia-smi", 0, "GPU 0: H200\nGPU 1: H200"))
    assert machine.cuda() == finding.note("CUDA", "kernels not built, 2 devices", machine.cuda().advice)
    fake_answers(monkeypatch, ("cuda_built", 0, "True"), ("nvidia-smi", 127, "not found"))
    assert machine.cuda() == finding.fine("CUDA", "kernels built, 0 devices")


def test_gpus_that_do_not_reach_each_other_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_answers(monkeypatch, ("can_device_access_peer", 0, "2;2.27.5;0 to 1, 1 to 0"))
    found = machine.between_gpus()
    assert found is not None
    assert found.level is Level.NOTE
    assert found.found == "torch sees 2, and brings NCCL 2.27.5; no access from 0 to 1, 1 to 0"
    fake_answers(monkeypatch, ("can_device_access_peer", 0, "2;2.27.5;"))
    assert machine.between_gpus() == finding.fine(
        "between GPUs", "torch sees 2, and brings NCCL 2.27.5; each reaches the others' memory"
    )
    for answer in ((0, "0;none;"), (1, "Traceback\nModuleNotFoundError: No module named 'torch'")):
        fake_answers(monkeypatch, ("can_device_access_peer", *answer))
        assert machine.between_gpus() is None


def test_memory_is_opened_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCOLL_DEVICE", "emulated")
    assert machine.opened_memory() == finding.fine(
        "GPU memory between processes", "one process opens what another has on the GPU (file descriptors)"
    )


@pytest.mark.parametrize("who", ["show", "open"])
def test_why_memory_is_not_opened_is_told(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCOLL_DEVICE", "emulated")
    program = f"_{who.upper()}_MEMORY"
    refuses = getattr(machine, program).replace("import _C\n", "import _C; _C.share_emulated(False)\n", 1)
    monkeypatch.setattr(machine, program, refuses)
    found = machine.opened_memory()
    assert found is not None
    assert found.level is Level.NOTE
    assert f"emulated:0: {who}s no memory, as a test has asked for" in found.found
    assert "through host memory" in found.advice


def test_what_is_told_of_memory_on_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = "cuda:0: cudaIpcOpenMemHandle failed: invalid device context (CUDA error 201)"
    for answer, level, text in (
        ((0, '[2, [], ["CUDA IPC"]]'), Level.FINE, "one process opens what another has on each GPU (CUDA IPC)"),
        ((0, f'[2, ["{refused}", "another"], []]'), Level.NOTE, f"{refused} (and 1 more)"),
        ((124, "no answer within 60 s"), Level.NOTE, "no answer within 60 s"),
        ((1, "Traceback\nRuntimeError: CUDA error"), Level.NOTE, "RuntimeError: CUDA error"),
    ):
        fake_answers(monkeypatch, ("open_device_memory", *answer))
        found = machine.opened_memory()
        assert found is not None
        assert (found.level, found.found) == (level, text)
    fake_answers(monkeypatch, ("open_device_memory", 0, "[0, [], []]"))
    assert machine.opened_memory() is None


def test_memory_is_not_opened_where_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_answers(monkeypatch, ("open_device_memory", 0, "[2, [], []]"), ("can_device_access_peer", 0, "2;2.27.5;"))
    assert [found.what for found in machine.gpus()] == ["between GPUs", "GPU memory between processes"]
    fake_answers(monkeypatch, ("open_device_memory", 0, "[2, [], []]"), ("can_device_access_peer", 0, "0;none;"))
    assert machine.gpus() == []


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("return 1;", "it says that it was built for CUDA"),
        ("return 0;", "it says that it does not"),
        ("", "it cannot tell"),
    ],
)
def test_mpi_is_asked_whether_it_takes_memory_of_gpus(
    answer: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, library = tmp_path / "mpi.c", tmp_path / "libmpi.so"
    function = f"int MPIX_Query_cuda_support(void) {{ {answer} }}" if answer else "int MPI_Init(void) { return 0; }"
    source.write_text(function + "\n")
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    asks = machine._ASK_MPI.replace("mpi.library_path", repr(str(library)))
    monkeypatch.setattr(machine, "_ASK_MPI", asks)
    found = machine.cuda_in_mpi()
    assert found is not None
    assert found.level is Level.FINE
    assert text in found.found


def test_an_mpi_that_is_not_there_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_answers(monkeypatch, ("MPIX_Query_cuda_support", 1, "OSError: libmpi.so.40: cannot open shared object file"))
    assert machine.cuda_in_mpi() is None
    monkeypatch.setattr(machine, "PLUGIN", tmp_path / "missing")
    fake_answers(monkeypatch, ("MPIX_Query_cuda_support", 0, "yes"))
    assert machine.cuda_in_mpi() is None


def seen(rank: int, node: int = 0, cpus: tuple[int, ...] = (0, 1), **interfaces: str) -> Seen:
    return Seen(rank, node, f"host{node}", frozenset(cpus), "dcoll 1, torch 2", interfaces)


def one(findings: list[finding.Finding], what: str) -> finding.Finding:
    return next(found for found in findings if found.what == what)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"PMIX_RANK": "0"}, True),
    ],
)
def test_a_job_is_told_from_a_process_of_its_own(env: dict[str, str], expected: bool) -> None:
    assert job.is_started(env) is expected


def test_affinity() -> None:
    assert job.affinity([seen(0, cpus=(0,)), seen(1, cpus=(1,))]).found == "each rank has its own core"
    assert job.affinity([seen(0), seen(1)]).level is Level.FINE
    assert "3 ranks on host0 share 2 CPUs" in job.affinity([seen(0), seen(1), seen(2)]).found
    same = job.affinity([seen(0, cpus=(0,)), seen(1, cpus=(1,)), seen(2, cpus=(1,)), seen(3, cpus=(2, 3))])
    assert same.level is Level.NOTE
    assert "rank 2 on host0 shares its CPUs [1]" in same.found


def test_versions_must_be_equal() -> None:
    other = Seen(2, 0, "host0", frozenset({1}), "dcoll 1, torch 3")
    found = job.versions([seen(0), seen(1), other])
    assert found.level is Level.BROKEN
    assert found.found == "dcoll 1, torch 2: ranks 0, 1; dcoll 1, torch 3: ranks 2"


def test_hosts_that_fall_into_groups_are_noted() -> None:
    here, there = seen(0), Seen(1, 1, "host0", frozenset({1}), "dcoll 1, torch 2")
    found = job.ranks([here, there], ["mpi"])
    assert found.level is Level.NOTE
    assert "2 groups share memory" in found.found


def test_networks() -> None:
    good = [seen(0, 0, eth0="10.0.0.1/24"), seen(1, 1, eth0="10.0.0.2/24")]
    assert job.network(good).level is Level.FINE
    assert "in common: 10.0.0.0/24" in job.network(good).found
    apart = [seen(0, 0, eth0="10.0.0.1/24"), seen(1, 1, eth0="10.0.1.2/24")]
    assert "no subnet in common" in job.network(apart).advice
    bridge = [
        seen(0, 0, eth0="10.0.0.1/24", docker0="172.17.0.1/16"),
        seen(1, 1, eth0="10.0.0.2/24", docker0="172.17.0.1/16"),
    ]
    assert "btl_tcp_if_exclude lo,docker0" in job.network(bridge).advice
    assert [found.what for found in job.compare(good, ["mpi"])] == ["job", "versions", "affinity", "network"]
    assert [found.what for found in job.compare([seen(0), seen(1)], ["shm"])] == ["job", "versions", "affinity"]


def test_interfaces_of_this_machine_leave_out_loopback() -> None:
    assert all(not address.startswith("127.") for address in job.interfaces().values())


def test_other_commands_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dcoll", "nurse"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "invalid choice: 'nurse'" in done.stderr


def test_the_kernel_is_asked_whether_peers_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # An address where nothing is, in a process that could be read: no file under /proc/sys tells that.
    shows = machine._SHOW_A_WORD
    monkeypatch.setattr(machine, "_SHOW_A_WORD", shows.replace("ctypes.addressof(word)", "8"))
    assert machine.read_a_sibling() in ("Bad address", "Operation not permitted")
    monkeypatch.undo()
    fake_answers(monkeypatch, ("process_vm_readv", 0, "Operation not permitted"))
    found = machine.peer_memory()
    assert found.level is Level.NOTE
    assert "Operation not permitted" in found.found
    assert "slots" in found.advice
