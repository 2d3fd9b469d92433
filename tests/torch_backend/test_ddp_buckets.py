"""What keeps a bucket of DDP where PyTorch has made it (dcoll/torch/ddp_buckets.py). Jobs check that others move."""

import errno
import os
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcoll import _C, ArgumentError, TransportError
from dcoll.torch import ddp_buckets


class Full:
    """A communicator whose arena has no room."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def alloc(self, nbytes: int) -> Any:
        raise TransportError(f"no room for {nbytes} bytes in the arena")

    def log(self, level: str, text: str) -> None:
        self.said.append(f"{level}: {text}")


def places(comm: Any, bucket: torch.Tensor, calls: int = 4) -> set[int]:
    return {ddp_buckets.place_of(comm, bucket) for _ in range(calls)}


def test_without_room() -> None:
    """Tried once: each try costs files and memory."""
    bucket, comm = torch.ones(1 << 15), Full()
    assert places(comm, bucket) == {bucket.data_ptr()}
    assert comm.said == ["info: a bucket of 131072 bytes of DistributedDataParallel stays where it is: "
                         "no room for 131072 bytes in the arena"]  # fmt: skip
    assert bucket.eq(1).all()
    assert not bucket.is_shared()


class Mapped(Full):
    """A communicator whose memory is said to be mapped, and is not."""

    mapped = True

    def alloc(self, nbytes: int) -> Any:
        return self

    def appear_at(self, address: int, nbytes: int) -> None:
        raise ArgumentError("it is not mapped")


@pytest.mark.parametrize("what", ["room", "files", "pages"])
def test_what_is_missing_leaves_nothing_open(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(path: str) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=32, f_frsize=4096)

    def no_files(*_: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    if what == "room":
        monkeypatch.setattr(os, "statvfs", no_room)
    if what == "files":
        monkeypatch.setattr(os, "open", no_files)
    bucket, comm = torch.ones(1 << 15), Mapped()
    before = set(os.listdir("/proc/self/fd"))
    assert len(places(comm, bucket)) <= 2  # with pages of its own it is elsewhere
    assert len(set(os.listdir("/proc/self/fd")) - before) == (what == "pages")  # which PyTorch keeps
    text = {"room": "/dev/shm has no room", "files": os.strerror(errno.EMFILE), "pages": "it is not mapped"}[what]
    assert len(comm.said) == 1
    assert text in comm.said[0]
    assert bucket.eq(1).all()


def test_alone_on_a_node() -> None:
    bucket = torch.ones(1 << 15)
    assert places(_C.connect_local(1)[0], bucket) == {bucket.data_ptr()}
    assert not bucket.is_shared()


@pytest.mark.parametrize("name", ["part", "shared", "of other memory"])
def test_what_does_not_move(name: str) -> None:
    bucket = {
        "part": torch.ones(1 << 16)[1 << 15 :],
        "shared": torch.ones(1 << 15).share_memory_(),
        "of other memory": torch.frombuffer(bytearray(1 << 17), dtype=torch.float32),
    }[name]
    comm = Full()
    assert places(comm, bucket) == {bucket.data_ptr()}
    assert comm.said == []


def test_a_storage_that_is_gone_is_not_taken_for_another() -> None:
    comm = Full()
    for _ in range(8):  # malloc() gives the same address again
        ddp_buckets.place_of(comm, torch.ones(1 << 15))
    assert comm.said == []


def test_a_storage_keeps_the_memory_it_has_and_no_longer() -> None:
    bucket, memory = torch.ones(1 << 15), _C.connect_local(1)[0].alloc(1 << 17)
    setattr(bucket.untyped_storage(), ddp_buckets.KEY, (bucket.data_ptr(), memory))
    kept, place = weakref.ref(memory), memory.address
    del memory
    part = bucket[1:]
    assert places(Full(), bucket) == {place}
    del bucket
    assert kept() is not None
    del part
    assert kept() is None


def test_a_storage_that_was_given_other_memory_is_found_there() -> None:
    bucket = torch.ones(1 << 15)
    setattr(bucket.untyped_storage(), ddp_buckets.KEY, (0, _C.connect_local(1)[0].alloc(1 << 17)))
    assert places(Full(), bucket) == {bucket.data_ptr()}


def test_only_pages_of_mapped_memory_appear_elsewhere() -> None:
    memory = _C.connect_local(1)[0].alloc(1 << 16)
    assert not memory.mapped
    with pytest.raises(ArgumentError, match="mapped"):
        memory.appear_at(torch.ones(1 << 14).data_ptr(), 1 << 16)
