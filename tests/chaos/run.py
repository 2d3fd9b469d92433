"""Random cells of the fault matrix until the time is up (`make chaos SECONDS=600`)."""

import argparse
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from cells import PHASES, TRANSPORTS, draw, run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="in total")
    parser.add_argument("--jobs", type=int, default=2, help="at once")
    parser.add_argument("--seed", type=int, help="of everything that is drawn (default: a new one)")
    parser.add_argument("--phase", nargs="+", help="only these")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"chaos: seed {seed}", flush=True)
    dice, end, phases = random.Random(seed), time.monotonic() + args.seconds, args.phase
    counts: Counter[tuple[str, str]] = Counter()
    failed: list[str] = []
    cells = (cell for cell in iter(lambda: draw(dice), None) if phases is None or cell.phase in phases)
    one_at_a_time = threading.Lock()

    def work(_: int) -> None:
        while time.monotonic() < end:
            with one_at_a_time:
                cell = next(cells)
            problem = run(cell)
            with one_at_a_time:
                counts[cell.phase, cell.transport] += 1
                if problem:
                    failed.append(str(cell))
                    print(problem, flush=True)
                if counts.total() % 20 == 0:
                    print(f"chaos: {counts.total()} faults so far, {len(failed)} not as they should be", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(work, range(args.jobs)))
    print(table(counts))
    print(f"chaos: seed {seed}: {counts.total()} faults, {len(failed)} not as they should be: {failed}")
    sys.exit(bool(failed))


def table(counts: Counter[tuple[str, str]]) -> str:
    """How many faults hit each phase over each transport, in Markdown."""
    rows = [["faults", *TRANSPORTS], ["---", *("---:" for _ in TRANSPORTS)]]
    rows += [[phase, *(str(counts[phase, transport]) for transport in TRANSPORTS)] for phase in PHASES]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
