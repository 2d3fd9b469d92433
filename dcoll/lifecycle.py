"""The end of a job: a rank that leaves, however it leaves, never keeps the others waiting.

Normal exit     close the communicator, then MPI_Finalize.
Uncaught error  tell the peers its text at once (they raise PeerError with it), print, give them a moment to print
                theirs, then MPI_Abort: MPI_Finalize would wait for ranks that can no longer come.
"""

import atexit
import os
import sys
import threading
import time
from types import TracebackType

from dcoll import _C
from dcoll.errors import DcollError

GRACE_S = 1.0
"""What the peers get to print the error before MPI_Abort ends them."""
STAGGER_S = 0.1
"""Between the aborts of two ranks: the first ends the job, and launchers handle two at once badly."""
EXIT_LIMIT_S = 15.0
"""What other exit handlers and threads of a failed rank get before MPI_Abort."""


class Lifecycle:
    """Owns what has to happen at exit. One per process, from the first init() on."""

    def __init__(self, mpi: _C.Mpi | None) -> None:
        self.mpi = mpi
        self._comm: _C.Communicator | None = None
        self._pid = os.getpid()
        self._failed = False
        self._next_hook = sys.excepthook
        atexit.register(self._at_exit)
        sys.excepthook = self._on_exception

    def join(self, comm: _C.Communicator) -> None:
        """From now on `comm` is what has to be closed."""
        self._comm = comm
        self._failed = False

    def leave(self) -> None:
        """Close the communicator. Idempotent."""
        comm, self._comm = self._comm, None
        if comm is None:
            return
        self._failed = comm.failure() != ""
        comm.close()
        _C.stop_timeline(comm)

    def _on_exception(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        ends_process = os.getpid() == self._pid and not hasattr(sys, "ps1") and not sys.flags.interactive
        if ends_process and self.mpi is not None:
            self._failed = True
            if self._comm is not None:
                self._comm.fail(f"{kind.__name__}: {value}")  # the core adds the rank
            limit = threading.Timer(EXIT_LIMIT_S, self.mpi.abort, args=(1,))
            limit.daemon = True
            limit.start()
        self._next_hook(kind, value, trace)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: neither the communicator nor MPI is its own
        failed = self._failed
        try:
            self.leave()
        except DcollError as error:
            print(f"dcoll: {error}", file=sys.stderr)
            self._failed = True
        if self.mpi is None:
            return
        if not (failed or self._failed):
            self.mpi.finalize()
            return
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(GRACE_S + STAGGER_S * min(self.mpi.rank, 5))
        self.mpi.abort(1)
