"""Checks of a job on several hosts. The exhaustive ones need no network; these show that what crosses one is right."""

import contextlib
import os
import select
import shutil
import socket
import tempfile
from collections.abc import Iterator

import torch
from checks_collectives import check_mismatch, check_objects  # noqa: F401  checks of this module too
from reference import reduced, sample

import dcoll as hvd
from dcoll import _C
from dcoll.job import world
from dcoll.job.process_sets import communicator_of


def check_every_host_is_a_node() -> None:
    per_host = int(os.environ["RANKS_PER_HOST"])
    names = hvd.allgather_object(os.uname().nodename)
    assert names == [f"h{rank // per_host}" for rank in range(hvd.size())]
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank() % per_host, per_host)
    assert (hvd.cross_rank(), hvd.cross_size()) == (hvd.rank() // per_host, hvd.size() // per_host)


def check_allreduce() -> None:
    n = hvd.size()
    for dtype, op in ((torch.float32, hvd.Sum), (torch.float32, hvd.Average), (torch.bfloat16, hvd.Max)):
        for count in (0, 1, n - 1, n + 1, 1001, 300_007):
            inputs = [sample(rank, count, dtype, op) for rank in range(n)]
            want, mine = reduced(inputs, op), inputs[hvd.rank()]
            assert torch.equal(hvd.allreduce(mine, op=op), want), (dtype, op, count)
            assert hvd.allreduce_(mine, op=op) is mine
            assert torch.equal(mine, want), (dtype, op, count)


def connections_to_other_hosts() -> list[str]:
    """The congestion control of each."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                here, there = connection.getsockname()[0], connection.getpeername()[0]
                if here != there and not there.startswith("127."):
                    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                    found.append(name.rstrip(b"\0").decode())
    return found


@contextlib.contextmanager
def foreign_connection() -> Iterator[socket.socket | None]:
    """What another library in the process may have: rank 0's host and that of the last rank are connected by it."""
    first, last = hvd.rank() == 0, hvd.rank() == hvd.size() - 1
    listener = socket.create_server(("0.0.0.0", 0)) if first else None
    port = hvd.broadcast_object(listener.getsockname()[1] if listener else None, root_rank=0)
    mine = socket.create_connection(("h0", port)) if last else None
    if listener:
        mine = listener.accept()[0]
    watcher = select.epoll()
    if mine:
        mine.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        watcher.register(mine, select.EPOLLIN)
    yield mine
    for one in (watcher, listener, mine):
        if one:
            one.close()


def check_congestion_control() -> None:
    assert os.environ["DCOLL_TCP_CONGESTION"] == "reno"
    with foreign_connection() as foreign:
        hvd.shutdown()
        hvd.init()
        hvd.allreduce(torch.ones(300_007))
        hvd.alltoall(torch.ones(hvd.size() * 100_000))
        found = connections_to_other_hosts()
        if foreign:
            found.remove("cubic")
            kept = foreign.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert kept.rstrip(b"\0") == b"cubic"
        assert set(found) == {"reno"}, found


def check_broadcast() -> None:
    for root in range(hvd.size()):
        assert torch.equal(hvd.broadcast(torch.arange(70_001) + hvd.rank(), root), torch.arange(70_001) + root)


def check_allgather() -> None:
    parts = [torch.arange(3 * rank * 5001).view(-1, 3) for rank in range(hvd.size())]
    assert torch.equal(hvd.allgather(parts[hvd.rank()]), torch.cat(parts))


def check_reducescatter() -> None:
    n = hvd.size()
    for rows in (0, 1, n + 1, 40_001):
        inputs = [sample(rank, rows * 3, torch.float32, hvd.Sum).view(rows, 3) for rank in range(n)]
        want = torch.tensor_split(reduced(inputs, hvd.Sum), n)[hvd.rank()]
        assert torch.equal(hvd.reducescatter(inputs[hvd.rank()], op=hvd.Sum), want)


def check_alltoall() -> None:
    n, r = hvd.size(), hvd.rank()
    sent = [torch.arange(n * 9001) + 1_000_000 * rank for rank in range(n)]
    got = hvd.alltoall(sent[r])
    assert torch.equal(got, torch.cat([part.split(9001)[r] for part in sent]))


def check_many_in_flight() -> None:
    handles = [hvd.allreduce_async(torch.full((i + 1,), float(i)), op=hvd.Sum, name=f"t{i}") for i in range(16)]
    hvd.barrier()
    for i, handle in enumerate(handles):
        assert handle.wait(5.0).tolist() == [float(i * hvd.size())] * (i + 1)


def check_a_set_takes_what_the_job_knows() -> None:
    os.environ["DCOLL_CALIBRATE"] = "force"
    hvd.shutdown()
    hvd.init()
    ranks = list(range(hvd.size() - 1))  # on several hosts
    several = hvd.add_process_set(ranks)  # for which ranks talk, and so measure
    if several.included():
        ones = torch.ones(300_007)
        assert torch.equal(hvd.allreduce(ones, op=hvd.Sum, process_set=several), ones * len(ranks))
        comm = communicator_of(several)
        assert comm.constants_source() == "the job's"
        assert comm.constants() == world.communicator().constants() != _C.plan.constants()
    hvd.remove_process_set(several)


def check_links_are_measured_once_and_kept() -> None:
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, root_rank=0)
    os.environ |= {"DCOLL_CALIBRATE": "auto", "DCOLL_CACHE_DIR": folder}
    sources, constants = [], []
    for _ in range(2):
        hvd.shutdown()
        hvd.init()
        ones = torch.ones(300_007)
        assert torch.equal(hvd.allreduce(ones, op=hvd.Sum), ones * hvd.size())
        comm = world.communicator()
        sources.append(comm.constants_source())
        constants.append(comm.constants())
    assert sources[0].startswith("measured in ")
    assert sources[1].startswith(folder)
    assert constants[0] == constants[1] != _C.plan.constants()
    assert all(other == constants for other in hvd.allgather_object(constants))
    assert constants[0]["network"]["beta_us_per_byte"] > 0
    hvd.barrier()
    if hvd.rank() == 0:
        assert len(os.listdir(folder)) == 1
        shutil.rmtree(folder)
