"""The stress test over 2 to 8 ranks, twice each: no wrong byte, and the same bits again (`make stress SECONDS=600`).

Half of the time goes into runs that end by the clock, half into repeating exactly those operations with another way of
waiting, so that the timing differs as much as it can and the results may not.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "mpi"))

from mpirun import find_mpirun, is_open_mpi  # noqa: E402


def run_ranks(n: int, seed: int, report: Path, limit_s: float, *arguments: str, **env: str) -> list[str]:
    """The hashes of all rounds; ends the program when the job fails."""
    options = ["--oversubscribe", "--bind-to", "none"] if is_open_mpi() else []
    job = [find_mpirun(), *options, "-n", str(n), sys.executable, str(HERE / "stress.py"), "--seed", str(seed)]
    job += ["--report", str(report), *arguments]
    process = subprocess.Popen(job, env=os.environ | {"OMP_NUM_THREADS": "1"} | env)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpirun ends its ranks; they have shown their stacks by now
        process.wait()
        sys.exit(f"stress: {' '.join(job)} still ran after {limit_s:.0f} s")
    if status != 0:
        settings = " ".join(f"{name}={value}" for name, value in env.items())
        sys.exit(f"stress: exit status {status} of {settings} {' '.join(job)}")
    hashes: list[str] = json.loads(report.read_text())["hashes"]
    return hashes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="in total")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(range(2, 9)), help="how many, one after the other")
    parser.add_argument("--seed", type=int, help="of everything that is drawn (default: a new one)")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        for done, n in enumerate(args.ranks):
            left = args.seconds - (time.monotonic() - begin)
            share = max(left / (len(args.ranks) - done), 1.0)
            first = run_ranks(n, seed, report, share + 120, "--seconds", str(share / 2))
            again = run_ranks(n, seed, report, share + 120, "--rounds", str(len(first)), DCOLL_SPIN_US="20")
            if first != again:
                different = [i for i, (a, b) in enumerate(zip(first, again, strict=True)) if a != b]
                sys.exit(f"stress: {n} ranks, seed {seed}: other bits in the second run, in rounds {different}")
    print(
        f"stress: {time.monotonic() - begin:.0f} s, ranks {args.ranks}, seed {seed}: no wrong byte, the same bits again"
    )


if __name__ == "__main__":
    main()
