"""PowerSGD (Vogels, Karimireddy, Jaggi, 2019): of a matrix M of gradients two thin factors travel.

With Q of the last step: P = M Q, averaged; orthogonalised; Q = M^T P, averaged; the result is P Q^T, the average of M
projected on what P spans. What the projection took away on a rank is added to its M of the next step.

The two all-reduces depend on each other. Those of all matrices of a bucket are made together: the first when all its
gradients are ready, with those that travel as they are, the second after the first one of the next bucket. So all ranks
make the same calls in the same order, and backward has gone on for a bucket when the first is waited for.
"""

import hashlib
import math
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcoll import _C
from dcoll.collectives import grouped
from dcoll.collectives.handle import Handle
from dcoll.collectives.stats import Cost
from dcoll.compression.codecs import PowerSGD
from dcoll.errors import DcollError
from dcoll.job import objects
from dcoll.optimizer.bucket_reducer import BucketReducer
from dcoll.optimizer.compressed_reducer import ReducerOptions


def _exactly(gradient: torch.Tensor) -> torch.autocast:
    """float32 is multiplied as such, also in a step or a backward that is inside torch.autocast()."""
    return torch.autocast(gradient.device.type, enabled=False)


class MatrixState:
    """What is kept of a parameter from step to step, whatever bucket it is in."""

    def __init__(self, name: str) -> None:
        self.q: torch.Tensor | None = None
        self.error: torch.Tensor | None = None
        self._number = zlib.crc32(name.encode())

    def first_q(self, rank: int, columns: int, seed: int, like: torch.Tensor) -> torch.Tensor:
        """Random, the same on every rank and in every bucket; of the dtype and on the device of `like`."""
        generator = torch.Generator().manual_seed((seed << 32 | self._number) & (1 << 63) - 1)
        return torch.randn(rank, columns, generator=generator, dtype=torch.float64, device="cpu").to(like)


def agree_on_directions(comm: _C.Communicator, states: Sequence[MatrixState]) -> None:
    """Ranks that come from different jobs have different ones: then all begin anew. Collective."""
    digest = hashlib.sha256()
    for state in states:
        digest.update(b"none" if state.q is None else state.q.cpu().numpy().tobytes())
    if len(set(objects.allgather_bytes(comm, bytearray(digest.digest()), "directions of PowerSGD"))) > 1:
        for state in states:
            state.q = None


_CORE_THREADS = 2
"""With more threads for each rank torch is faster, whose operations are spread over them; the core's work on one."""


def in_core(value: torch.Tensor) -> bool:
    """Whether the core's passes over memory are taken, of which there are half as many as of torch's operations."""
    host = value.dtype is torch.float32 and value.device.type == "cpu" and value.is_contiguous() and not value.is_neg()
    return host and torch.get_num_threads() <= _CORE_THREADS


def _is_finite(factor: torch.Tensor) -> bool:
    return math.isfinite(torch.linalg.vector_norm(factor, math.inf))


class _Matrix:
    """A gradient on its way. Its factors, p and q, have a row for each direction: BLAS is ten times slower at M^T P
    than at P^T M, for thin P.
    """

    def __init__(
        self, index: int, value: torch.Tensor, source: torch.Tensor, error: torch.Tensor | None, q: torch.Tensor
    ) -> None:
        """value: becomes the gradient, `source`, with the error, what was lost before. They are one but in the core."""
        self.index = index
        self.value = value
        self.cost = Cost("")  # its bucket's, once that is sent
        self.in_core = in_core(value)
        self._shape = *value.shape, len(q)
        if self.in_core:
            self.p = value.new_empty(len(q), len(value))
            lost = 0 if error is None else error.data_ptr()
            given = value.data_ptr(), source.data_ptr(), lost
            _C.kernels.add_and_project(self.p.data_ptr(), *given, q.data_ptr(), *self._shape)
            return
        if error is not None:
            value.add_(error)
        self.p = (value @ q.t()).t().contiguous()

    def project(self) -> None:
        """p is orthonormal."""
        if self.in_core:
            self.q = self.p.new_empty(len(self.p), self.value.shape[1])
            _C.kernels.project_back(self.q.data_ptr(), self.value.data_ptr(), self.p.data_ptr(), *self._shape)
        else:
            self.q = self.p @ self.value
        self.sum = self.q.clone()

    def store(self, state: MatrixState, first_q: Callable[[int], torch.Tensor]) -> None:
        """`sum` has come back. What is not finite leaves the state as it was."""
        if not _is_finite(self.sum):
            self.value.fill_(torch.nan)
            return
        if state.error is None:
            state.error = torch.empty_like(self.value)
        self._split(state.error)
        largest = self.sum.abs().amax(1, keepdim=True)  # so P of the next step neither overflows nor vanishes
        state.q = self.sum / largest
        if not largest.all():
            state.q = torch.where(largest > 0, state.q, first_q(self.index))

    def _split(self, error: torch.Tensor) -> None:
        """What is sent stays in value; what is lost becomes the error."""
        if self.in_core:
            factors = (one.data_ptr() for one in (self.p, self.q, self.sum))
            _C.kernels.split(self.value.data_ptr(), error.data_ptr(), *factors, *self._shape)
            return
        torch.addmm(self.value, self.p.t(), self.q, alpha=-1, out=error)
        torch.mm(self.p.t(), self.sum, out=self.value)


def _orthonormalise(matrices: Sequence[_Matrix]) -> None:
    """Their p have come back as sums over the ranks, or averages: in the core, the same bits on every CPU of all.

    Orthonormal for a p of lower rank, and of zeros, too. Infinity and NaN become NaN everywhere.
    """
    _C.kernels.orthonormalise([(one.p.data_ptr(), one.p.shape[1], len(one.p)) for one in matrices if one.in_core])
    for one in matrices:
        if not one.in_core:
            whole = _is_finite(one.p)
            one.p = torch.linalg.qr(one.p.t()).Q.t().contiguous() if whole else one.p.fill_(torch.nan)


class PowerSGDReducer(BucketReducer):
    """Of every bucket P travels, then Q."""

    def __init__(self, options: ReducerOptions, compression: PowerSGD, states: Sequence[MatrixState]) -> None:
        self._options = compression
        self._states = states
        self._compressible = [compression.compresses(p) for p in options.params]
        super().__init__(options, scheduled=compression.start_step > 0 and any(self._compressible))

    def _reset(self) -> None:
        super()._reset()
        self._begun: dict[int, _Matrix] = {}  # of buckets that are not sent yet
        self._first: tuple[Handle, str, list[_Matrix]] | None = None  # whose first phase is under way
        self._second: list[tuple[Handle, Cost]] = []
        self._matrices: list[_Matrix] = []  # in their second phase
        self._failure: DcollError | None = None

    def _compresses(self, i: int) -> bool:
        """In this step, on all ranks alike. What has directions has begun before, maybe in another job."""
        begun = self._rounds.ended() >= self._options.start_step or self._states[i].q is not None
        return self._compressible[i] and begun

    def _begins(self, i: int) -> bool:
        """As soon as the gradient is there."""
        return not self._rounds.may_differ() and self._compresses(i)

    def take(self, param: int, gradient: torch.Tensor) -> bool:
        """Of a gradient that is elsewhere, before mark_ready(): it is read once. False: it has to be copied first."""
        both = gradient, self.gradients[param]
        if param in self._ready or not self._begins(param) or not all(in_core(one) for one in both):
            return False
        self._begun[param] = self._matrix(param, gradient)
        return True

    def mark_ready(self, param: int, gradient_ptr: int = 0) -> bool:
        if param not in self._ready and param not in self._begun and self._begins(param):
            self._begun[param] = self._matrix(param)  # now, not with its bucket: it is in the cache
        return super().mark_ready(param, gradient_ptr)

    def _matrix(self, i: int, given: torch.Tensor | None = None) -> _Matrix:
        state, gradient = self._states[i], self.gradients[i]
        begin = time.perf_counter()
        q = self._first_q(i) if state.q is None else state.q
        value = gradient.reshape(len(gradient), -1)
        with _exactly(gradient):
            matrix = _Matrix(i, value, value if given is None else given, state.error, q)
        matrix.cost.encode_seconds = time.perf_counter() - begin
        return matrix

    def _calls(self) -> int:
        return len(self._units) + sum(any(self._compresses(i) for i in unit) for unit in self._units)

    def _start(self, tensors: Sequence[torch.Tensor], name: str) -> Handle:
        scales = self._scales
        return self._note(grouped.start_allreduce(self._comm, list(tensors), self._op, name, *scales, in_place=True))

    def _first_q(self, i: int) -> torch.Tensor:
        gradient = self.gradients[i]
        columns = gradient.numel() // gradient.shape[0]
        return self._states[i].first_q(self._options.rank, columns, self._options.seed, gradient)

    def _send(self, unit: Sequence[int]) -> None:
        tensors, matrices = [], []
        for i in unit:
            if not self._compresses(i):
                tensors.append(self.gradients[i])
                continue
            matrices.append(self._begun.pop(i) if i in self._begun else self._matrix(i))
            tensors.append(matrices[-1].p)
        name = self._name_of(unit)
        if matrices:
            self._begin_cost(unit, name, tensors, matrices)
        handle = self._start(tensors, name)
        self._send_last()
        self._first = handle, name, matrices

    def _begin_cost(
        self, unit: Sequence[int], name: str, sent: Sequence[torch.Tensor], matrices: Sequence[_Matrix]
    ) -> None:
        """sent: in the first phase."""
        elements = sum(one.value.numel() for one in matrices)
        cost = self._cost(name, f"powersgd {self._options.rank}", [self.gradients[i] for i in unit], elements)
        second = sum(len(one.p) * one.value.shape[1] * one.value.itemsize for one in matrices)
        cost.wire_bytes = self._ring_bytes(sum(one.nbytes for one in sent) + second)
        for one in matrices:
            cost.encode_seconds += one.cost.encode_seconds
            one.cost = cost

    def _send_last(self) -> None:
        """The second phase of the bucket whose first one is under way."""
        if self._first is None:
            return
        handle, name, matrices = self._first
        self._first = None
        cost = matrices[0].cost if matrices else None
        try:
            self._wait(handle, cost)
        except DcollError as error:  # on all ranks; they stay in step, and finish() raises it
            self._failure = self._failure or error
            for one in matrices:
                one.p.fill_(torch.nan)
        _orthonormalise(matrices)
        for one in matrices:
            with one.cost.timed("encode_seconds"), _exactly(one.value):
                one.project()
        if cost is not None:
            self._second.append((self._start([one.sum for one in matrices], f"{name}, second factors"), cost))
        self._matrices += matrices

    def _receive(self) -> None:
        if self._failure is not None:
            raise self._failure
        for handle, cost in self._second:
            self._wait(handle, cost)

    def _store(self, unused: Sequence[int]) -> None:
        without = set(unused)
        for one in self._matrices:
            if one.index in without:
                continue
            with one.cost.timed("decode_seconds"), _exactly(one.value):
                one.store(self._states[one.index], self._first_q)
            gradient = self.gradients[one.index]
            if not gradient.is_contiguous():  # `value` is a copy of it
                gradient.copy_(one.value.view(gradient.shape))

    def norms(self) -> dict[str, float]:
        found = {}
        for unit in self._units:
            errors = [error for i in unit if (error := self._states[i].error) is not None]
            if errors:
                found[self._name_of(unit)] = math.hypot(*(float(torch.linalg.vector_norm(one)) for one in errors))
        return found

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def kept(self, param: int) -> dict[str, Any]:
        """Copies: "error" (rows, columns), of this rank, and "q" (rank, columns), the same on all; {} at first."""
        state = self._states[param]
        found = {"error": state.error, "q": state.q}
        return {name: value.clone() for name, value in found.items() if value is not None}

    def keep(self, param: int, values: dict[str, Any]) -> None:
        """What kept() returned; what is not there begins anew, and so does a q of another rank of the factors.

        Raises ArgumentError, and changes nothing, for an error of another length than the parameter's.
        """
        if not self._compressible[param]:
            return
        state, first, q = self._states[param], self._first_q(param), values.get("q")
        error = self._error_of(param, values)
        state.error = None if error is None else error.reshape(len(error), -1)
        state.q = None
        if q is not None and q.shape == first.shape:
            state.q = q.detach().to(first, copy=True, memory_format=torch.contiguous_format)
