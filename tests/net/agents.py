"""What stands for a launcher where torchrun runs on each host of a lab: python agents.py LAB -n N COMMAND...

One agent a host, of its share of the N ranks, which meet at the first host's address: no MPI, so UCX between hosts.
The status is the first error's.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

import netlab

GRACE_S = 20.0
# Ranks do not see the processes of other hosts, as it is where hosts are machines.
OWN_PROCESSES = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child=TERM")
PORT = 29511


def main(name: str, _n: str, ranks: str, *command: str) -> int:
    lab = netlab.load(name)
    hosts = len(lab.anchors)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--no-python")
    place = ("--nnodes", str(hosts), "--nproc-per-node", str(int(ranks) // hosts))
    meeting = ("--master-addr", lab.address(0), "--master-port", str(PORT))
    agents = [
        subprocess.Popen(
            lab.enter(host, [*OWN_PROCESSES, *torchrun, *place, "--node-rank", str(host), *meeting, *command])
        )
        for host in range(hosts)
    ]

    def end(*_: object) -> None:
        for agent in agents:
            agent.terminate()

    signal.signal(signal.SIGTERM, end)  # of a test that waited for too long
    deadline = float("inf")
    while any(agent.poll() is None for agent in agents) and time.monotonic() < deadline:
        time.sleep(0.05)
        if deadline == float("inf") and any(agent.returncode for agent in agents):
            deadline = time.monotonic() + GRACE_S
    end()
    return next((agent.returncode for agent in agents if agent.wait()), 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
