"""What `make demo` runs: the same training on one rank and on two, then what the second rank bought.

Both runs process the same global batches (per-rank batch = global batch / ranks) with one torch thread per rank, so the
accuracies compare and the speed-up is that of the second core.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from progress import terminal_width  # noqa: E402  (beside this file, wherever the demo is started from)

from dcoll.runner.cli import physical_cores  # noqa: E402
from dcoll.runner.command_lines import find_mpirun  # noqa: E402
from dcoll.runner.hosts import UsageError  # noqa: E402

GLOBAL_BATCH = 128
REQUIRED_ACCURACY = 0.97


def mpirun_command(ranks: int) -> list[str]:
    try:
        mpirun = find_mpirun()  # as dcollrun does: that of the MPI dcoll was built with comes first
    except UsageError as error:
        sys.exit(f"demo: {error}")
    command = [mpirun.path, "-n", str(ranks)]
    open_mpi = mpirun.kind == "openmpi"
    if physical_cores() >= 2:  # each rank on its own core; also the single one, so that both runs are alike
        return [*command, "--bind-to", "core:if-supported"] if open_mpi else [*command, "-bind-to", "core"]
    return [*command, "--oversubscribe", "--bind-to", "none"] if open_mpi else command


def train(ranks: int, epochs: int, seed: int) -> dict[str, Any]:
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [
            *mpirun_command(ranks), sys.executable, str(HERE / "train_digits.py"),
            "--epochs", str(epochs), "--batch", str(GLOBAL_BATCH // ranks), "--seed", str(seed), "--threads", "1",
            "--progress", "bar" if terminal_width() else "lines", "--json", str(result),
        ]  # fmt: skip
        print(f"\n{ranks} rank(s), batch {GLOBAL_BATCH // ranks} each:", flush=True)
        code = subprocess.run(command, env=environment, check=False).returncode
        if code != 0:
            sys.exit(f"demo: training on {ranks} rank(s) ended with exit status {code}; the command was\n  "
                     + " ".join(command))  # fmt: skip
        outcome: dict[str, Any] = json.loads(result.read_text())
        return outcome


def print_table(one: dict[str, Any], two: dict[str, Any]) -> None:
    speedup = two["samples_per_second"] / one["samples_per_second"]
    print("\nranks  threads/rank  global batch  test accuracy   samples/s  speed-up")
    for run, factor in ((one, 1.0), (two, speedup)):
        print(f"{run['ranks']:5d}  {run['threads_per_rank']:12d}  {GLOBAL_BATCH:12d}  {run['accuracy']:13.2%}"
              f"  {run['samples_per_second']:10,.0f}  {factor:7.2f}x")  # fmt: skip
    print("One rank is one thread on one core in both rows; samples/s counts training only.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=24, help="passes over the training set (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order (default: %(default)s)")
    args = parser.parse_args()

    cores = physical_cores()
    print(f"Training a convnet on scikit-learn's digits, {args.epochs} epochs, on 1 rank and then on 2.")
    busy = os.getloadavg()[0]
    if cores >= 2 and cores - busy < 1.5:
        print(f"Other programs keep {busy:.1f} of {cores} cores busy: the speed-up will come out too low.")
    if cores < 2:
        print(f"Only {cores} core is available: the two ranks share it, so expect no speed-up.")
    one = train(1, args.epochs, args.seed)
    two = train(2, args.epochs, args.seed)
    print_table(one, two)
    if two["accuracy"] <= REQUIRED_ACCURACY:
        sys.exit(f"demo: accuracy {two['accuracy']:.2%} is not above {REQUIRED_ACCURACY:.0%}")


if __name__ == "__main__":
    main()
