"""The end of a job: a rank that leaves, however it leaves, never keeps the others waiting.

Normal exit     close the communicator, which waits for all ranks to do so, then MPI_Finalize. In both, ranks of this
                machine that compute are waited for without a limit. A failure that the script caught changes nothing:
                it ends with 0, as do all ranks that caught it.
                Without MPI there is nothing to finalize.
Failure         an uncaught error, or sys.exit() with a status: tell the peers its text at once (they raise PeerError
                with it), give them a moment to print theirs, then MPI_Abort: MPI_Finalize would wait for ranks that can
                no longer come. The core counts the time, so exit handlers or threads that hang change nothing.
                Without MPI this process alone ends, at the same time and with the same status: the others raise
                PeerError in their next collective, and the launcher (torchrun) ends those that call none.

Processes that multiprocessing has started do the same at their end, which for those made by fork is os._exit().
"""

import atexit
import builtins
import contextlib
import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import FrameType, TracebackType
from typing import Any, NoReturn

from dcoll import _C
from dcoll.errors import DcollError, text_of
from dcoll.job import environment
from dcoll.job.process_sets import REGISTRY

GRACE_S = 1.0
"""What the peers get to print the error before MPI_Abort ends them."""
STAGGER_S, MOST_STAGGERED = 0.15, 4
"""Between the aborts of two ranks: the first ends the job, and launchers handle two at once badly."""
FOLLOW_S = 1.8
"""When a rank aborts that failed because of another: after that one, whose exit status is to be the job's."""
INTERRUPTED = 130
"""The exit status after Ctrl-C."""


GROUPS: list[_C.Communicator] = []
"""Beside process sets: those of dcoll.torch that were not destroyed yet, in the order in which they were made."""

LEAVING: list[_C.Communicator] = []
"""Those that were destroyed here and not yet by all members, who may still read what lies in this rank's memory."""


def leave_group(comm: _C.Communicator) -> None:
    """Waits for nobody."""
    GROUPS.remove(comm)
    comm.leave()
    LEAVING.append(comm)


class Lifecycle:
    """Owns what has to happen at exit. One per process, from the first init() on."""

    def __init__(self, job: _C.Bootstrap | None) -> None:
        self.job = job
        self._comm: _C.Communicator | None = None
        self._pid = os.getpid()
        self._failed = False
        self._aborts = False
        self._ended = False
        self._next_hook = sys.excepthook
        if parent_process() is not None:
            Finalize(None, self._end_of_child, exitpriority=0)
            _notice_errors_of_child(self)
        atexit.register(self._at_exit)
        sys.excepthook = self._on_exception
        _notice_exits(self)

    def belongs_to_parent(self) -> bool:
        """In a forked child: the place in the job is the parent's."""
        return self.job is not None and os.getpid() != self._pid

    def join(self, comm: _C.Communicator) -> None:
        """From now on `comm` is what has to be closed."""
        self._comm = comm
        self._failed = False

    def leave(self, sets: Sequence[_C.Communicator] = ()) -> None:
        """Close the communicators of process sets, then the job's, then those of torch's groups. Idempotent.

        The groups are left before anybody is waited for: a rank that waits for this one may do so in any of them."""
        comm, self._comm = self._comm, None
        if comm is None:
            return
        while GROUPS:
            leave_group(GROUPS[0])
        sound = [one for one in (*sets, comm) if one.failure() == ""]  # of the others' failures the script has heard
        try:
            for one in (*sets, comm):
                one.close()
        finally:
            self._failed = any(one.failure() != "" for one in sound)
        while LEAVING:
            LEAVING.pop(0).close()
        _C.stop_timeline(comm)

    def fail(self, text: str, exit_code: int) -> None:
        """This process ends because of an error: so does the job."""
        goes_on = parent_process() is None and (hasattr(sys, "ps1") or sys.flags.interactive)
        if os.getpid() != self._pid or self.job is None or goes_on:
            return  # a forked child, a process alone, or one that goes on
        follows = self._comm is not None and self._comm.failure() != ""
        if self._comm is not None:
            for comm in (self._comm, *REGISTRY.communicators(), *GROUPS):
                comm.fail(text)  # the core adds the rank
        self._abort_soon(exit_code, follows)

    def _abort_soon(self, exit_code: int, follows: bool) -> None:
        if self._aborts or self.job is None:
            return
        self._aborts = True
        first = GRACE_S + STAGGER_S * min(self.job.rank, MOST_STAGGERED)
        self.job.abort_after(FOLLOW_S + STAGGER_S * min(self.job.rank, 1) if follows else first, exit_code)

    def _on_exception(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        self.fail(text_of(value), INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)
        self._next_hook(kind, value, trace)
        _flush()  # while there is time: what still runs at exit may hang

    def _end_of_child(self) -> None:
        """multiprocessing reports an error itself, after this, and no hook or exit handler of a forked one runs. From
        Python 3.13 on exit handlers do, which come first, and of an error nothing is known here any more.
        """
        error = sys.exc_info()[1]
        cause, status = error, int(error is not None)
        if isinstance(error, SystemExit):
            cause, status = _cause_of(error), _status_of(error.code)
        if cause is None or status == 0:
            return self._at_exit()
        self.fail(text_of(cause), status)
        time.sleep(GRACE_S / 2)  # the process may end at once now, and the others have to hear first

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or self._ended:
            return  # a forked child: neither the communicator nor the place in the job is its own
        self._ended = True
        may_hang = self._comm is not None or isinstance(self.job, _C.Mpi)
        try:
            self.leave(REGISTRY.communicators())
        except DcollError as error:
            self._failed = True
            with contextlib.suppress(Exception):
                print(f"dcoll: {error}", file=sys.stderr)
        if self.job is None:
            return
        _flush()
        if self._failed or self._aborts:
            self._abort_soon(1, follows=True)
            while True:
                time.sleep(1)  # until then
        rank, limit = self.job.rank, environment.seconds("DCOLL_TIMEOUT")
        if may_hang:  # the job would; who has left one without MPI holds up nobody
            self.job.abort_after(
                limit, 1, f"dcoll: rank {rank} still ran {limit:.0f} s after its program's end (DCOLL_TIMEOUT)."
            )
        self.job.finalize()


def _flush() -> None:
    """As far as it goes. A stream that is closed, whose disk is full or that is no file keeps nobody from ending the
    job; Python itself reports what cannot be written, when it ends."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _status_of(code: object) -> int:
    """The process's, after sys.exit(code)."""
    return 0 if code is None else code & 0xFF if isinstance(code, int) else 1


def _cause_of(error: SystemExit) -> BaseException:
    """torch.multiprocessing ends by one after an error."""
    return error.__context__ or error


def _notice_errors_of_child(lifecycle: Lifecycle) -> None:
    """Have `lifecycle` hear of an error that ends a process of multiprocessing, which prints it."""
    print_error = traceback.print_exc

    @functools.wraps(print_error)
    def print_exc(*args: Any, **kwargs: Any) -> None:
        error = sys.exc_info()[1]
        if _is_end_of_child(sys._getframe(1)) and error is not None:
            lifecycle.fail(text_of(error), 1)
        print_error(*args, **kwargs)

    traceback.print_exc = print_exc


def _is_end_of_child(frame: FrameType | None) -> bool:
    """Whether multiprocessing handles what a process of its has ended by."""
    return frame is not None and frame.f_code is BaseProcess._bootstrap.__code__  # type: ignore[attr-defined]


def _notice_exits(lifecycle: Lifecycle) -> None:
    """Have `lifecycle` hear of it when sys.exit(), exit() or quit() ends the process with a status: no hook is told.

    An exit that somebody catches is none, nor is that of another thread, which ends alone. The exception itself notices
    which it is: at the end of one that nobody caught, and that Python has turned into an exit status, no function of
    the main thread is running any more.
    """
    main_thread = threading.main_thread().ident

    class Exit(SystemExit):
        def __del__(self) -> None:
            caller = sys._getframe().f_back
            uncaught = caller is None and threading.get_ident() == main_thread
            cause, status = self if uncaught else _cause_of(self), _status_of(self.code)
            if (uncaught or _is_end_of_child(caller)) and status != 0:
                lifecycle.fail(text_of(SystemExit(self.code) if cause is self else cause), status)

    def exit(status: object = None, /) -> NoReturn:
        raise Exit(status)

    exit.__doc__ = sys.exit.__doc__
    sys.exit = exit
    quitter: Any = type(getattr(builtins, "exit", None))  # of exit and quit; none with python -S
    if quitter.__module__ == "_sitebuiltins":
        before = quitter.__call__

        def leave(self: object, code: object = None) -> NoReturn:
            with contextlib.suppress(SystemExit):
                before(self, code)  # which closes standard input first
            raise Exit(code)

        quitter.__call__ = leave
