"""The Reducer for compressors in Python: each gradient is compressed, reduced and decompressed by itself.

It has the methods of the core's Reducer (dcoll/_C.pyi), so that GradientSync does not know which one it has. What
compress() returns may have any shape and dtype; only the user's class knows how several would be put together.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from dcoll import _C, on_communicator
from dcoll.errors import ArgumentError
from dcoll.handle import Handle
from dcoll.ops import Max, ReduceOp


class CompressedReducer:
    """Gradients are sent in one order on all ranks: group after group, each when all its gradients are ready."""

    def __init__(
        self,
        comm: _C.Communicator,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        op: ReduceOp,
        compression: Any,
        prescale: float,
        postscale: float,
        groups: Sequence[int],
    ) -> None:
        self.gradients = [torch.zeros_like(p, requires_grad=False) for p in params]
        self._comm = comm
        self._names = names
        self._op = op
        self._compression = compression
        self._scales = prescale, postscale
        self._groups = groups
        self._observed = list(reversed(range(len(params))))
        self._wait_seconds = 0.0
        self.rebuild(self._observed)

    def num_buckets(self) -> int:
        return len(self._units)

    def bucket_params(self, bucket: int) -> list[int]:
        return self._units[bucket]

    def rebuild(self, order: Sequence[int]) -> None:
        units: dict[int, list[int]] = {}
        for i in order:
            units.setdefault(self._groups[i] if self._groups else -1 - i, []).append(i)
        rank = {i: place for place, i in enumerate(order)}
        self._units = sorted(units.values(), key=lambda unit: rank[unit[-1]])
        self._reset()

    def _reset(self) -> None:
        self._ready: dict[int, None] = {}  # in the order they came
        self._next = 0  # the unit to send next
        self._sent: list[tuple[int, Handle, Any]] = []

    def mark_ready(self, param: int, gradient_ptr: int = 0) -> bool:
        if gradient_ptr:
            raise ArgumentError("a compressor in Python takes tensors, not addresses")
        if param in self._ready:
            return False
        self._ready[param] = None
        while self._next < len(self._units) and all(i in self._ready for i in self._units[self._next]):
            self._send(self._units[self._next])
            self._next += 1
        return True

    def _send(self, unit: Sequence[int]) -> None:
        for i in unit:
            if i not in self._ready:
                self.gradients[i].zero_()
            wire, ctx = self._compression.compress(self.gradients[i])
            handle = on_communicator.allreduce(self._comm, wire, self._op, self._names[i], *self._scales)
            self._sent.append((i, handle, ctx))

    def finish(self) -> list[int]:
        try:
            for unit in self._units[self._next :]:
                self._send(unit)
            missing = self.missing()
            used = torch.ones(len(self.gradients), dtype=torch.uint8)
            used[missing] = 0
            handle = on_communicator.allreduce_(self._comm, used, Max, "which gradients there are", 1.0, 1.0)
            begin = time.perf_counter()
            for i, sent, ctx in self._sent:
                self.gradients[i].copy_(self._compression.decompress(sent.wait(), ctx))
            handle.wait()
            self._wait_seconds += time.perf_counter() - begin
            self._observed = [*self._ready, *missing]
            return [i for i in missing if not used[i]]
        finally:
            self._reset()

    def abandon(self) -> int:
        left = len(self.gradients) + 1 - len(self._sent)
        self._reset()
        return left

    def settle(self) -> None:
        pass  # what travels is not what gradients lie in

    def missing(self) -> list[int]:
        return [i for i in range(len(self.gradients)) if i not in self._ready]

    def move(self, params: Sequence[int]) -> list[int]:
        for i in params:
            self.gradients[i] = torch.empty_like(self.gradients[i])
        return list(params)

    def order(self) -> list[int]:
        return self._observed

    def kept(self, param: int) -> dict[str, Any]:
        return {}  # a class of the user's keeps what it likes

    def keep(self, param: int, values: dict[str, Any]) -> None:
        pass

    def wait_seconds(self) -> float:
        return self._wait_seconds
