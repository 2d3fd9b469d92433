"""What stands for a launcher that only starts ranks: python plain_ranks.py -n N COMMAND...

It sets what torch.distributed's users set where there is no torchrun. A rank that dies by a signal ends nobody; when
one has ended with an error, the others have a while to do so too. The status is the first error's.
"""

import os
import signal
import socket
import subprocess
import sys
import time

GRACE_S = 5.0


def main(n: int, *command: str) -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts what it puts in the background deaf to it
    job = os.environ | {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [subprocess.Popen(command, env=job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(n)]

    def end(*_: object) -> None:
        for rank in ranks:
            rank.kill()

    signal.signal(signal.SIGTERM, end)
    while not any((rank.poll() or 0) > 0 for rank in ranks):
        if all(rank.returncode is not None for rank in ranks):
            return next((rank.returncode for rank in ranks if rank.returncode), 0)
        time.sleep(0.05)
    first = next(rank.returncode for rank in ranks if (rank.returncode or 0) > 0)
    deadline = time.monotonic() + GRACE_S
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    end()
    return first


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[2]), *sys.argv[3:]) & 0xFF)
