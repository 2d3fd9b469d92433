"""bench/netlab itself: what it refuses, and that a lab is what it says."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import netlab
import pytest

Hosts = Callable[[int], netlab.Lab]


def said(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, str(Path(netlab.__file__)), "--lab", "no-such-lab", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("stat",), "is not up: 'netlab --lab no-such-lab up N [RATE]' first"),
        (("up", "0"), "a lab has 1 to 200"),
        (("up", "2", "fast"), "rate 'fast' is not one: write 1gbit"),
    ],
)
def test_what_it_refuses(hosts: Hosts, arguments: tuple[str, ...], text: str) -> None:
    status, words = said(*arguments)
    assert status == 2
    assert text in words


def test_without_root_it_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert netlab.main(["check"]) == netlab.CANNOT
    assert "only root can make network namespaces" in capsys.readouterr().err


def test_it_says_when_hosts_do_not_reach_each_other(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    up = netlab.up

    def cut(name: str, count: int, rate: str) -> netlab.Lab:
        lab = up(name, count, rate)
        netlab.sh("ip", "link", "set", lab.port(1), "down")
        return lab

    monkeypatch.setattr(netlab, "up", cut)
    with pytest.raises(netlab.CannotError, match="got no answer from the other"):
        netlab.check()


def test_the_mpirun_of_dcolls_build_serves_other_interpreters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That of another torch, say."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert netlab.find_mpirun() == (Path(netlab.__file__).parents[1] / "dcoll" / "mpirun.txt").read_text().strip()


@pytest.mark.parametrize("slots", ["1", "2,2,2", "0,0", "a,b", "-1,1"])
def test_slots(hosts: Hosts, slots: str) -> None:
    lab = hosts(2)
    if slots == "1":
        command, environment = netlab.mpirun_command(lab, slots, ["true"])
        assert "h0:1,h1:1" in command
        assert environment["OMPI_MCA_btl_tcp_if_include"] == "eth0"
    else:
        with pytest.raises(netlab.LabError, match="write ranks per host"):
            netlab.mpirun_command(lab, slots, ["true"])


def test_hosts_are_apart_until_cut_and_healed(hosts: Hosts) -> None:
    lab = hosts(2)
    # The connection is refused, which is an answer, or there is none.
    reach = "timeout 1 bash -c 'exec 3<>/dev/tcp/h1/9' 2>/dev/null; test $? != 124"

    def on(host: int, script: str) -> int:
        return subprocess.run(lab.enter(host, ["sh", "-c", script]), check=False, timeout=30).returncode

    assert on(0, '[ "$(hostname)" = h0 ] && touch /dev/shm/mine') == 0
    assert on(0, "test -e /dev/shm/mine") == 0
    assert on(1, "test -e /dev/shm/mine") == 1
    assert on(0, reach) == 0
    assert netlab.main(["--lab", lab.name, "cut", "h1"]) == 0
    assert on(0, reach) == 1
    assert netlab.main(["--lab", lab.name, "heal", "1"]) == 0
    assert on(0, reach) == 0
    assert all(sent > 0 and received > 0 for _, sent, received in netlab.stat(lab))


@pytest.mark.parametrize("rate", ["10mbit", "1gbit"])
def test_the_largest_packet_passes_whole(hosts: Hosts, rate: str) -> None:
    lab = hosts(2)
    assert netlab.main(["--lab", lab.name, "rate", rate]) == 0

    def read(*command: str) -> dict[str, Any]:
        words = subprocess.run(lab.enter(0, command), check=True, capture_output=True, timeout=30).stdout
        answer: dict[str, Any] = json.loads(words)[0]
        return answer

    largest = read("ip", "-j", "-d", "link", "show", "eth0")["gso_max_size"] + 14  # the Ethernet header
    assert read("tc", "-j", "qdisc", "show", "dev", "eth0")["options"]["burst"] >= largest
    assert netlab.main(["--lab", lab.name, "rate", "10gbit"]) == 0  # the lab is shared


def test_rates_and_unknown_hosts(hosts: Hosts) -> None:
    lab = hosts(2)
    assert netlab.main(["--lab", lab.name, "rate", "5gbit", "h1"]) == 0
    assert [link.rate for link in netlab.load(lab.name).links] == ["10gbit", "5gbit"]
    assert netlab.main(["--lab", lab.name, "rate", "10gbit"]) == 0
    with pytest.raises(netlab.LabError, match="there are h0 to h1"):
        netlab.reshape(lab, "rate", "1gbit", "h2")
