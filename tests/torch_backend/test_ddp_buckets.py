"""What keeps a bucket of DDP where PyTorch has made it (dcoll/torch/ddp_buckets.py). Jobs check that others move."""

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
    bucket, comm = torch.ones(1 << 15), Full()
    assert places(comm, bucket) == {bucket.data_ptr()}
    assert comm.said == 2 * ["info: a bucket of 131072 bytes of DistributedDataParallel stays where it is: "
                             "no room for 131072 bytes in the arena"]  # fmt: skip
    assert bucket.eq(1).all()
    assert not bucket.is_shared()


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


def test_memory_that_was_moved_and_freed_is_not_taken_for_what_lies_there_now() -> None:
    class Gone:
        def expired(self) -> bool:
            return True

    bucket, other = torch.ones(1 << 15), _C.connect_local(1)[0].alloc(1 << 17)
    ddp_buckets.MOVED[bucket.data_ptr()] = Gone(), other
    assert places(Full(), bucket) == {bucket.data_ptr()}
    assert bucket.data_ptr() not in ddp_buckets.MOVED


def test_only_pages_of_mapped_memory_appear_elsewhere() -> None:
    memory = _C.connect_local(1)[0].alloc(1 << 16)
    assert not memory.mapped
    with pytest.raises(ArgumentError, match="mapped"):
        memory.appear_at(torch.ones(1 << 14).data_ptr(), 1 << 16)
