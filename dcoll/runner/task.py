"""What dcoll.run() starts on every rank: fetches the function, calls it, sends back what it returns."""

import os
import pickle

from dcoll.errors import text_of
from dcoll.job.objects import pickled
from dcoll.runner.channel import Channel, connect

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")


def own_rank() -> int:
    """This process's number in the job, before MPI is initialised."""
    found = [os.environ[name] for name in _RANK_VARIABLES if os.environ.get(name, "").isdecimal()]
    return int(found[0]) if found else 0


def main() -> None:
    """The program."""
    address, key = os.environ.pop("_DCOLL_RUN_ADDRESS"), bytes.fromhex(os.environ.pop("_DCOLL_RUN_KEY"))
    rank = own_rank()
    with connect(address, key) as caller:
        caller.send(f"task {rank}".encode())
        task = caller.receive()
    try:
        func, args, kwargs = pickle.loads(task)
        result = pickled(func(*args, **kwargs))
    except Exception as error:
        hand_in(connect(address, key), "error", rank, text_of(error).encode())
        raise
    hand_in(connect(address, key), "result", rank, result)


def hand_in(channel: Channel, what: str, rank: int, data: bytes) -> None:
    """Returns when the caller has it: the job, and with it what the caller listens on, may end then."""
    with channel as caller:
        caller.send(f"{what} {rank}".encode())
        caller.send(data)
        caller.receive()


if __name__ == "__main__":
    main()
