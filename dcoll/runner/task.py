"""What dcoll.run() starts on every rank: fetches the function, calls it, sends back what it returns."""

import os
import pickle
from multiprocessing.connection import Client, Connection

from dcoll.objects import pickled

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")


def own_rank() -> int:
    """This process's number in the job, before MPI is initialised."""
    found = [os.environ[name] for name in _RANK_VARIABLES if os.environ.get(name, "").isdecimal()]
    return int(found[0]) if found else 0


def connect(address: str, key: bytes) -> Connection:
    """To the process that called run(). address: a socket's path, or host,host,...:port."""
    if address.startswith("/"):
        return Client(address, authkey=key)
    hosts, _, port = address.rpartition(":")
    failures = []
    for host in hosts.split(","):
        try:
            return Client((host, int(port)), authkey=key)
        except OSError as error:
            failures.append(f"{host}: {error}")
    raise ConnectionError(f"the host that called dcoll.run() cannot be reached: {'; '.join(failures)}")


def main() -> None:
    """The program."""
    address, key = os.environ.pop("_DCOLL_RUN_ADDRESS"), bytes.fromhex(os.environ.pop("_DCOLL_RUN_KEY"))
    rank = own_rank()
    with connect(address, key) as peer:
        peer.send(("task", rank))
        data = peer.recv_bytes()
    try:
        func, args, kwargs = pickle.loads(data)
        result = pickled(func(*args, **kwargs))
    except Exception as error:
        with connect(address, key) as peer:
            peer.send(("error", rank, f"{type(error).__name__}: {error}"))
        raise
    with connect(address, key) as peer:
        peer.send(("result", rank))
        peer.send_bytes(result)


if __name__ == "__main__":
    main()
