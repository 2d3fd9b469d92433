"""The benchmarks between hosts where there is no lab: what they say, how they end; bench/compression.py's buffers."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dcoll import _C

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import compression
import media
import netlab
import network


@pytest.mark.parametrize("count", [1, 2, 3, 100])
def test_codecs_write_into_their_buffer(count, monkeypatch):
    zeros, encode = np.zeros, _C.kernels.encode
    lengths: dict[int, int] = {}

    def noted_zeros(*args, **more):
        made = zeros(*args, **more)
        lengths[made.ctypes.data] = made.nbytes
        return made

    def checked_encode(codec, target, source, n, *more):
        assert lengths[target] >= _C.kernels.encoded_bytes(codec, n)
        encode(codec, target, source, n, *more)

    monkeypatch.setattr(np, "zeros", noted_zeros)
    monkeypatch.setattr(_C.kernels, "encode", checked_encode)
    args = compression.parse(["kernels", "--count", str(count), "--turns", "1"])
    assert len(compression.measure_kernels(args)["rows"]) == 1 + 4 * 3 + 4


def test_the_job_of_a_lab_is_no_command_for_users(capsys):
    with pytest.raises(SystemExit):
        compression.parse(["--help"])
    assert "job}" not in capsys.readouterr().out
    assert compression.parse([compression.JOB, "out", "4", "1", "int8"]).command == compression.JOB


@pytest.mark.parametrize("name", ["plain", "auto", "auto-powersgd"])
def test_what_is_no_method_is_refused_with_what_is_allowed(name, capsys):
    with pytest.raises(SystemExit):
        compression.parse(["lab", "--methods", f"powersgd,auto-int8,{name}"])
    assert f"got '{name}'; allowed are fp16, bf16, int8, topk, powersgd, auto-fp16" in capsys.readouterr().err


class Host:
    """A lab whose hosts have programs of this test's: `timeout` ends as it is told, whatever it was to run."""

    def __init__(self, folder: Path, name: str, status: int) -> None:
        self.name = "a lab"
        for program, line in {"timeout": f"exit {status}", "hostname": f"echo {name}"}.items():
            (folder / program).write_text(f"#!/bin/sh\n{line}\n")
            (folder / program).chmod(0o755)
        self._path = f"PATH={folder}:/usr/bin:/bin"

    def enter(self, host, command):
        assert host == 0
        return ["env", self._path, *command]


@pytest.mark.parametrize(
    ("name", "status", "answers"),
    [("h0", 1, True), ("h0", 0, True), ("h0", 124, False), ("ours", 1, False)],  # 1: refused, 124: no answer in time
)
def test_a_lab_is_hosts_that_answer(name, status, answers, monkeypatch, tmp_path):
    monkeypatch.setattr(netlab, "require", lambda: None)
    monkeypatch.setattr(netlab, "up", lambda *_: Host(tmp_path, name, status))
    monkeypatch.setattr(netlab, "down", lambda _: None)
    if answers:
        netlab.check()
    else:
        with pytest.raises(netlab.CannotError, match="no answer"):
            netlab.check()


PROGRAMS = {
    "network": lambda: network.main([]),
    "media": lambda: media.main([]),
    "compression": lambda: compression.main(["lab"]),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("error", [netlab.CannotError("no root"), netlab.LabError("no such rate")])
def test_without_a_lab_there_is_a_sentence(program, error, monkeypatch, capsys):
    def refuse(*_):
        raise error

    monkeypatch.setattr(netlab, "up", refuse)
    with pytest.raises(SystemExit) as ended:
        PROGRAMS[program]()
    assert ended.value.code == netlab.CANNOT
    assert capsys.readouterr().err == f"{program}: {error}\n"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_job_that_takes_too_long_is_a_sentence_and_the_lab_goes(program, monkeypatch, capsys):
    class Lab:
        name = "a lab"

        def launcher(self, slots):
            return []

        def address(self, host):
            return "10.0.0.1"

    def late(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    gone = []
    monkeypatch.setattr(netlab, "up", lambda *_: Lab())
    monkeypatch.setattr(netlab, "down", gone.append)
    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(SystemExit) as ended:
        PROGRAMS[program]()
    assert (ended.value.code, gone) == (netlab.CANNOT, ["a lab"])
    assert f"{program}: the job did not end within " in capsys.readouterr().err
