"""`python -m dcoll doctor`: what is installed, and what keeps it from working."""

import argparse
import sys


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
    parser.parse_args(argv)
    from dcoll.doctor import examine

    return examine()


if __name__ == "__main__":
    sys.exit(main())
