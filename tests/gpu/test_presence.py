"""A GPU that cannot be used is a failure, none at all a skip. Runs without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import presence
import pytest

LISTED = "GPU 0: NVIDIA H200 (UUID: GPU-1)"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one on PATH is this script; by default it lists nothing, as without a driver."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("DCOLL_REQUIRE_GPU", raising=False)
    script = tmp_path / "nvidia-smi"
    write(script, "echo 'NVIDIA-SMI has failed'; exit 9")
    return script


def write(script: Path, body: str) -> None:
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)


def test_where_all_is_there_nothing_is_asked(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "missing", lambda: "")
    monkeypatch.setenv("DCOLL_REQUIRE_GPU", "1")
    presence.skip_module()
    presence.require()


def test_without_a_gpu_it_skips(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "missing", lambda: "no device")
    with pytest.raises(pytest.skip.Exception, match="no device"):
        presence.skip_module()
    nvidia_smi.unlink()
    monkeypatch.setenv("PATH", str(nvidia_smi.parent))
    with pytest.raises(pytest.skip.Exception, match="no device"):
        presence.skip_module()


def test_with_a_gpu_that_is_not_seen_it_fails(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "missing", lambda: "the driver is too old")
    write(nvidia_smi, f"[ $1 = -L ] && echo '{LISTED}'")
    presence.skip_module()
    with pytest.raises(pytest.fail.Exception, match=r"nvidia-smi lists GPU 0: NVIDIA H200.*driver is too old.*not gpu"):
        presence.require()


def test_where_a_gpu_is_demanded_it_fails(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "missing", lambda: "built without CUDA")
    monkeypatch.setenv("DCOLL_REQUIRE_GPU", "1")
    presence.skip_module()
    with pytest.raises(pytest.fail.Exception, match="DCOLL_REQUIRE_GPU=1 is set, but built without CUDA"):
        presence.require()
