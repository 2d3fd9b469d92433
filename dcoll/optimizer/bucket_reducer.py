"""Reducers in Python of buckets as the core's, and the one for gradients that stay on a device."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from dcoll.collectives import grouped, memory, on_communicator
from dcoll.collectives.handle import Handle
from dcoll.collectives.tensors import library
from dcoll.compression.codecs import NoneCompressor
from dcoll.errors import ArgumentError
from dcoll.optimizer.compressed_reducer import PythonReducer, ReducerOptions


class BucketReducer(PythonReducer):
    """Buckets as the core's: of one dtype and device, by size or by group."""

    def __init__(self, options: ReducerOptions, scheduled: bool = False) -> None:
        self._limits = options.first_bucket_bytes, options.bucket_bytes
        if options.groups:
            pairs = zip(options.groups, options.params, strict=True)
            options = dataclasses.replace(options, groups=[(group, p.dtype, p.device) for group, p in pairs])
        super().__init__(options, scheduled)

    def _units_of(self, order: Sequence[int]) -> list[list[int]]:
        if self._groups:
            return super()._units_of(order)
        filled: list[list[int]] = []
        growing: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
        for i in order:
            gradient = self.gradients[i]
            kind = gradient.dtype, gradient.device
            unit, nbytes = growing.get(kind, ([], 0))
            if unit and nbytes + gradient.nbytes > self._limits[bool(filled)]:
                filled.append(unit)
                unit, nbytes = [], 0
            growing[kind] = [*unit, i], nbytes + gradient.nbytes
        return filled + [unit for unit, _ in growing.values()]

    def _error_of(self, param: int, values: dict[str, Any]) -> torch.Tensor | None:
        """A copy of what compression has lost of a gradient, in its shape; of another kind of Reducer too: the core's
        has it as flat as it lies in memory.
        """
        if "error" not in values:
            return None
        gradient, error = self.gradients[param], torch.as_tensor(values["error"]).detach()
        if error.numel() != gradient.numel():
            raise ArgumentError(
                f"what compression has lost of {self._names[param]} is of shape {list(error.shape)}, but must be of "
                f"{list(gradient.shape)}, or as long: load the state of the same model"
            )
        error = error.to(gradient, copy=True, memory_format=torch.contiguous_format)
        return error.as_strided(gradient.shape, gradient.stride()) if error.dim() == 1 else error.view(gradient.shape)

    def _name_of(self, unit: Sequence[int]) -> str:
        return f"bucket of {self._names[unit[0]]}" + (f" and {len(unit) - 1} more" if len(unit) > 1 else "")


_Flat = tuple[torch.Tensor, dict[int, torch.Tensor]]
"""A bucket as one tensor, and of each of its gradients what lies in it."""


class DeviceReducer(BucketReducer):
    """For gradients on a device, as they are or in 16 bits: each bucket travels as one.

    As they are, and once the order of gradients is known, they lie side by side in memory that other ranks can open,
    and are reduced in place. Where this rank has no room for that, each bucket gets memory when it is sent: to the
    other ranks it is the same.
    """

    _has_layout = False  # the first one is by size alone: once backward has shown an order there is a better one

    def __init__(self, options: ReducerOptions, compression: Any, codec: str) -> None:
        """compression: Compression.none, fp16 or bf16, which are for float64 here, or auto. codec: of float32, by the
        core's name.
        """
        self._compression = compression
        self._codec = codec
        self._left: list[Handle] = []  # of rounds that came to nothing: the core still writes to their buckets
        self._flats: dict[tuple[int, ...], _Flat] = {}  # by unit
        self._without_room: set[tuple[int, ...]] = set()
        self._moved: set[tuple[int, ...]] = set()
        self._sent: list[tuple[Sequence[int], Handle, _Flat | None, list[Any]]] = []
        self._lost: dict[int, torch.Tensor] = {}  # by other Reducers' compression, to go with the next gradients
        super().__init__(options)
        self._has_layout = True

    def rebuild(self, order: Sequence[int]) -> None:
        self._flats, self._without_room, self._moved = {}, set(), set()
        super().rebuild(order)
        if self._has_layout:
            self._place([unit for unit in self._units if self._compression_of(unit) is NoneCompressor])

    def _compression_of(self, unit: Sequence[int]) -> Any:
        return self._compression if self.gradients[unit[0]].dtype is torch.float64 else NoneCompressor

    def _codec_of(self, unit: Sequence[int]) -> str:
        return self._codec if self.gradients[unit[0]].dtype is torch.float32 else ""

    def _place(self, units: Sequence[Sequence[int]]) -> None:
        """Give buckets memory, in which their gradients are if other ranks can open it."""
        by_device: dict[torch.device, list[Sequence[int]]] = {}
        for unit in units:
            if library("torch").on_device(self.gradients[unit[0]]):
                by_device.setdefault(self.gradients[unit[0]].device, []).append(unit)
        for device, some in by_device.items():
            try:
                made = memory.zeros_side_by_side([[self.gradients[i] for i in unit] for unit in some])
            except torch.cuda.OutOfMemoryError as error:
                for unit in map(tuple, some):
                    self._flats.pop(unit, None)
                    self._without_room.add(unit)
                memory.tell_once(f"buckets of gradients on {device} get memory when they are sent", str(error))
                continue
            for unit, (flat, pieces) in zip(some, made, strict=True):
                self._flats[tuple(unit)] = flat, dict(zip(unit, pieces, strict=True))
                for i, piece in zip(unit, pieces, strict=True):
                    if piece.untyped_storage().nbytes() == piece.nbytes:
                        self.gradients[i] = piece

    def move(self, params: Sequence[int]) -> list[int]:
        """Buckets whose gradients are kept get new memory, at the second time their gradients each of its own."""
        moved: list[int] = []
        for unit in self._units:
            key, some = tuple(unit), [i for i in unit if i in params]
            if not some:
                continue
            if key not in self._flats or self._elsewhere(self._flats[key][1]) == unit:
                moved += super().move(some)
                continue
            self._place([unit])
            # Or there was no memory for it.
            if key in self._moved or key in self._without_room or self._elsewhere(self._flats[key][1]):
                super().move(unit)
            self._moved.add(key)
            moved += unit
        return moved

    def _reset(self) -> None:
        super()._reset()
        in_buckets = [handle for _, handle, found, _ in self._sent if found]
        self._left += [handle for handle in in_buckets if not handle.ended()]
        self._sent = []

    def settle(self) -> None:
        while self._left:
            self._left.pop().wait_for_memory()

    def _calls(self) -> int:
        return len(self._units)

    def _send(self, unit: Sequence[int]) -> None:
        for i in unit:
            if i in self._lost:
                self.gradients[i].add_(self._lost[i])
        name = self._name_of(unit)
        if found := self._flat_of(unit):
            flat, pieces = found
            for i in self._elsewhere(pieces):
                pieces[i].copy_(self.gradients[i])
            codec = self._codec_of(unit)
            handle = on_communicator.allreduce(
                self._comm, flat, self._op, name, *self._scales, codec=codec, in_place=True
            )
            self._sent.append((unit, self._note(handle), found, []))
            return
        compression = self._compression_of(unit)
        wires, contexts = zip(*(compression.compress(self.gradients[i]) for i in unit), strict=True)
        in_place = compression is NoneCompressor
        options = self._op, name, *self._scales, in_place, self._codec_of(unit)
        handle = grouped.start_allreduce(self._comm, list(wires), *options)
        self._sent.append((unit, self._note(handle), None, list(contexts)))

    def _flat_of(self, unit: Sequence[int]) -> _Flat | None:
        if tuple(unit) not in self._without_room:
            return self._flats.get(tuple(unit))
        flat, pieces = memory.zeros_in_torchs_memory([self.gradients[i] for i in unit])
        return flat, dict(zip(unit, pieces, strict=True))

    def _elsewhere(self, pieces: dict[int, torch.Tensor]) -> list[int]:
        """The gradients that have been moved out of their bucket."""
        return [i for i, piece in pieces.items() if piece is not self.gradients[i]]

    def _receive(self) -> None:
        for unit, sent, found, contexts in self._sent:
            results = self._wait(sent)
            if found:
                for i in self._elsewhere(found[1]):
                    self.gradients[i].copy_(found[1][i])
                continue
            for i, received, context in zip(unit, results, contexts, strict=True):
                if received is not self.gradients[i]:
                    self.gradients[i].copy_(self._compression.decompress(received, context))

    def _store(self, unused: Sequence[int]) -> None:
        self._lost = {i: lost for i, lost in self._lost.items() if i in unused}

    def kept(self, param: int) -> dict[str, Any]:
        return {"error": self._lost[param].clone()} if param in self._lost else {}

    def keep(self, param: int, values: dict[str, Any]) -> None:
        error = self._error_of(param, values)
        if error is not None and error.any():
            self._lost[param] = error
        else:
            self._lost.pop(param, None)
