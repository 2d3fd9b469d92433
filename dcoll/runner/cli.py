"""dcollrun: `dcollrun -np 4 -H host1:2,host2:2 python train.py`."""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

from dcoll.runner import command_lines, config, hosts, options
from dcoll.runner.hosts import UsageError

# Variables that are not passed on to the ranks of other hosts.
_NOT_EXPORTED = re.compile(
    r"BASH_FUNC_|OLDPWD|.*_SECRET_KEY"  # as in horovodrun
    # Of this host, or of a login here.
    r"|(_|PWD|SHLVL|HOST|HOSTNAME|DISPLAY|XAUTHORITY|XDG_RUNTIME_DIR)$|SSH_|XDG_SESSION_|DBUS_"
    # Of a launcher, which passes on what its ranks need. Those of another one are not about this job.
    r"|OMPI_|PMIX_|PRTE_|PMI_|SLURM|HYDI_|HYDRA_|MPI_LOCAL|MV2_COMM_|TORCHELASTIC_"
)


def physical_cores() -> int:
    """Cores this process may use, hyper-threads counted once."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    return len(cores)


def job_from(args: argparse.Namespace) -> command_lines.Job:
    """What the command line asks for."""
    if not args.command:
        raise UsageError("no command to run; write it last: dcollrun -np 2 python train.py")
    named = hosts.parse_hosts(args.hosts) if args.hosts else []
    if args.hostfile:
        named = hosts.parse_hostfile(args.hostfile)
    if args.num_proc is None and not named:
        raise UsageError("how many ranks? Give -np N, or -H host1:2,host2:2 to fill all slots")
    ranks = args.num_proc or sum(host.slots for host in named)
    if named:
        named = hosts.fit(named, ranks)
    settings = options.settings(args)
    if args.network_interfaces:
        settings["NCCL_SOCKET_IFNAME"] = args.network_interfaces  # as horovodrun does
    if "OMP_NUM_THREADS" not in os.environ:
        # torch would otherwise start a thread per core in every rank, and the ranks would fight for the cores.
        here = [host.slots for host in named if hosts.is_local(host.name)] if named else [ranks]
        settings["OMP_NUM_THREADS"] = str(max(1, physical_cores() // max(1, *here, 1)))
    return command_lines.Job(
        command=args.command,
        ranks=ranks,
        hosts=named,
        exported=exported(dict(os.environ)) | settings,
        cores=physical_cores(),
        prefix=not args.no_prefix,
        timestamps=args.prefix_output_with_timestamp,
        output_folder=args.output_filename,
        ssh_port=args.ssh_port,
        ssh_identity=args.ssh_identity_file,
        interfaces=args.network_interfaces.split(",") if args.network_interfaces else [],
        binding_args=args.binding_args,
        mpi_args=args.mpi_args,
    )


def exported(env: dict[str, str]) -> dict[str, str]:
    """The variables that ranks on other hosts see too."""
    return {name: value for name, value in env.items() if not _NOT_EXPORTED.match(name)}


def start(job: command_lines.Job, mpirun: command_lines.Mpirun, verbose: bool, stdin: int | None = None) -> int:
    """Run the job with that launcher; its exit status. stdin: as Popen's."""
    command = mpirun.command(job)
    if verbose:
        print(shlex.join(command), file=sys.stderr, flush=True)
    if job.output_folder and mpirun.kind == "hydra":
        for rank in range(job.ranks):
            (job.output_folder / f"rank.{rank}").mkdir(parents=True, exist_ok=True)
    return run(command, command_lines.environment(mpirun, job), stdin)


def run(command: list[str], env: dict[str, str], stdin: int | None = None) -> int:
    """Run the launcher, pass SIGINT and SIGTERM on to it, and return its exit status (128 + n after signal n).

    On another thread than the main one, which alone has signals, it only waits.
    """
    process = subprocess.Popen(command, env=env, stdin=stdin)
    before = {}
    heard = 0

    def pass_on(number: int, _frame: FrameType | None) -> None:
        # The launcher has a terminal's Ctrl-C from there. Two of them within some seconds would cut its clean-up short.
        nonlocal heard
        heard += 1
        if number != signal.SIGINT or heard > 1 or not _has_the_terminal():
            process.send_signal(number)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, pass_on)
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def _has_the_terminal() -> bool:
    """Whether Ctrl-C there goes to this process and to those that it has started."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def check_build() -> str:
    """What is built in, in the manner of horovodrun --check-build."""
    from dcoll import _C
    from dcoll.job import world

    try:
        found = command_lines.find_mpirun()
        launcher = f"{found.path} ({found.version})"
    except UsageError as error:
        launcher = f"none: {error}"

    def box(has: bool) -> str:
        return "[X]" if has else "[ ]"

    try:
        import torch

        has_torch = f"[X] PyTorch {torch.__version__}"
    except ImportError:
        has_torch = "[ ] PyTorch"
    import numpy

    return "\n".join(
        [
            f"dcoll v{_C.__version__}:",
            "",
            "Available frameworks:",
            f"    {has_torch}",
            f"    [X] NumPy {numpy.__version__}",
            "",
            "Available between nodes:",
            f"    {box(world.mpi_built())} MPI (launcher: {launcher})",
            "",
            "Available inside a node:",
            "    [X] shared memory",
            f"    {box(_C.cuda_built)} CUDA kernels",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """The program; returns its exit status: the job's own, or 2 for a command line that cannot be used."""
    argv = sys.argv[1:] if argv is None else argv
    p = options.parser()
    args = p.parse_args(argv)
    if args.config_file is not None:
        try:
            args.notes.clear()  # they come again
            args = p.parse_args([*config.options_of(args.config_file), *argv])
        except UsageError as error:
            print(f"dcollrun: {error}", file=sys.stderr)
            return 2
    if args.version:
        from dcoll import _C

        print(_C.__version__)
        return 0
    if args.check_build:
        print(check_build())
        return 0
    for note in args.notes:
        print(f"dcollrun: {note}", file=sys.stderr)
    try:
        job = job_from(args)
        mpirun = command_lines.find_mpirun()
        command = mpirun.command(job)
    except UsageError as error:
        print(f"dcollrun: {error}", file=sys.stderr)
        return 2
    if args.dry_run:
        print(shlex.join(command), file=sys.stderr if args.verbose else sys.stdout, flush=True)
        return 0
    return start(job, mpirun, args.verbose)
