"""`python -m dcoll doctor`: what is installed, and what keeps it from working; `timeline`: one of several files."""

import argparse
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m dcoll", description="dcoll's own programs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser(
        "doctor",
        help="check compiler, MPI, launcher, shared memory, CUDA and affinity; under mpirun also the network",
        description="Check what dcoll needs, and say what to do. Under mpirun it checks the whole job. Exit status 1 "
        "when something keeps dcoll from working.",
    )
    timeline = commands.add_parser(
        "timeline",
        help="make one timeline of the files of several ranks",
        description="Make one timeline of those that dcoll.start_timeline('trace.{rank}.json') wrote. The clocks of "
        "nodes are brought together by the operations they took part in.",
    )
    timeline.add_argument("output", type=Path, help="the file to write")
    timeline.add_argument("files", type=Path, nargs="+", help="the files of the ranks")
    args = parser.parse_args(argv)
    if args.command == "timeline":
        from dcoll.job import timeline_merge

        timeline_merge.write(args.output, args.files)
        return 0
    from dcoll.doctor import examine

    return examine()


if __name__ == "__main__":
    sys.exit(main())
