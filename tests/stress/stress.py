"""Random collectives until the time is up, every byte of every result checked. One rank of

    mpirun -n 4 python tests/stress/stress.py --seconds 60 --seed 1

tests/stress/run.py does it for 2 to 8 ranks and compares two runs (`make stress`). The seed and the number of ranks fix
what is called; only the timing differs. When a round fails, `--seed S --first-round R --rounds 1` runs it again.
"""  # fmt: skip

import argparse
import contextlib
import faulthandler
import hashlib
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
from operand import Pool
from operations import OPERATIONS, Context, Started

import dcoll

IN_FLIGHT = 6
ROUND_TIMEOUT_S = 90.0  # a round takes a second or two; after this every rank shows where it stands


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="end with the round that is running then")
    parser.add_argument("--rounds", type=int, default=0, help="run exactly so many rounds, whatever --seconds says")
    parser.add_argument("--first-round", type=int, default=0, help="where to begin")
    parser.add_argument("--operations", type=int, default=40, help="per round")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what was done there, as JSON (rank 0)")
    return parser.parse_args()


class Round:
    """Operations in flight, finished out of order, with pauses that differ from rank to rank."""

    def __init__(self, args: argparse.Namespace, number: int, pool: Pool) -> None:
        self.args, self.number = args, number
        self.context = Context(dcoll.rank(), dcoll.size(), pool)
        self.own_dice = random.Random(f"{args.seed}/{number}/rank {dcoll.rank()}")
        self.pending: list[Started] = []

    def run(self) -> str:
        """The hash of all ranks' results that are not compared with an expected value."""
        c = self.context
        for c.index in range(self.args.operations):
            c.dice = random.Random(f"{self.args.seed}/{c.size}/{self.number}/{c.index}")
            self.pause()
            with self.naming(f"operation {c.index}"):
                self.pending.append(c.dice.choice(OPERATIONS)(c))
            while self.pending and (len(self.pending) > IN_FLIGHT or self.own_dice.random() < 0.35):
                self.finish_one()
        while self.pending:
            self.finish_one()
        return self.compare_hashes()

    def pause(self) -> None:
        kind = self.own_dice.random()
        if kind < 0.05:
            time.sleep(self.own_dice.uniform(0, 0.01))
        elif kind < 0.055:
            time.sleep(self.own_dice.uniform(0, 0.1))
        elif kind < 0.1:
            end = time.perf_counter() + self.own_dice.uniform(0, 0.002)
            while time.perf_counter() < end:
                pass

    def finish_one(self) -> None:
        one = self.pending.pop(self.own_dice.randrange(len(self.pending)))
        with self.naming(one.what):
            if one.handle is None:
                one.check(one.result)
                return
            if self.own_dice.random() < 0.2:
                one.handle.poll()
            if one.mismatched:
                try:
                    one.handle.wait()
                except dcoll.MismatchError:
                    one.check(None)
                    return
                raise AssertionError("no MismatchError")
            one.check(dcoll.synchronize(one.handle))

    @contextlib.contextmanager
    def naming(self, what: str):  # type: ignore[no-untyped-def]
        try:
            yield
        except Exception as error:
            error.add_note(
                f"rank {dcoll.rank()} of {dcoll.size()}, {what}: --seed {self.args.seed} --operations "
                f"{self.args.operations} --first-round {self.number} --rounds 1"
            )
            raise

    def compare_hashes(self) -> str:
        with self.naming("comparing the hashes"):
            everybody = dcoll.allgather_object(sorted(self.context.hashes))
            for entries in zip(*everybody, strict=True):
                index, what, digest, same = entries[0]
                different = [rank for rank, entry in enumerate(entries) if same and entry[2] != digest]
                assert not different, f"operation {index}, {what}: other bits on ranks {different} than on rank 0"
        return hashlib.sha1(repr(everybody).encode(), usedforsecurity=False).hexdigest()


def run_rounds(args: argparse.Namespace) -> list[str]:
    pool = Pool()
    hashes: list[str] = []
    end = time.monotonic() + args.seconds
    while True:
        faulthandler.dump_traceback_later(ROUND_TIMEOUT_S, exit=True)
        hashes.append(Round(args, args.first_round + len(hashes), pool).run())
        late = dcoll.allreduce(np.array([time.monotonic() >= end]), op=dcoll.Max)
        if len(hashes) == args.rounds or (args.rounds == 0 and late[0]):
            faulthandler.cancel_dump_traceback_later()
            return hashes


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    faulthandler.enable()
    dcoll.init()
    hashes = run_rounds(args)
    if dcoll.rank() == 0:
        total = hashlib.sha1("".join(hashes).encode(), usedforsecurity=False).hexdigest()
        print(f"{dcoll.size()} ranks, seed {args.seed}: {len(hashes)} rounds of {args.operations} operations, no wrong "
              f"byte; hash of the real results {total}", flush=True)  # fmt: skip
        if args.report:
            args.report.write_text(json.dumps({"hashes": hashes, "operations": args.operations}))


if __name__ == "__main__":
    main()
