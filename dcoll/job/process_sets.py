"""Process sets: collectives among some of the ranks.

A set has a communicator of its own, so collectives on different sets neither wait for nor meet each other. Creating and
removing one is a collective of all ranks. Inside a node its ranks use the memory they have mapped already; between
nodes they have messages of their own.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from dcoll import _C
from dcoll.errors import ArgumentError, MismatchError
from dcoll.job import objects

WHO_MAY = "a process set takes a sequence of ranks or an mpi4py communicator"


class ProcessSet:
    """Some of the job's ranks. Pass it to init() or add_process_set(), then as process_set= to collectives."""

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None
    comm: _C.Communicator | None = None  # of the set; None where this rank is not in it

    def __init__(self, ranks_or_comm: Any) -> None:
        if isinstance(ranks_or_comm, Iterable):
            self.ranks = sorted(_as_rank(rank) for rank in ranks_or_comm)
        elif hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
        else:
            raise ArgumentError(f"{WHO_MAY}, but got {ranks_or_comm!r}")

    def included(self) -> bool | None:
        """Whether this process is one of the set. None before the set was added."""
        return None if self.process_set_id is None or not self.ranks else self.comm is not None

    def size(self) -> int | None:
        """How many ranks the set has. None before it was added."""
        return None if self.process_set_id is None or not self.ranks else len(self.ranks)

    def rank(self) -> int | None:
        """This process's number in the set. None before it was added. Roots are given by rank(), not by this."""
        if self.process_set_id is None or not self.ranks:
            return None
        return communicator_of(self).rank

    def _open(self, number: int, ranks: list[int], comm: _C.Communicator | None) -> None:
        self.process_set_id, self.ranks, self.comm = number, ranks, comm
        if comm is not None:
            _C.set_process_set(self, comm)

    def _close(self) -> None:
        _C.set_process_set(self, None)
        self.comm = None
        self.process_set_id = self.ranks = self.mpi_comm = None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    def __repr__(self) -> str:
        return "dcoll.global_process_set" if self is global_process_set else str(self)


global_process_set = ProcessSet([])
"""All ranks of the job."""
global_process_set.process_set_id = 0


def _as_rank(rank: Any) -> int:
    try:
        return operator.index(rank)
    except TypeError:
        raise ArgumentError(f"{WHO_MAY}, but one of the ranks is {rank!r}") from None


def communicator_of(process_set: Any) -> _C.Communicator:
    """The communicator of a set this rank is in; what is wrong otherwise."""
    if not isinstance(process_set, ProcessSet):
        raise ArgumentError(f"process_set is {process_set!r}, but must be a dcoll.ProcessSet that was added")
    if process_set.comm is not None:
        return process_set.comm
    if process_set is global_process_set or global_process_set.comm is None:
        raise ValueError("dcoll has not been initialized; use dcoll.init().")
    if process_set.process_set_id is None:
        raise ArgumentError(
            f"{process_set} is not known to this job: pass it to dcoll.add_process_set() or dcoll.init() "
            "on all ranks first"
        )
    raise ArgumentError(
        f"rank {global_process_set.comm.rank} called a collective on {process_set}, of which it is none: call it only "
        "where process_set.included()"
    )


def communicator_if_included(process_set: Any) -> _C.Communicator | None:
    """The same, None being all ranks; None where this rank is not in the set."""
    one = global_process_set if process_set is None else process_set
    if one is global_process_set or one.included() is None:
        return communicator_of(one)
    comm: _C.Communicator | None = one.comm
    return comm


def root_in(process_set: ProcessSet, root_rank: int) -> int:
    """The number in the set of a rank of the job, which is how roots are given."""
    if process_set is global_process_set:
        return root_rank
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        raise ArgumentError(
            f"root_rank is {root_rank}, but must be one of the set's ranks {ranks} (numbers of the job, not of the set)"
        )
    return ranks.index(root_rank)


class Registry:
    """The sets of the job beside the global one. Every rank makes the same changes in the same order."""

    def __init__(self) -> None:
        self.job: _C.Bootstrap | None = None
        self._by_id: dict[int, list[ProcessSet]] = {}  # several objects may stand for the same ranks
        self._comms: dict[int, _C.Communicator] = {}
        self._last_id = 0

    def open(self, comm: _C.Communicator, job: _C.Bootstrap | None) -> None:
        """The job has begun. job: of just its ranks."""
        self.job = job
        global_process_set._open(0, list(range(comm.size)), comm)
        self._by_id = {0: [global_process_set]}

    def communicators(self) -> list[_C.Communicator]:
        """Of the sets this rank is in, in the order in which they were made."""
        return [self._comms[number] for number in sorted(self._comms)]

    def close(self) -> None:
        """Forget all sets, once their communicators are closed."""
        for known in self._by_id.values():
            for process_set in known:
                process_set._close()
        global_process_set.process_set_id, global_process_set.ranks = 0, []
        self._by_id, self._comms, self._last_id, self.job = {}, {}, 0, None

    def add(self, process_set: ProcessSet, may_exist: bool) -> None:
        """Make the set's communicator. Collective over all ranks."""
        whole = communicator_of(global_process_set)
        if process_set.process_set_id is not None:
            raise ArgumentError(f"{process_set} was added already")
        by_comm = process_set.mpi_comm is not None
        ranks = _ranks_of(process_set.mpi_comm, whole) if by_comm else list(process_set.ranks or [])
        told = objects.allgather_object(whole, (by_comm, ranks), "add_process_set")
        for rank, (_, theirs) in enumerate(told):
            if wrong := _what_is_wrong(theirs, whole):
                raise ArgumentError(f"add_process_set: rank {rank}: {wrong}")
        # Of communicators, each rank knows the one it is in; all are added at once.
        for one in _distinct([(kind, tuple(listed)) for kind, listed in told]):
            known = self._find(one)
            if known is not None and not may_exist:
                raise ArgumentError(f"a process set of the ranks {list(one)} exists already: {self._by_id[known][0]}")
            if known is not None:
                number, comm = known, self._comms.get(known, whole if known == 0 else None)
            else:
                self._last_id += 1
                number, comm = self._last_id, None
                if whole.rank in one:
                    comm = _C.make_group(whole, one, self.job)
                    self._comms[number] = comm
            if list(one) == ranks:
                process_set._open(number, list(one), comm)
                self._by_id.setdefault(number, []).append(process_set)
            elif known is None:
                other = ProcessSet(one)
                other._open(number, list(one), None)
                self._by_id[number] = [other]

    def adopt(self, process_sets: Sequence[ProcessSet]) -> None:
        """Have the sets stand for those of the job that have the same ranks; ArgumentError where there is none."""
        for one in process_sets:
            if one.process_set_id is not None:
                continue
            number = self._find(tuple(one.ranks or ()))
            if number is None:
                raise ArgumentError(
                    f"init() was called before, without {one}, and calling it again changes nothing: pass the set to "
                    "dcoll.add_process_set()"
                )
            one._open(number, list(one.ranks or ()), self._by_id[number][0].comm)
            self._by_id[number].append(one)

    def _find(self, ranks: tuple[int, ...]) -> int | None:
        return next((number for number, sets in self._by_id.items() if tuple(sets[0].ranks or ()) == ranks), None)

    def remove(self, process_set: ProcessSet) -> bool:
        """Close the set and forget all objects that stand for it. Collective over all ranks."""
        whole = communicator_of(global_process_set)
        number = process_set.process_set_id
        objects.agree(whole, [f"process set {number}"], "remove_process_set", "Remove the same set on every rank.")
        if not number or number not in self._by_id:
            return False
        comm = self._comms.pop(number, None)
        if comm is not None:
            comm.close()
        for known in self._by_id.pop(number):
            known._close()
        return True


REGISTRY = Registry()


def _what_is_wrong(ranks: list[int], whole: _C.Communicator) -> str:
    if not ranks or len(set(ranks)) != len(ranks) or not 0 <= min(ranks) <= max(ranks) < whole.size:
        return f"got the ranks {ranks}, but a set needs different ranks from 0 to {whole.size - 1}, at least one"
    return ""


def _distinct(told: list[tuple[bool, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """The sets that are to be made, from what each rank said."""
    first = told[0]
    if not any(by_comm for by_comm, _ in told):
        if all(one == first for one in told):
            return [first[1]]
    elif all(by_comm and rank in ranks and all(told[peer][1] == ranks for peer in ranks)
             for rank, (by_comm, ranks) in enumerate(told)):  # fmt: skip
        return sorted({ranks for _, ranks in told})
    said = "".join(f"\n  rank {rank}: {list(ranks)}" for rank, (_, ranks) in enumerate(told))
    raise MismatchError(f"add_process_set: the ranks gave different sets:{said}\nPass the same ranks on every rank.")


def ranks_in_world(mpi_comm: Any) -> list[int]:
    """The ranks in MPI_COMM_WORLD of an mpi4py communicator's members."""
    from mpi4py import MPI

    group = mpi_comm.Get_group()
    return list(MPI.Group.Translate_ranks(group, list(range(group.Get_size())), MPI.COMM_WORLD.Get_group()))


def _ranks_of(mpi_comm: Any, whole: _C.Communicator) -> list[int]:
    """The ranks in the job of an mpi4py communicator's members, ascending."""
    from mpi4py import MPI

    in_world = objects.allgather_object(whole, int(MPI.COMM_WORLD.Get_rank()), "process set")
    return sorted(in_world.index(rank) for rank in ranks_in_world(mpi_comm))


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set, on all ranks at once: those that are not in it call this too. Returns the set.

    ArgumentError, a ValueError, when a set of these ranks exists. Sets may overlap.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    REGISTRY.add(made, may_exist=False)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Finish what runs on a set and forget it, on all ranks at once. False for the global set and unknown ones."""
    return REGISTRY.remove(process_set)
