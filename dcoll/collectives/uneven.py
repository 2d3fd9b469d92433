"""Uneven batches: a rank whose data has ended lets the others go on."""

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

from dcoll.job.world import communicator

T = TypeVar("T")


def join(device: int = -1) -> int:
    """Wait until every rank has joined, contributing nothing to their allreduces; return the last rank that joined.

    A joined rank counts as zeros in a sum and in an average, which still divides by size(), and changes no minimum,
    maximum or product. While a rank has joined, collectives other than allreduce raise JoinedError on the others.
    `device` is for Horovod's callers.
    """
    comm = communicator()
    return comm.join(f"rank {comm.rank} joined, others go on")


class Join(Generic[T]):
    """join() as a context manager around a loop over batches, of which ranks may have different numbers:

        with dcoll.Join(loader) as batches:
            for batch in batches:
                ...

    After the block every rank has joined; `last` is the last one. A block left by an exception does not join.
    """

    def __init__(self, batches: Iterable[T]) -> None:
        self.last: int | None = None
        self.steps = 0
        self._batches = batches

    def __iter__(self) -> Iterator[T]:
        for batch in self._batches:
            self.steps += 1
            yield batch

    def __enter__(self) -> "Join[T]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            comm = communicator()
            self.last = comm.join(f"rank {comm.rank} ended after {self.steps} steps, others go on")
