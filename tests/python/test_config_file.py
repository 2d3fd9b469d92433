"""--config-file of dcollrun: horovodrun's YAML, and what is not. --hostfile: lines of hosts, and what is not."""

import json
import sys
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from dcoll.runner import cli, command_lines, config, hosts, options
from dcoll.runner.command_lines import Mpirun
from dcoll.runner.hosts import Host, UsageError

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
import runner_files

OPEN_MPI_5 = Mpirun("mpirun", "openmpi", 5, "mpirun (Open MPI) 5.0.11")


CONFIG = """\
# of the cluster
verbose: true
params:
    fusion-threshold-mb: 32   # MiB
    cycle-time-ms: 5
    hierarchical_allreduce: yes
timeline:
    filename: "a # b.json"
    mark-cycles: false
stall-check:
    enabled: no
    warning-time-seconds: ~
logging:
    level: INFO
"""


def test_a_config_file_is_read_and_the_command_line_counts_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    found = options.settings(options.parser().parse_args([*config.options_of(file), "--log-level", "error", "x"]))
    assert found == {
        "DCOLL_BUCKET_MB": "32", "DCOLL_ALGO": "hierarchical", "DCOLL_TIMELINE": "a # b.json",
        "DCOLL_TIMELINE_MARK_CYCLES": "0", "DCOLL_STALL_CHECK_DISABLE": "1", "DCOLL_LOG_LEVEL": "error",
    }  # fmt: skip
    monkeypatch.setattr(command_lines, "find_mpirun", lambda: OPEN_MPI_5)
    assert cli.main(["-np", "2", "--config-file", str(file), "--dry-run", "train.py"]) == 0
    told = capsys.readouterr()
    assert "-x DCOLL_TIMELINE " in told.err
    assert told.err.count("--cycle-time-ms needs nothing here") == 1
    contrary = ["--no-hierarchical-allreduce", "--timeline-mark-cycles", "--stall-check"]
    found = options.settings(options.parser().parse_args([*config.options_of(file), *contrary, "x"]))
    assert (found["DCOLL_ALGO"], found["DCOLL_TIMELINE_MARK_CYCLES"], found["DCOLL_STALL_CHECK_DISABLE"]) == (
        "auto", "1", "0",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "line 1: a sequence stands where 'key: value' is expected"),
        ("a", "line 1: a scalar stands where 'key: value' is expected"),
        ("a: [", "is not YAML: while parsing a flow node expected the node content"),
        ("[" * 1000, "is not YAML: maximum recursion depth exceeded"),
        ('a: "\\Uffffffff"', "is not YAML: "),
        ("\x01", "is not YAML: unacceptable character"),
        ("timeline:\n  filename: [a, b]", "line 2: a sequence stands where one word is expected"),
        ('timeline:\n  filename: "a\\0b"', "line 2: 'a\\x00b' has characters that no option takes"),
        ('timeline: {filename: "\\ud800"}', "line 1: '\\ud800' has characters that no option takes"),
        ("&a {timeline: {filename: *a}}", "line 1: a mapping stands where one word is expected"),
        ("controller: smoke signals", "line 1: controller is 'smoke signals', but must be mpi"),
        ("params: 3", "line 1: no option 'params'; allowed are controller, verbose"),
        ("verbose: true\n<<: *x\n", "is not YAML: found undefined alias"),
        ("params:\n  fusion: 3\n", "line 2: no option 'params.fusion'; allowed are cache-capacity, cycle-time-ms"),
        ("other:\n  x: 3\n", "no option 'other.x'; allowed are the sections autotune"),
        ("timeline:\n  mark-cycles: perhaps\n", "line 2: mark-cycles is 'perhaps', but must be true or false"),
    ],
)
def test_a_wrong_config_file_says_where(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert cli.main(["-np", "2", "--config-file", str(file), "train.py"]) == 2
    assert message in capsys.readouterr().err
    assert cli.main(["-np", "2", "--config-file", str(tmp_path / "missing"), "train.py"]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "controller"), [("controller: mpi", "--mpi"), ("controller: 'MPI'\nverbose: no", "--mpi")]
)
def test_the_controller_of_a_config_file_may_be_mpi(text: str, controller: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert config.options_of(file) == [controller]
    file.write_text("controller: gloo")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["-np", "2", "--config-file", str(file), "train.py"])


def test_all_of_yaml_is_understood(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("""\
%YAML 1.1
---
params: &p {"fusion-threshold-mb": 0x10, cycle-time-ms: !!float 5}  # flow style, a tag, an anchor
library-options:
  mpi-args: >
    --mca btl
    ^openib
timeline:
  ? filename
  : 'it''s.json'
...
""")
    assert config.options_of(file) == [
        "--fusion-threshold-mb=0x10", "--cycle-time-ms=5", "--mpi-args=--mca btl ^openib",
        "--timeline-filename=it's.json",
    ]  # fmt: skip


WORDS = st.one_of(
    st.sampled_from(sorted({word for pair in (*config._VALUES, *config._FLAGS) for word in pair} | {"controller"})),
    st.text(),
    st.integers().map(str),
    st.sampled_from(
        ["mpi", "true", "~", "<<", "*a", "&a", "!!x", "{", "]", "- ", ": ", "\n", "\n  ", "#", "'", '"\\U']
    ),
)
TEXTS = st.one_of(
    st.binary(),
    st.lists(WORDS).map(lambda words: " ".join(words).encode("utf-8", "surrogatepass")),
    st.lists(st.tuples(WORDS, WORDS, WORDS)).map(
        lambda rows: "".join(f"{a}:\n  {b}: {c}\n" for a, b, c in rows).encode("utf-8", "surrogatepass")
    ),
    st.recursive(WORDS, lambda inner: st.dictionaries(WORDS, inner) | st.lists(inner)).map(
        lambda value: json.dumps(value).encode()
    ),
)


@hypothesis.given(TEXTS)
@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.example(b'timeline: {filename: "\\U11111111"}')
@hypothesis.example(b"? [a]\n: b")
@hypothesis.example(b"\xff\xfeb\x00")
def test_any_file_is_options_or_a_usage_error(text: bytes) -> None:
    runner_files.check_config_file(text)


def test_host_files_of_all_kinds_are_read(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the cluster\na slots=2\n\nb:3  # MPICH\nc\nd max_slots=9 slots=4\n")
    assert hosts.parse_hostfile(file) == [Host("a", 2), Host("b", 3), Host("c", 1), Host("d", 4)]
    for wrong in ("a slots=two", "a slots=0", "a:0", "a slots=\u0663", "a slots=" + "1" * 5000):
        file.write_text(f"{wrong}\n")
        with pytest.raises(UsageError, match=f"line 1: '{wrong}'"):
            hosts.parse_hostfile(file)
    file.write_bytes("# Köln, from an older editor\na\n".encode("latin-1"))
    assert hosts.parse_hostfile(file) == [Host("a", 1)]
    file.write_text("# nothing\n")
    with pytest.raises(UsageError, match="names no host"):
        hosts.parse_hostfile(file)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        hosts.parse_hostfile(tmp_path / "missing")


CORPUS = sorted((Path(__file__).parents[1] / "fuzz/corpus/runner_files").iterdir())
LINES = st.lists(st.text() | st.sampled_from(["a", "b:2", "[::1]", "a slots=3", "slots=", ":", "#", "\\", "9" * 5000]))


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.name)
def test_what_the_fuzzer_found_is_taken_or_refused(file: Path) -> None:
    runner_files.check_config_file(file.read_bytes())
    runner_files.check_hostfile(file.read_bytes())


@hypothesis.given(st.binary() | LINES.map(lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass")))
@hypothesis.settings(max_examples=150, deadline=None)
def test_any_host_file_names_hosts_or_is_refused(text: bytes) -> None:
    runner_files.check_hostfile(text)
