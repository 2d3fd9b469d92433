"""Which launcher started this process. Needs nothing of dcoll, not even its compiled core."""

from collections.abc import Mapping
from dataclasses import dataclass

REINSTALL = "install dcoll again (in its source folder: `pip install --force-reinstall --no-deps --no-cache-dir .`)"
"""What messages about the MPI advise: dcoll is compiled for one."""

# The variable that holds the number of ranks, and who sets it. The first that is set counts: an mpirun inside a Slurm
# job step sees Slurm's variables too, and they describe the step, not the job.
_MPI_SIZE_VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
    ("MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun"),
    ("PMI_SIZE", "an MPICH-style mpiexec"),
)
_OTHER_SIZE_VARIABLES = (
    ("SLURM_STEP_NUM_TASKS", "Slurm's srun"),
    ("HOROVOD_SIZE", "horovodrun"),
)
# Set for every rank by launchers that do not tell the size.
_PRESENCE_VARIABLES = (("PMIX_RANK", "a PMIx launcher"), ("MPI_LOCALNRANKS", "an MPICH-style mpiexec"))
# All that torch.distributed needs to begin without MPI: its users set them where torchrun does not.
STORE_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Who tells a rank its place, or where the ranks of its job meet.
_PLACE_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "PMIX_NAMESPACE",
    "SLURM_PROCID",
    "HOROVOD_RANK",
    "RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class Launcher:
    """Who started this process as one of `size` ranks (None: the environment does not say how many)."""

    name: str
    evidence: str
    size: int | None
    through_store: bool = False
    """Its ranks meet in torch's TCPStore, not through MPI."""

    def __str__(self) -> str:
        return f"{self.name} ({self.evidence})"


def find_launcher(env: Mapping[str, str]) -> Launcher | None:
    """The launcher that `env` tells of, or None when the process was started alone."""
    if (found := _of_size(env, _MPI_SIZE_VARIABLES)) is not None:
        return found
    in_torchrun = "TORCHELASTIC_RUN_ID" in env
    if env.get("WORLD_SIZE", "").isdecimal() and (in_torchrun or _is_for_torch(env)):
        name = "torchrun" if in_torchrun else "a launcher for torch.distributed"
        return Launcher(name, f"WORLD_SIZE={env['WORLD_SIZE']}", int(env["WORLD_SIZE"]), through_store=True)
    if (found := _of_size(env, _OTHER_SIZE_VARIABLES)) is not None:
        return found
    for variable, name in _PRESENCE_VARIABLES:
        if variable in env:
            return Launcher(name, f"{variable}={env[variable]}", None)
    return None


def place_in(env: Mapping[str, str]) -> str:
    """What tells the ranks that launchers have started apart."""
    return " ".join(f"{name}={env[name]}" for name in _PLACE_VARIABLES if name in env)


def _of_size(env: Mapping[str, str], variables: tuple[tuple[str, str], ...]) -> Launcher | None:
    for variable, name in variables:
        value = env.get(variable, "")
        if value.isdecimal():
            return Launcher(name, f"{variable}={value}", int(value))
    return None


def _is_for_torch(env: Mapping[str, str]) -> bool:
    """Everything is there for ranks to meet in a store, and nothing that lets MPI find them."""
    return all(name in env for name in STORE_VARIABLES) and not any(name in env for name, _ in _PRESENCE_VARIABLES)
