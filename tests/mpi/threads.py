"""One rank of a job whose script has initialised MPI with a thread level of its own: python threads.py LEVEL."""

import sys

import mpi4py

mpi4py.rc.thread_level = sys.argv[1]
from mpi4py import MPI  # noqa: E402

assert MPI.Query_thread() == {"single": 0, "funneled": 1, "serialized": 2}[sys.argv[1]]

import numpy as np  # noqa: E402

import dcoll as hvd  # noqa: E402

try:
    hvd.init()
except hvd.DcollError as error:
    print(f"refused: {error}", flush=True)
else:
    # Calls of this thread and of the background thread, in turns.
    handles = [hvd.allreduce_async(np.full(1000, float(i)), op=hvd.Sum, name=f"t{i}") for i in range(20)]
    assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [float(hvd.size())] * 3
    for i, handle in enumerate(handles):
        assert (np.asarray(handle.wait()) == i * hvd.size()).all()
    print("works", flush=True)
