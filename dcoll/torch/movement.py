"""broadcast, all_gather, gather, scatter and all_to_all."""

from collections.abc import Sequence
from typing import Any

import torch

from dcoll.errors import ArgumentError, MismatchError
from dcoll.torch.calls import Calls
from dcoll.torch.dtypes import moved
from dcoll.torch.memory import Finish, copy_back, dense, one, one_behind_the_other, one_per_rank, room_for, same_kind
from dcoll.torch.reductions import Tensors
from dcoll.torch.work import Work


class Movement(Calls):
    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        tensor = one("broadcast", tensors)
        target = dense("broadcast", tensor)
        root = self._root("broadcast", opts)
        back = None if self._comm.rank == root else copy_back(tensor, target)
        args = (target.data_ptr(), target.nbytes, root, moved(tensor.dtype))
        return self._run("broadcast", self._on(target), args, opts, target, [tensor], back)

    # --- all_gather

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        what, size = "all_gather", self._comm.size
        count = input.numel()
        if output.numel() != count * size or output.dtype != input.dtype:
            raise ArgumentError(
                f"{what} over {size} ranks got an output of {output.numel()} elements of {output.dtype} for inputs of "
                f"{count} of {input.dtype}, but the output is {size} times the input, of its dtype"
            )
        same_kind(what, input, [output])
        source = dense(what, input)
        target = dense(what, output)
        back = copy_back(output, target)
        return self._exchange(what, source, count, target, [count] * size, [output], back, opts)

    def allgather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Work:
        what = "all_gather"
        input = one(what, inputs)
        rooms = one_per_rank(what, outputs)
        self._check_list(what, rooms, input)
        source, count = dense(what, input), input.numel()
        target, back = room_for(rooms)
        return self._exchange(what, source, count, target, [count] * self._comm.size, rooms, back, opts)

    def _check_list(self, what: str, tensors: Sequence[torch.Tensor], own: torch.Tensor) -> None:
        same_kind(what, own, tensors)
        if len(tensors) != self._comm.size or any(tensor.numel() != own.numel() for tensor in tensors):
            raise ArgumentError(
                f"{what} over {self._comm.size} ranks got a list of tensors of "
                f"{[tensor.numel() for tensor in tensors]} elements beside one of {own.numel()}, but takes one tensor "
                "per rank, all of one size"
            )

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        # outputs[rank] has one tensor for each of the inputs.
        works = [self.allgather([list(rooms)], [input], opts) for input, *rooms in zip(inputs, *outputs, strict=True)]
        return self._together(works, [tensor for rooms in outputs for tensor in rooms])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._each(self.all_gather_single, outputs, inputs, opts)

    # --- gather and scatter: exchanges in which one rank has all or gets all

    def gather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Work:
        what, root = "gather", self._root("gather", opts)
        input = one(what, inputs)
        source = dense(what, input)
        count, size = source.numel(), self._comm.size
        send = [count if rank == root else 0 for rank in range(size)]
        if self._comm.rank != root:
            return self._exchange(what, source, send, source, [0] * size, [], None, opts)
        rooms = one_per_rank(what, outputs)
        self._check_list(what, rooms, input)
        target, back = room_for(rooms)
        return self._exchange(what, source, send, target, [count] * size, rooms, back, opts)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """output: of the root alone, the tensors of all ranks one behind the other, in whatever shape."""
        if self._comm.rank != self._root("gather_single", opts):
            return self.gather([], [input], opts)
        size = self._comm.size
        if output.numel() != size * input.numel() or not output.is_contiguous():
            raise ArgumentError(
                f"gather_single over {size} ranks got an output of {output.numel()} elements, "
                f"{'dense' if output.is_contiguous() else 'strided'}, for inputs of {input.numel()}, but the output is "
                f"dense and {size} times the input"
            )
        return self.gather([list(output.view(size, input.numel()).unbind())], [input], opts)

    def scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> Work:
        what, root = "scatter", self._root("scatter", opts)
        output = one(what, outputs)
        target = dense(what, output)
        count, size = target.numel(), self._comm.size
        back = copy_back(output, target)
        expected = [count if rank == root else 0 for rank in range(size)]
        if self._comm.rank != root:
            return self._exchange(what, target, [0] * size, target, expected, [output], back, opts)
        parts = one_per_rank(what, inputs)
        self._check_list(what, parts, output)
        source = one_behind_the_other(what, parts)
        return self._exchange(what, source, [count] * size, target, expected, [output], back, opts)

    # --- all_to_all

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        what = "all_to_all"
        same_kind(what, input, [output])
        send = self._rows(what, "input", input, input_splits)
        receive = self._rows(what, "output", output, output_splits)
        source, target = dense(what, input), dense(what, output)
        back = copy_back(output, target)
        return self._exchange(what, source, send, target, receive, [output], back, opts)

    def _rows(self, what: str, which: str, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
        """How many elements go to, or come from, each rank."""
        rows, size = tensor.shape[0] if tensor.dim() else 0, self._comm.size
        if not splits:
            if tensor.dim() and rows % size == 0:
                return [tensor.numel() // size] * size
            raise ArgumentError(
                f"{what} got {rows} rows of {which}, which {size} ranks cannot share evenly: pass {which}_split_sizes"
            )
        if len(splits) != size or min(splits) < 0 or sum(splits) != rows:
            raise ArgumentError(
                f"{what} got {which}_split_sizes {list(splits)}, but needs {size} numbers, one per rank, that sum to "
                f"the {which}'s {rows} rows"
            )
        width = tensor.numel() // rows if rows else 0
        return [split * width for split in splits]

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> Work:
        what, size = "all_to_all", self._comm.size
        if len(outputs) != size or len(inputs) != size:
            raise ArgumentError(
                f"{what} over {size} ranks got {len(inputs)} inputs and {len(outputs)} outputs, but takes one per rank"
            )
        same_kind(what, inputs[0], [*inputs, *outputs])
        source = one_behind_the_other(what, inputs)
        target, back = room_for(outputs)
        send = [tensor.numel() for tensor in inputs]
        return self._exchange(what, source, send, target, [t.numel() for t in outputs], list(outputs), back, opts)

    def _exchange(
        self,
        what: str,
        source: torch.Tensor,
        send: int | list[int],
        target: torch.Tensor,
        receive: list[int],
        tensors: Sequence[torch.Tensor],
        back: Finish,
        opts: Any,
    ) -> Work:
        """send[r] elements from the memory that begins with `source` go to rank r, or `send` to each, and receive[r]
        come from it."""
        on, width = self._on(source), source.itemsize
        gathers = isinstance(send, int)
        name = "" if gathers else what
        args = (source.data_ptr(), send, width, moved(source.dtype), name, target.data_ptr(), sum(receive) * width)

        def finish(done: Any) -> None:
            _check(what, done[1] if isinstance(done, tuple) else done.counts(), receive)
            if back is not None:
                back(done)

        call = "allgather" if gathers else "alltoall"
        return self._run(call, on, args, opts, (source, target), tensors, finish)


def _check(what: str, counts: list[int], expected: list[int]) -> None:
    """Whether every rank sent as much as there is room for."""
    if counts != expected:
        raise MismatchError(
            f"{what} received {counts} elements from the ranks, but this rank has room for {expected}: pass tensors of "
            "the same sizes on all ranks"
        )
