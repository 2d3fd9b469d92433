"""What compression costs and saves, bucket by bucket."""

import dataclasses
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dcoll import _C
from dcoll.job.process_sets import ProcessSet, communicator_of, global_process_set


@dataclasses.dataclass
class Cost:
    """As stats() has it, of a bucket that is encoded in Python."""

    codec: str
    calls: int = 0
    elements: int = 0
    plain_bytes: int = 0
    wire_bytes: int = 0
    saturated: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    wire_seconds: float = 0.0

    @contextmanager
    def timed(self, seconds: str) -> Iterator[None]:
        """seconds: which they are."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, seconds, getattr(self, seconds) + time.perf_counter() - begin)

    def add(self, more: "Cost") -> None:
        for field in dataclasses.fields(self)[1:]:
            setattr(self, field.name, getattr(self, field.name) + getattr(more, field.name))


_of_python: weakref.WeakKeyDictionary[_C.Communicator, dict[str, Cost]] = weakref.WeakKeyDictionary()


def note_cost(comm: _C.Communicator, name: str, cost: Cost) -> None:
    """Of one more call by this name."""
    _of_python.setdefault(comm, {}).setdefault(name, Cost(cost.codec)).add(cost)


def stats(process_set: ProcessSet = global_process_set) -> dict[str, dict[str, Any]]:
    """What this rank's encoded all-reduces have cost since init(), by the name of the bucket or the operation.

    Of those that were encoded: by a codec of the core (Compression.fp16, bf16, int8, topk) or PowerSGD none on one
    node, by a compressor of your own those of DistributedOptimizer. Each has

        codec             "fp16", "bf16", "int8", "topk" and the share that was sent last, "powersgd" and the rank, or
                          the name of your class
        calls             how often
        elements          that this rank has encoded; of the core's float32
        plain_bytes       what it would have sent of them as they are, in a ring
        wire_bytes        what it has sent; of PowerSGD and classes of yours what a ring sends of what they make
        saturated         values that float16 had no room for
        encode_seconds    of this rank's core; on a device until it is handed its work, by PowerSGD and classes of yours
        decode_seconds    ... and of adding up
        wire_seconds      all other time until the result was there: messages, waits, and other ranks of the node. Of
                          PowerSGD and classes of yours the waits that backward did not hide
        residual_norm     of an optimizer's bucket: the length of what is kept for later steps, in units of gradients;
                          not of classes of yours

    PowerSGD's buckets have gradients that travel as they are, too, which count as bytes and not as elements. Call it
    between steps. Raises ArgumentError for a process set that this rank is not in, DcollError before init().

        for name, cost in dcoll.stats().items():
            print(f"{name}: {cost['plain_bytes'] / cost['wire_bytes']:.1f} times less sent")
    """
    comm = communicator_of(process_set)
    found: dict[str, dict[str, Any]] = comm.encoded_costs()
    found |= {name: dataclasses.asdict(cost) for name, cost in _of_python.get(comm, {}).items()}
    if found:
        from dcoll.compression import residuals  # which needs torch, as an optimizer does

        for name, norm in residuals.norms().items():
            if name in found:
                found[name]["residual_norm"] = norm
    return found
