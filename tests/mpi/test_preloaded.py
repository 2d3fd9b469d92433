"""Ranks that are forked with torch (preloaded.py) are as those that are started, but for what they need not do."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from mpirun import PLAIN, TORCHRUN, environment, launch, python_for

pytestmark = pytest.mark.mpi

TELLS = """
import json, os, random, sys
began_with = sorted({"torch", "dcoll"} & set(sys.modules))
import numpy, torch
import dcoll as hvd
hvd.init()
told = [
    began_with, sys.argv[1:], os.getcwd(), os.environ["DCOLL_TIMEOUT"], torch.get_num_threads(),
    [hash("set"), random.random(), numpy.random.rand(), id(json)],
]
everything = hvd.allgather_object(told)
if hvd.rank() == 0:
    print(json.dumps(everything))
print("to stderr", file=sys.stderr)
"""


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["mpirun", "torchrun"])
def test_a_rank_has_torch_and_what_its_job_gave_it(launcher: tuple[str, ...]) -> None:
    done = launch(2, "-c", TELLS, "a word", launcher=launcher, preloaded=True, DCOLL_TIMEOUT="17")
    assert done.returncode == 0, done.text
    assert done.stderr.count("to stderr") == 2, done.text
    first, second = json.loads(done.stdout)
    assert first[:-1] == second[:-1] == [["torch"], ["a word"], os.getcwd(), "17", 1]
    assert all(one != other for one, other in zip(first[-1], second[-1], strict=True)), (first, second)


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('so it ends')", 1, "so it ends"),
        ("raise KeyError('batch')", 1, "KeyError: 'batch'"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL, ""),
    ],
)
def test_it_ends_as_its_program_does(code: str, status: int, text: str) -> None:
    done = launch(1, "-c", code, preloaded=True)
    assert done.returncode == status, done.text
    assert text in done.stderr, done.text


def test_a_job_that_runs_too_long_tells_of_its_processes() -> None:
    with pytest.raises(
        pytest.fail.Exception, match=r"\d+ S runs for [2-9]\.\d s, used \d\.\d s: .*time\.sleep\(60\) \["
    ):
        launch(1, "-c", "import time; time.sleep(60)", timeout=3)


def test_a_module_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("here = 5")
    (tmp_path / "script.py").write_text("import beside, sys\nprint(beside.here, __name__, sys.argv[1])")
    done = launch(1, str(tmp_path / "script.py"), "x", preloaded=True)
    assert (done.returncode, done.stdout.strip()) == (0, "5 __main__ x"), done.text
    done = launch(1, "-m", "dcoll.plan", "explain", "--bytes", "1M", preloaded=True)
    assert (done.returncode, "ring: " in done.stdout) == (0, True), done.text


def test_it_ends_with_its_proxy(tmp_path: Path) -> None:
    """Which is what a launcher ends."""
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    proxy = subprocess.Popen([*python_for("0"), "-c", code], env=environment(RANK="0"))
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid = int((tmp_path / "pid").read_text())
    proxy.kill()
    proxy.wait()
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "it went on"
        time.sleep(0.02)


def test_settings_of_others_are_there_from_the_beginning() -> None:
    """They are read while libraries are loaded, so no rank with them is forked."""
    code = "import sys; print('torch' in sys.modules)"
    for launcher, env in (((), {"OMP_NUM_THREADS": "2"}), (PLAIN, {"LANG": "C"}), ((), {"DCOLL_LOG_LEVEL": "warning"})):
        done = launch(1, "-c", code, launcher=launcher, preloaded=True, **env)
        assert done.stdout.strip() == str(not launcher and "OMP_NUM_THREADS" not in env), done.text
