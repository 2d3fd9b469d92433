"""DistributedOptimizer(op=Adasum): every rank takes the wrapped optimizer's step by itself; the steps are combined.

Adasum combines what the optimizer makes of a gradient, not the gradient: an Adam step and a gradient differ in scale
and direction, and it is the steps that overshoot when they are added (Maleki et al., MLSys 2021). So step() is

    start = parameters;  step of the wrapped optimizer;  delta = parameters - start
    parameters = start + Adasum over the ranks of delta

with factors of its own for each parameter. All deltas of a dtype and device travel together.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dcoll import _C
from dcoll.collectives import on_communicator
from dcoll.collectives.tensors import CODES, code_of, library
from dcoll.compression.codecs import NoneCompressor, wire_dtype_of
from dcoll.compression.residuals import shaped_like
from dcoll.errors import DcollError, text_of
from dcoll.ops import Adasum
from dcoll.optimizer.backward import Failure, watch
from dcoll.optimizer.optimizer_arguments import check_passes
from dcoll.optimizer.wrapper import Wrapper


class _Flat:
    """The parameters of one dtype and device: views into a buffer for where they start, another for how far they go."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.params = params
        self.elements = [p.numel() for p in params]
        self.delta_buffer = torch.zeros(sum(self.elements), dtype=params[0].dtype, device=params[0].device)
        self.starts = self._views(torch.empty_like(self.delta_buffer))
        self.deltas = self._views(self.delta_buffer)

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(buffer, self.elements)
        return [shaped_like(part, p) for part, p in zip(parts, self.params, strict=True)]

    def begin(self) -> None:
        torch._foreach_copy_(self.starts, self.params)

    def end(self) -> None:
        torch._foreach_copy_(self.deltas, self.params)
        torch._foreach_sub_(self.deltas, self.starts)

    def apply(self) -> None:
        torch._foreach_add_(self.starts, self.deltas)
        torch._foreach_copy_(self.params, self.starts)


class DeltaSync:
    """Combines the steps of an optimizer's parameters."""

    def __init__(
        self,
        present_comm: Callable[[], _C.Communicator | None],
        optimizer: torch.optim.Optimizer,
        name_of: Callable[[torch.Tensor], str],
        compression: Any,
        passes: int,
        label: str,
    ) -> None:
        self._present_comm = present_comm
        self._optimizer = optimizer
        self.name_of = name_of
        self._compression = compression
        self._label = label
        self.seconds = 0.0
        self.set_passes(passes)
        self._flats: list[_Flat] = []
        self._flat_kinds: list[tuple[Any, ...]] = []
        self._flat_params: list[torch.Tensor] = []  # an id is only a name while its object lives
        self._failed = ""  # why this rank cannot take the next step
        watch(self)

    # A rank whose backward raised has nothing to combine, and refuses the step that the others take. With several
    # passes to a step only step() tells which step that is.

    def before_backward(self) -> None:
        if self.passes == 1:
            self._failed = ""

    def after_backward(self) -> None: ...

    def backward_failed(self, failure: Failure) -> None:
        if not self._failed and failure.reaches(p for group in self._optimizer.param_groups for p in group["params"]):
            self._failed = failure.reason
            if self.passes == 1:
                self.comm.refuse(self._failed)

    def _check_gradients(self) -> None:
        why, self._failed = self._failed, ""
        if why and self.passes > 1:
            self.comm.refuse(why)
        if why:
            raise DcollError(f"step() has half a gradient, {why}: after a backward that raised, call backward() again")

    @property
    def comm(self) -> _C.Communicator:
        comm = self._present_comm()
        if comm is None:
            raise ValueError("dcoll has not been initialized; use dcoll.init().")
        return comm

    def set_passes(self, passes: int) -> None:
        """Gradients add up on this rank until step(), however many backward passes that takes."""
        check_passes(passes)
        self.passes = passes

    def _arrange(self, params: list[torch.Tensor]) -> None:
        now = [p for p in params if p.requires_grad]
        kinds = [(id(p), p.dtype, p.device, p.shape) for p in now]  # model.double() changes them where they are
        if kinds == self._flat_kinds:
            return
        alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for p in now:
            code_of(p.dtype)
            alike.setdefault((p.dtype, p.device), []).append(p)
        self._flats = [_Flat(some) for some in alike.values()]
        self._flat_kinds, self._flat_params = kinds, now

    @torch.no_grad()
    def step(self, params: list[torch.Tensor], local_step: Callable[[], Any]) -> Any:
        """Take the local step, then combine those of all ranks."""
        self._check_gradients()
        self._arrange(params)
        comm = self.comm
        for flat in self._flats:
            flat.begin()
        try:
            result = local_step()
        except BaseException as error:
            if self.passes > 1 or not self._failed:  # it may have been a backward in a closure
                comm.refuse(f"its step raised {text_of(error)}")
            self._failed = ""
            self._go_back()
            raise
        begin = time.perf_counter()
        for flat in self._flats:
            flat.end()
        try:
            for flat in self._flats:
                self._combine(comm, flat)
                flat.apply()
        except DcollError:
            self._go_back()
            raise
        self.seconds += time.perf_counter() - begin
        return result

    def _go_back(self) -> None:
        """To where all ranks started from: a step that is not combined is none."""
        for flat in self._flats:
            torch._foreach_copy_(flat.params, flat.starts)

    def _combine(self, comm: _C.Communicator, flat: _Flat) -> None:
        wire_code = wire_dtype_of(self._compression)
        if wire_code is None and self._compression is not NoneCompressor:
            for p, delta in zip(flat.params, flat.deltas, strict=True):
                wire, ctx = self._compression.compress(delta)
                out = on_communicator.allreduce(comm, wire, Adasum, f"{self.name_of(p)} of {self._label}").wait()
                delta.copy_(self._compression.decompress(out, ctx))
            return
        wire, ctx = self._compression.compress(flat.delta_buffer)
        address = wire.data_ptr()
        on = library("torch").on(comm, wire)
        on.adasum(address, address, flat.elements, CODES[wire.dtype], f"steps of {self._label}").wait()
        if wire is not flat.delta_buffer:
            flat.delta_buffer.copy_(self._compression.decompress(wire, ctx))


class DistributedAdasum(Wrapper):
    """What DistributedOptimizer(op=Adasum) adds to the wrapped optimizer's class, of which the result is a subclass."""

    _dcoll: DeltaSync

    def synchronize(self) -> None:
        """Nothing: gradients stay this rank's own, and step() combines what is made of them."""

    def skip_synchronize(self) -> Any:
        """Not with Adasum, as in Horovod."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing: gradients add up on this rank until step() in any case."""
        yield

    def communication_seconds(self) -> float:
        """Seconds spent so far combining steps."""
        return self._dcoll.seconds

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Gradients add up until step(), however many there are."""
        self._dcoll.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's step on this rank's gradients, combined with those of the others."""
        step = super().step  # type: ignore[misc]

        def local_step() -> Any:
            with torch.enable_grad():
                return step(closure) if closure is not None else step()

        result = self._dcoll.step(self._dcoll_params(), local_step)
        self._dcoll_stepped()
        return result
