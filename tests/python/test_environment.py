"""HOROVOD_* variables, misspelt settings, thread affinity, and what the log writes."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import local_ranks
import numpy as np
import pytest

import dcoll
from dcoll import _C
from dcoll.collectives import on_communicator
from dcoll.job import environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("HOROVOD_", "DCOLL_")):
            monkeypatch.delenv(name)


def setting(name: str) -> str:
    return next(value for known, _, _, _, value in _C.settings() if known == name)


@pytest.mark.parametrize(
    ("variable", "value", "name", "expected"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "67108864", "DCOLL_BUCKET_MB", "64"),
        ("HOROVOD_FUSION_THRESHOLD", "1572864", "DCOLL_BUCKET_MB", "1.5"),
        ("HOROVOD_FUSION_THRESHOLD", "0", "DCOLL_BUCKET_MB", "0"),
        ("HOROVOD_TIMELINE", "DYNAMIC", "DCOLL_TIMELINE", "DYNAMIC"),
        ("HOROVOD_TIMELINE_MARK_CYCLES", "1", "DCOLL_TIMELINE_MARK_CYCLES", "1"),
        ("HOROVOD_STALL_CHECK_DISABLE", "True", "DCOLL_STALL_CHECK_DISABLE", "1"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "30", "DCOLL_STALL_CHECK_TIME", "30"),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "90", "DCOLL_STALL_SHUTDOWN_TIME", "90"),
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "1", "DCOLL_ALGO", "hierarchical"),
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "0", "DCOLL_ALGO", "auto"),
        ("HOROVOD_TORUS_ALLREDUCE", "1", "DCOLL_ALGO", "hierarchical"),
        ("HOROVOD_THREAD_AFFINITY", "0,1", "DCOLL_THREAD_AFFINITY", "0,1"),
        ("HOROVOD_LOG_LEVEL", "INFO", "DCOLL_LOG_LEVEL", "info"),
        ("HOROVOD_LOG_HIDE_TIME", "1", "DCOLL_LOG_HIDE_TIME", "1"),
    ],
)
def test_horovods_variables_are_read_where_ours_are_not_set(
    variable: str, value: str, name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert setting(name) == expected
    monkeypatch.setenv(name, "ours")
    assert setting(name) == "ours"


def test_numbers_are_read_alike_in_every_locale(german: Path) -> None:
    """A program that calls setlocale(LC_ALL, "") in Germany has a decimal comma."""
    code = (
        "import locale; locale.setlocale(locale.LC_NUMERIC, 'de_DE.UTF-8'); from dcoll import _C; "
        "(comm,) = _C.connect_local(1); comm.close(); "
        "print(locale.localeconv()['decimal_point'], [row[-1] for row in _C.settings() if row[0] == 'DCOLL_BUCKET_MB'])"
    )
    env = os.environ | {"LOCPATH": str(german), "DCOLL_TIMEOUT": "2.5", "HOROVOD_FUSION_THRESHOLD": "1572864"}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=False, capture_output=True, text=True)
    assert done.stdout == ", ['1.5']\n", done.stderr


HOROVODS = """
    FUSION_THRESHOLD CYCLE_TIME CACHE_CAPACITY TIMELINE TIMELINE_MARK_CYCLES STALL_CHECK_DISABLE
    STALL_CHECK_TIME_SECONDS STALL_SHUTDOWN_TIME_SECONDS DYNAMIC_PROCESS_SETS LOG_LEVEL LOG_HIDE_TIME RANK SIZE
    LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE HOSTNAME CONTROLLER CPU_OPERATIONS AUTOTUNE AUTOTUNE_LOG
    AUTOTUNE_WARMUP_SAMPLES AUTOTUNE_STEPS_PER_SAMPLE AUTOTUNE_BAYES_OPT_MAX_SAMPLES AUTOTUNE_GAUSSIAN_PROCESS_NOISE
    HIERARCHICAL_ALLREDUCE HIERARCHICAL_ALLGATHER TORUS_ALLREDUCE THREAD_AFFINITY DISABLE_GROUP_FUSION NUM_NCCL_STREAMS
    BATCH_D2D_MEMCOPIES ENABLE_ASYNC_COMPLETION DISABLE_NVTX_RANGES MPI_THREADS_DISABLE GLOO_RENDEZVOUS_ADDR
    GLOO_RENDEZVOUS_PORT GLOO_IFACE GLOO_TIMEOUT_SECONDS ELASTIC ELASTIC_TIMEOUT START_TIMEOUT SECRET_KEY
    ADASUM_MPI_CHUNK_SIZE
""".split()  # noqa: SIM905
"""What Horovod 0.28.1 reads as it runs, but for what other frameworks than torch are for."""


def test_every_variable_of_horovod_is_known() -> None:
    assert {row[0] for row in _C.horovod_settings()} == {f"HOROVOD_{name}" for name in HOROVODS}


def test_every_mapped_variable_and_every_other_is_documented() -> None:
    rows = _C.horovod_settings()
    settings = {row[0] for row in _C.settings()}
    text = (ROOT / "docs" / "migration.md").read_text()
    for variable, name, instead in rows:
        assert (name in settings) != bool(instead)
        assert f"`{variable}" in text
        if name:
            assert f"`{name}" in text
    assert len({row[0] for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "6x", "DCOLL_BUCKET_MB='6x bytes' (from HOROVOD_FUSION_THRESHOLD) is not valid"),
        ("HOROVOD_LOG_LEVEL", "loud", "allowed are trace, debug, info, notice, warning, error, fatal"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "soon", "(from HOROVOD_STALL_CHECK_TIME_SECONDS)"),
        ("DCOLL_STALL_CHECK_DISABLE", "perhaps", "DCOLL_STALL_CHECK_DISABLE='perhaps' is not valid: allowed are 0, 1"),
        ("DCOLL_STALL_CHECK_TIME", "0", "allowed are seconds > 0"),
        ("DCOLL_THREAD_AFFINITY", "1,x", "DCOLL_THREAD_AFFINITY='1,x' is not valid"),
        ("DCOLL_THREAD_AFFINITY", "0", "DCOLL_THREAD_AFFINITY names 1 cores, but this node has 2 ranks"),
    ],
)
def test_a_wrong_value_names_its_variable(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(dcoll.ArgumentError, match=re.escape(message)):
        _C.connect_local(2)


def test_the_note_lists_all_of_horovods_variables_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.note({"PATH": "x", "HOROVOD_RANK": "0", "HOROVOD_WITH_MPI": "1"}) == ""
    given = {
        "HOROVOD_CYCLE_TIME": "5",
        "HOROVOD_LOG_LEVEL": "ERROR",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
        "DCOLL_STALL_CHECK_TIME": "40",
        "HOROVOD_FUSON_THRESHOLD": "3",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert environment.note(given) == (
        "read: HOROVOD_LOG_LEVEL as DCOLL_LOG_LEVEL=error; "
        "left aside: HOROVOD_STALL_CHECK_TIME_SECONDS (as DCOLL_STALL_CHECK_TIME=40 is set); "
        "not needed: HOROVOD_CYCLE_TIME (there is no cycle: a collective starts when it is called); "
        "unknown to Horovod 0.28 and to dcoll: HOROVOD_FUSON_THRESHOLD (did you mean HOROVOD_FUSION_THRESHOLD?)"
    )


@pytest.mark.parametrize("value", ["0", "-5", "nan", "inf", "soon", "1e10"])
def test_a_time_that_the_core_refuses_ends_no_program(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read at a program's end, too, after an init() that failed because of it."""
    monkeypatch.setenv("DCOLL_TIMEOUT", value)
    assert environment.seconds("DCOLL_TIMEOUT") == 300
    monkeypatch.setenv("DCOLL_TIMEOUT", "7.5")
    assert environment.seconds("DCOLL_TIMEOUT") == 7.5


def test_misspelt_settings_are_named() -> None:
    assert (
        environment.unknown_settings({"DCOLL_TIMEOUT": "3", "DCOLL_MPI": "0", "DCOLL_REQUIRE_GPU": "1", "PATH": "x"})
        == ""
    )
    found = environment.unknown_settings({"DCOLL_TIMOUT": "3", "DCOLL_XYZ": "3"})
    assert found == "DCOLL_TIMOUT (did you mean DCOLL_TIMEOUT?), DCOLL_XYZ"


@pytest.mark.parametrize(
    ("level", "hide", "expected"),
    [
        ("warning", "0", [r"\[dcoll warning rank 0 \d\d:\d\d:\d\d\.\d{6}\] w", r"\[dcoll fatal rank 0 [\d:.]+\] f"]),
        ("warning", "1", [r"\[dcoll warning rank 0\] w", r"\[dcoll fatal rank 0\] f"]),
        ("fatal", "1", [r"\[dcoll fatal rank 0\] f"]),
        (
            "trace",
            "1",
            [rf"\[dcoll {one} rank 0\] {one[0]}" for one in ("trace", "info", "notice", "warning", "fatal")],
        ),
        ("", "1", [rf"\[dcoll {one} rank 0\] {one[0]}" for one in ("notice", "warning", "fatal")]),
    ],
)
def test_levels_and_time_of_the_log(
    level: str, hide: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DCOLL_LOG_LEVEL", level)
    monkeypatch.setenv("DCOLL_LOG_HIDE_TIME", hide)
    (comm,) = _C.connect_local(1)
    for severity in ("trace", "info", "notice", "warning", "fatal"):
        comm.log(severity, severity[0])
    comm.close()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line)


def test_the_background_thread_is_bound_to_its_core(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    core = min(os.sched_getaffinity(0))
    monkeypatch.setenv("DCOLL_THREAD_AFFINITY", f"{core},1023")
    masks: list[set[int]] = []
    turns = [threading.Event(), threading.Event()]

    def threads() -> set[int]:
        return {int(task.name) for task in Path("/proc/self/task").iterdir()}

    def body(comm: _C.Communicator) -> None:
        for first in (0, 1):  # starts what its peer does not yet take part in, so that its background thread has to
            if comm.rank == first:
                before = threads()
                handle = on_communicator.allreduce(comm, np.ones(1), dcoll.Sum, "", 1.0, 1.0)
                for _ in range(500):
                    new = [os.sched_getaffinity(thread) for thread in threads() - before]
                    if new and (first == 1 or {core} in new):
                        break
                    time.sleep(0.01)
                masks.extend(new)
                turns[first].set()
            else:
                turns[first].wait()
                handle = on_communicator.allreduce(comm, np.ones(1), dcoll.Sum, "", 1.0, 1.0)
            handle.wait()

    local_ranks.run_ranks(2, body)
    assert {core} in masks
    told = capfd.readouterr().err
    assert "rank 1" in told
    assert "cannot be bound to core 1023 (Invalid argument)" in told
