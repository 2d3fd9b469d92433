"""What Reducers in Python have in common, and the one for compressors in Python: each gradient by itself.

They have the methods of the core's Reducer (dcoll/_C.pyi), so that GradientSync does not know which one it has. What
compress() returns may have any shape and dtype; only the user's class knows how several would be put together.
"""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcoll import _C
from dcoll.collectives import grouped, on_communicator
from dcoll.collectives.handle import Handle
from dcoll.collectives.stats import Cost, note_cost
from dcoll.compression.codecs import StatefulCompressor
from dcoll.errors import ArgumentError, text_of
from dcoll.ops import Average, Max, ReduceOp
from dcoll.optimizer.host_reducer import has_streams


@dataclass(frozen=True)
class ReducerOptions:
    """What every Reducer in Python is made of."""

    comm: _C.Communicator
    params: Sequence[torch.Tensor]
    names: Sequence[str]
    op: ReduceOp
    prescale: float
    postscale: float
    groups: Sequence[Hashable]
    """Of each parameter, what it is reduced with; ()."""
    bucket_bytes: int
    first_bucket_bytes: int
    label: str
    """The optimizer's, which ranks compare."""


class PythonReducer:
    """Gradients are sent in one order on all ranks: unit after unit, each when all its gradients are ready."""

    def __init__(self, options: ReducerOptions, scheduled: bool = False) -> None:
        """scheduled: what is sent depends on the number of the round. Without groups each parameter is by itself."""
        self.gradients = [torch.zeros_like(p, requires_grad=False) for p in options.params]
        self._comm = options.comm
        self._names = options.names
        self._op = options.op
        self._scales = options.prescale, options.postscale
        self._groups = options.groups
        self._rounds = _C.Rounds(options.comm, f"schedule of {options.label}", scheduled)
        self._observed = list(reversed(range(len(options.params))))
        self._wait_seconds = 0.0
        self.rebuild(self._observed)

    # --- what kinds of them differ in --------------------------------------------------------------------------------

    def _units_of(self, order: Sequence[int]) -> list[list[int]]:
        units: dict[Hashable, list[int]] = {}
        for i in order:
            units.setdefault(self._groups[i] if self._groups else -1 - i, []).append(i)
        rank = {i: place for place, i in enumerate(order)}
        return sorted(units.values(), key=lambda unit: rank[unit[-1]])

    def _calls(self) -> int:
        """How many collectives a round makes, but for the last."""
        return len(self.gradients)

    def _send(self, unit: Sequence[int]) -> None:
        """Start what reduces these gradients; where they are not ready, they are zeros."""
        raise NotImplementedError

    _receives_alone = False
    """_receive() may fail on this rank alone. The others are told so by the last collective, which comes after it."""

    def _receive(self) -> None:
        """All units were sent: wait for them."""
        raise NotImplementedError

    def _store(self, unused: Sequence[int]) -> None:
        """The round has succeeded: what _receive() could not yet make the gradients, but of those no rank has used."""

    def _send_last(self) -> None:
        """After all units: what is left to start."""

    # --- the Reducer's methods ---------------------------------------------------------------------------------------

    def num_buckets(self) -> int:
        return len(self._units)

    def bucket_params(self, bucket: int) -> list[int]:
        return self._units[bucket]

    def rebuild(self, order: Sequence[int]) -> None:
        self._units = self._units_of(order)
        self._reset()

    def _reset(self) -> None:
        self._ready: dict[int, Any] = {}  # in the order they came, with the stream that each is ready on
        self._next = 0  # the unit to send next
        self._started = 0  # collectives, but for agree()
        self._asked = False  # ... which was called
        self._costs: dict[str, Cost] = {}  # by what stats() calls them

    def mark_ready(self, param: int, gradient_ptr: int = 0) -> bool:
        if gradient_ptr:
            raise ArgumentError("a compressor in Python takes tensors, not addresses")
        if param in self._ready:
            return False
        gradient = self.gradients[param]
        self._ready[param] = torch.cuda.current_stream(gradient.device) if has_streams(gradient) else None
        if self._rounds.may_differ():
            return True
        while self._next < len(self._units) and all(i in self._ready for i in self._units[self._next]):
            self._send_next()
        return True

    def _send_next(self) -> None:
        unit = self._units[self._next]
        for i in unit:
            if i not in self._ready:
                self.gradients[i].zero_()
        # Backward runs on the streams of forward, and the unit is sent on that of its last gradient.
        for stream in {self._ready[i] for i in unit if self._ready.get(i)}:
            here = torch.cuda.current_stream(stream.device)
            if stream != here:
                here.wait_stream(stream)
        self._send(unit)
        self._next += 1

    def _cost(self, name: str, codec: str, gradients: Sequence[torch.Tensor], elements: int) -> Cost:
        """Of what is about to be sent of so many gradients in this round. What is counted while it fails is dropped."""
        plain = self._ring_bytes(sum(one.nbytes for one in gradients))
        cost = self._costs[name] = Cost(codec, calls=1, elements=elements, plain_bytes=plain)
        return cost

    def _ring_bytes(self, nbytes: int) -> int:
        """What a rank sends for an all-reduce of so many, in a ring."""
        return 2 * (self._comm.size - 1) * nbytes // self._comm.size

    def _note(self, handle: Handle) -> Handle:
        """One more collective was started."""
        self._started += 1
        return handle

    def _wait(self, handle: Handle, cost: Cost | None = None) -> Any:
        begin = time.perf_counter()
        try:
            return handle.wait()
        finally:
            waited = time.perf_counter() - begin
            self._wait_seconds += waited
            if cost is not None:
                cost.wire_seconds += waited

    def finish(self) -> list[int]:
        try:
            if self._rounds.may_differ():
                self._asked = True
                self._rounds.agree()
            while self._next < len(self._units):
                self._send_next()
            self._send_last()
            missing = self.missing()
            if self._receives_alone:
                self._receive()
            used = torch.ones(len(self.gradients), dtype=torch.uint8, device="cpu")
            used[missing] = 0
            handle = self._note(
                on_communicator.allreduce(self._comm, used, Max, "which gradients there are", in_place=True)
            )
            if not self._receives_alone:
                self._receive()
            self._wait(handle)
            unused = [i for i in missing if not used[i]]
            self._store(unused)
            self._observed = [*self._ready, *missing]
            for name, cost in self._costs.items():
                if cost.wire_bytes:
                    note_cost(self._comm, name, cost)
            return unused
        except BaseException as error:  # of a compressor of the user's, on this rank alone
            why = f"reducing its gradients raised {text_of(error)}"
            on_communicator.refuse(self._comm, self._calls_left(), why)
            raise
        finally:
            self._reset()
            self._rounds.end_one()

    def _calls_left(self) -> int:
        """How many collectives of this round are not started yet."""
        if self._rounds.may_differ():
            return int(not self._asked)
        return self._calls() + 1 - self._started

    def abandon(self) -> int:
        left = self._calls_left()
        self._reset()
        self._rounds.end_one()
        return left

    def rounds(self) -> int:
        return self._rounds.ended()

    def set_rounds(self, rounds: int) -> None:
        self._rounds.set_ended(rounds)

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

    def norms(self) -> dict[str, float]:
        """Of what is kept, by bucket."""
        return {}

    def wait_seconds(self) -> float:
        return self._wait_seconds


class CompressedReducer(PythonReducer):
    """For classes with compress() and decompress(), and instances of StatefulCompressor."""

    _receives_alone = True  # it calls decompress(), or decode()

    def __init__(self, options: ReducerOptions, compression: Any, keys: Sequence[str]) -> None:
        """keys: what a StatefulCompressor is told of the parameters."""
        self._compression = compression
        self._codec = getattr(compression, "__name__", type(compression).__name__)
        self._keys = keys
        super().__init__(options)

    def _reset(self) -> None:
        super()._reset()
        self._sent: list[tuple[int, Handle, Any]] = []

    def _send(self, unit: Sequence[int]) -> None:
        for i in unit:
            gradient = self.gradients[i]
            cost = self._cost(self._names[i], self._codec, [gradient], gradient.numel())
            if isinstance(self._compression, StatefulCompressor):
                handle, ctx = self._send_encoded(self._compression, i, cost), None
            else:
                with cost.timed("encode_seconds"):
                    wire, ctx = self._compression.compress(gradient)
                handle = on_communicator.allreduce(self._comm, wire, self._op, self._names[i], *self._scales)
                cost.wire_bytes = self._ring_bytes(wire.nbytes)
            self._sent.append((i, self._note(handle), ctx))

    def _receive(self) -> None:
        for i, sent, ctx in self._sent:
            cost = self._costs[self._names[i]]
            received = self._wait(sent, cost)
            with cost.timed("decode_seconds"):
                if isinstance(self._compression, StatefulCompressor):
                    self._decode(self._compression, i, received)
                else:
                    self.gradients[i].copy_(self._compression.decompress(received, ctx))

    def _send_encoded(self, compression: StatefulCompressor, i: int, cost: Cost) -> Handle:
        """What encode() makes of a gradient, in one operation: ranks count those."""
        with cost.timed("encode_seconds"):
            made = compression.encode(self._keys[i], self.gradients[i])
        tensors = list(made) if isinstance(made, list | tuple) else [made]
        what = f"{type(compression).__name__}.encode()"
        if not tensors or not all(isinstance(one, torch.Tensor) for one in tensors):
            raise ArgumentError(f"{what} returned {made!r}, but must return a tensor, or a list of one or more")
        nbytes = sum(one.nbytes for one in tensors)
        cost.wire_bytes = (self._comm.size - 1) * nbytes if compression.gathers else self._ring_bytes(nbytes)
        if compression.gathers:
            # On the CPU, or they would be several operations, and ranks count one.
            tensors = [torch.atleast_1d(one).cpu() for one in tensors]  # type: ignore[no-untyped-call]
            rows = torch.tensor([[len(one) for one in tensors]], device="cpu")
            return grouped.start_allgather(self._comm, [rows, *tensors], self._names[i])
        if len({one.dtype for one in tensors}) > 1:
            raise ArgumentError(
                f"{what} returned tensors of {', '.join(str(one.dtype) for one in tensors)}, but tensors that are "
                "added up must be of one dtype: cast them, or set gathers = True"
            )
        return grouped.start_allreduce(self._comm, tensors, self._op, self._names[i], *self._scales, in_place=False)

    def _decode(self, compression: StatefulCompressor, i: int, received: list[torch.Tensor]) -> None:
        gradient = self.gradients[i]
        if compression.gathers:
            rows, *tensors = received
            pieces = [torch.split(one.to(gradient.device), rows[:, t].tolist()) for t, one in enumerate(tensors)]
            received = [list(of_rank) for of_rank in zip(*pieces, strict=True)]  # type: ignore[misc]
        decoded = compression.decode(self._keys[i], received, gradient)
        if decoded.shape != gradient.shape:
            raise ArgumentError(
                f"{type(compression).__name__}.decode() returned shape {list(decoded.shape)} for {self._keys[i]}, but "
                f"must return its gradient's, {list(gradient.shape)}"
            )
        gradient.copy_(decoded)
        if compression.gathers and self._op is Average:
            gradient.div_(self._comm.size)
