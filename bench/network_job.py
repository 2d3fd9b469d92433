"""One rank of bench/network.py: times a collective of dcoll, MPI and Gloo in turns, in one job on several hosts."""

import json
import os
import random
import sys
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from network_collectives import COLLECTIVES, Call, Collective

import dcoll as hvd
from dcoll import _C
from dcoll.job import world
from dcoll.plan import slice_bytes_of_job

SHORT_BYTES = 256 << 10  # up to here a call takes about as long as the system makes a rank wait for a core:
MORE_TURNS = 3  # so many times the turns
AT_REST_S = 2e-3  # after which the threads of the library before no longer take the cores


def start_gloo(host: str, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    address = f"tcp://{host}:{port}"
    dist.init_process_group(
        "gloo", init_method=address, rank=hvd.rank(), world_size=hvd.size(), timeout=timedelta(seconds=60)
    )


def check(name: str, collective: Collective, count: int) -> None:
    """One call whose result is known."""
    collective.fill(count)
    if not torch.equal(collective.calls[name](count), collective.want(count)):
        raise SystemExit(f"{name}: wrong result for {count} elements on rank {hvd.rank()}")


def turn(call: Call, count: int, calls: int) -> float:
    """Seconds per call, on this rank, after a barrier and a call that does not count; a small one where a turn is one
    call.
    """
    time.sleep(AT_REST_S)
    hvd.barrier()
    call(count if calls > 1 else hvd.size())
    begin = time.perf_counter()
    for _ in range(calls):
        call(count)
    return (time.perf_counter() - begin) / calls


def slowest(seconds: list[float]) -> list[float]:
    """Of every sample, the slowest rank's: a collective takes as long as its last rank."""
    return np.max(np.array(hvd.allgather_object(seconds)), axis=0).tolist()


def prediction(comm: _C.Communicator, nbytes: int) -> dict[str, float]:
    """Seconds per algorithm, what is chosen first."""
    slice_bytes, constants = slice_bytes_of_job(several_nodes=True), comm.constants()
    if comm.num_nodes < comm.size:
        cost = _C.plan.hierarchical(nbytes, comm.nodes, slice_bytes, constants)
        return {"hierarchical": 1e-6 * cost["total_us"]}
    choice = _C.plan.select("all_reduce", nbytes, comm.nodes, slice_bytes, constants)
    return {name: 1e-6 * us for name, us, _, _ in choice["candidates"]}


def main(
    output: str, sizes: str, rounds: int, turn_ms: float, host: str, port: int, only: str, collective_name: str
) -> None:
    torch.set_num_threads(1)
    hvd.init()
    counts = [max(1, int(size) // 4) for size in sizes.split(",")]
    if collective_name != "all_reduce":  # equal parts
        counts = sorted({max(hvd.size(), count // hvd.size() * hvd.size()) for count in counts})
    buffer = torch.zeros(max(*counts, hvd.size()))
    comm = world.communicator()
    # The first large one measures the links: before there are other libraries' threads.
    comm.allreduce_sync(buffer.data_ptr(), buffer.data_ptr(), min(len(buffer), 1 << 16), _C.FLOAT32, _C.SUM, "learn")
    start_gloo(host, port)
    collective = COLLECTIVES[collective_name](buffer)
    columns = collective.calls
    if wanted := [name for name in only.split(",") if name]:
        if unknown := sorted({"dcoll auto", *wanted} - set(columns)):
            raise SystemExit(f"no column is called {unknown[0]!r}: there are {', '.join(columns)}")
        columns = {name: columns[name] for name in columns if name in {"dcoll auto", *wanted}}
    calls_of: dict[tuple[str, int], int] = {}
    samples: dict[tuple[str, int], list[float]] = {}
    for name, call in columns.items():
        for count in counts:
            check(name, collective, count)
            buffer.zero_()
            once = slowest([turn(call, count, 1)])[0]
            calls_of[name, count] = min(max(round(1e-3 * turn_ms / once), 1), 500)
            samples[name, count] = []
    names = list(columns)
    for i in range(MORE_TURNS * rounds):
        for count in counts if i < rounds else [count for count in counts if 4 * count <= SHORT_BYTES]:
            for name in random.Random(f"{i} {count}").sample(names, len(names)):  # on all ranks the same
                samples[name, count].append(turn(columns[name], count, calls_of[name, count]))
    keys = list(samples)
    flat = slowest([second for key in keys for second in samples[key]])
    if hvd.rank() == 0:
        per_node = comm.local_size
        reduces = collective_name == "all_reduce"
        predicted = {4 * count: prediction(comm, 4 * count) for count in counts} if reduces else {}
        rest = iter(flat)
        result = {
            "samples_s": [[name, 4 * count, list(islice(rest, len(samples[name, count])))] for name, count in keys],
            "predicted_s": predicted,
            "constants": comm.constants(),
            "constants_source": comm.constants_source(),
            "nodes": comm.num_nodes,
            "ranks_per_node": per_node,
        }
        Path(output).write_text(json.dumps(result))
    hvd.barrier()
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    if len(sys.argv) != 9:
        print("network_job.py is one rank of bench/network.py, which starts it: see bench/network.py --help")
        sys.exit(0 if {"-h", "--help"} & set(sys.argv) else 2)
    output, sizes, rounds, turn_ms, host, port, only, collective_name = sys.argv[1:]
    main(output, sizes, int(rounds), float(turn_ms), host, int(port), only, collective_name)
