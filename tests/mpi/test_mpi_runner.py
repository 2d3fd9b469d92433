"""dcollrun starts real jobs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpirun import HERE, find_mpirun, is_open_mpi

pytestmark = pytest.mark.mpi

SUM = "import dcoll as hvd, numpy as np; hvd.init(); print('sum', int(hvd.allreduce(np.ones(1), op=hvd.Sum)[0]))"


def dcollrun(*words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([os.path.dirname(find_mpirun()), os.environ.get("PATH", "")])
    env = os.environ | {"PATH": path, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path])}
    command = [sys.executable, "-m", "dcoll.runner", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_work_together_and_their_output_is_marked(ranks: int) -> None:
    done = dcollrun("-np", str(ranks), sys.executable, "-c", SUM)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "sum" in line]
    assert len(lines) == ranks
    assert all(line.endswith(f"sum {ranks}") and line.startswith("[") for line in lines)
    assert len({line.split("sum")[0] for line in lines}) == ranks


def test_the_exit_status_is_the_jobs() -> None:
    done = dcollrun("-np", "2", sys.executable, "-c", "raise SystemExit(7)")
    assert done.returncode == 7


def test_slots_of_this_host_are_filled() -> None:
    done = dcollrun("-H", "localhost:3", "--no-prefix", sys.executable, "-c", SUM)
    assert done.stdout.split() == ["sum", "3"] * 3, done.stderr


def test_other_hosts_have_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a host that is reached by an ssh which brings nothing along."""
    ssh = tmp_path / "ssh"
    forgets = 'while [ "$1" != there ]; do shift; done; shift; exec env -i HOME=/ HOSTNAME=there PATH=/bin sh -c "$*"'
    ssh.write_text(f"#!/bin/sh\n{forgets}\n")
    ssh.chmod(0o755)
    if not is_open_mpi():
        pytest.skip("needs Open MPI: MPICH and Intel MPI choose what they pass on themselves")
    for name in ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"):
        monkeypatch.setenv(name, str(ssh))
    variables = {"DATA_DIR": "/data/a b", "WANDB_API_KEY": "", "LS_COLORS": "a=1;2:b=3", "HOSTNAME": "here"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    says = f"import os; print('found', [os.environ.get(name) for name in {[*variables]}])"
    done = dcollrun("-H", "there:1", "--no-prefix", "--log-level", "error", sys.executable, "-c", says)
    found = ["/data/a b", "", "a=1;2:b=3", "there"]
    assert f"found {found}" in done.stdout.splitlines(), done.stdout + done.stderr


def test_check_build_tells_what_is_there() -> None:
    done = dcollrun("--check-build")
    assert done.returncode == 0, done.stderr
    assert "[X] MPI (launcher: " in done.stdout
    assert "[X] PyTorch" in done.stdout


def test_the_doctor_examines_a_whole_job_and_one_rank_prints() -> None:
    done = dcollrun("-np", "3", "--no-prefix", sys.executable, "-m", "dcoll", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok  job: 3 ranks on ") == 1
    assert done.stdout.count("dcoll can work here") == 1
    assert "rank 0 reaches its peers over shm" in done.stdout
