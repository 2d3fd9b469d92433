"""What is installed, what of it dcoll can use, and what to do about the rest. Works without the compiled core."""

import os

from dcoll.doctor import job, machine
from dcoll.doctor.finding import Finding, Level, report


def examine() -> int:
    """Check this machine, or under mpirun the job, and print what was found; 1 when something is broken."""
    if job.is_started(os.environ):
        findings = job.examine()
        if findings is None:  # another rank prints
            return 0
    else:
        findings = machine.examine()
    print(report(findings), flush=True)
    return int(any(finding.level is Level.BROKEN for finding in findings))


__all__ = ["Finding", "Level", "examine"]
