"""Which launcher started this process. Needs nothing of dcoll, not even its compiled core."""

from collections.abc import Mapping
from dataclasses import dataclass

REINSTALL = "install dcoll again (in its source folder: `pip install --force-reinstall --no-deps --no-cache-dir .`)"
"""What messages about the MPI advise: dcoll is compiled for one."""

# The variable that holds the number of ranks, and who sets it. The first that is set counts: an mpirun inside a Slurm
# job step sees Slurm's variables too, and they describe the step, not the job.
_SIZE_VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
    ("MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun"),
    ("PMI_SIZE", "an MPICH-style mpiexec"),
    ("SLURM_STEP_NUM_TASKS", "Slurm's srun"),
    ("HOROVOD_SIZE", "horovodrun"),
)
# Set for every rank by launchers that do not tell the size.
_PRESENCE_VARIABLES = (("PMIX_RANK", "a PMIx launcher"), ("MPI_LOCALNRANKS", "an MPICH-style mpiexec"))


@dataclass(frozen=True)
class Launcher:
    """Who started this process as one of `size` ranks (None: the environment does not say how many)."""

    name: str
    evidence: str
    size: int | None

    def __str__(self) -> str:
        return f"{self.name} ({self.evidence})"


def find_launcher(env: Mapping[str, str]) -> Launcher | None:
    """The launcher that `env` tells of, or None when the process was started alone."""
    sizes = list(_SIZE_VARIABLES)
    if "TORCHELASTIC_RUN_ID" in env:
        sizes.append(("WORLD_SIZE", "torchrun"))
    for variable, name in sizes:
        value = env.get(variable, "")
        if value.isdecimal():
            return Launcher(name, f"{variable}={value}", int(value))
    for variable, name in _PRESENCE_VARIABLES:
        if variable in env:
            return Launcher(name, f"{variable}={env[variable]}", None)
    return None
