"""torch.distributed over Gloo, for the benchmarks that compare with it on one machine."""

import socket

import torch

import dcoll as hvd


def join_gloo() -> None:
    """Its default group, of the ranks of dcoll's job. Collective."""
    port = 0
    if hvd.rank() == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    address = f"tcp://127.0.0.1:{hvd.broadcast_object(port, root_rank=0)}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=hvd.rank(), world_size=hvd.size())
