"""The variables that init() finds: which of Horovod's count, which need nothing, which are unknown, and a timeline."""

import difflib
import os
import re
from collections.abc import Mapping

from dcoll import _C

# Beside the settings: read when dcoll is built, and by its tests.
_NO_SETTINGS = frozenset({"DCOLL_MPI", "DCOLL_CUDA", "DCOLL_UCX", "DCOLL_REQUIRE_GPU"})

_HOROVOD_ELSEWHERE = re.compile(
    "HOROVOD_(WITH|GPU|CUDA_HOME|NCCL|ROCM|BUILD_|CMAKE|DEBUG|CPU_|ALLOW_|JOBS"  # read when Horovod is built
    "|SPARK_|RAY_|CCL_|ENABLE_XLA_OPS|MPI_)"  # of the frameworks and launchers that dcoll is not for
)


def note(environ: Mapping[str, str]) -> str:
    """One line on the HOROVOD_* variables that are set; "" when there are none worth a word."""
    table = {name: (setting, instead) for name, setting, instead in _C.horovod_settings()}
    now = {name: value for name, _, _, _, value in _C.settings()}
    used, ours, needless, unknown = [], [], [], []
    for name in sorted(environ):
        if not name.startswith("HOROVOD_") or not environ[name]:
            continue
        if name not in table:
            if not _HOROVOD_ELSEWHERE.match(name):
                unknown.append(name + _nearest(name, table))
            continue
        setting, instead = table[name]
        if instead.startswith("set by Horovod's launcher"):
            continue
        if not setting:
            needless.append(f"{name} ({instead})")
        elif environ.get(setting):
            ours.append(f"{name} (as {setting}={environ[setting]} is set)")
        else:
            used.append(f"{name} as {setting}={now[setting]}")
    parts = [
        ("read", used),
        ("left aside", ours),
        ("not needed", needless),
        ("unknown to Horovod 0.28 and to dcoll", unknown),
    ]
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names)


def unknown_settings(environ: Mapping[str, str]) -> str:
    """A line on DCOLL_* variables that mean nothing, as mistyped ones; "" when there are none."""
    known = {row[0] for row in _C.settings()} | _NO_SETTINGS
    unknown = [name for name in sorted(environ) if name.startswith("DCOLL_") and name not in known]
    return ", ".join(name + _nearest(name, known) for name in unknown if not name.startswith("DCOLL_TEST_"))


def _nearest(name: str, known: Mapping[str, object] | set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f" (did you mean {near[0]}?)" if near else ""


_LONGEST_S = 1e9  # as the core has it (settings.cc)


def seconds(name: str) -> float:
    """A setting that is a time, whether or not the core has read it; its default where the core refuses it."""
    default, value = next((row[1], row[4]) for row in _C.settings() if row[0] == name)
    try:
        found = float(value)
    except ValueError:
        return float(default)
    return found if 0 < found <= _LONGEST_S else float(default)


_said = False


def report(comm: _C.Communicator) -> None:
    """Say it once, on rank 0."""
    global _said  # noqa: PLW0603 - init() may be called again
    if _said or comm.rank != 0:
        return
    _said = True
    if text := note(os.environ):
        comm.log("warning", f"Horovod's variables: {text}")
    if text := unknown_settings(os.environ):
        comm.log("warning", f"no setting of dcoll: {text}. The README lists them all.")


def start_timeline(comm: _C.Communicator) -> None:
    """What DCOLL_TIMELINE (or HOROVOD_TIMELINE) asks for. DYNAMIC asks Horovod to allow start_timeline(): always so."""
    now = {name: value for name, _, _, _, value in _C.settings()}
    path = now["DCOLL_TIMELINE"]
    if path and path != "DYNAMIC":
        _C.start_timeline(comm, path, now["DCOLL_TIMELINE_MARK_CYCLES"] == "1")
