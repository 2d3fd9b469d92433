"""all_reduce, reduce and reduce_scatter."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dcoll import _C
from dcoll.errors import ArgumentError
from dcoll.torch.calls import Calls
from dcoll.torch.ddp_buckets import LEAST_ELEMENTS, called_by_backward, place_of
from dcoll.torch.dtypes import PLAIN_DTYPES, PLAIN_OPERATORS, reduction
from dcoll.torch.memory import Finish, copy_back, dense, one, one_behind_the_other, one_per_rank, same_kind
from dcoll.torch.work import DONE, Work

Tensors = Sequence[torch.Tensor] | torch.Tensor
_c10d: Any = torch._C._distributed_c10d


def operator_of(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


class Reductions(Calls):
    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        tensor = tensors[0] if type(tensors) is list and len(tensors) == 1 else one("all_reduce", tensors)
        op = operator_of(opts)
        operator = PLAIN_OPERATORS.get(hash(op))
        if (
            operator is not None
            and self._at_once(opts)
            and not tensor.is_neg()
            and _C.all_reduce_plain(self._comm, tensor, operator)
        ):
            return DONE
        code = PLAIN_DTYPES.get(tensor.dtype)
        count, factor = tensor.numel(), 1.0
        if tensor.layout is not torch.strided:
            return self._allreduce_sparse(tensor, op, opts)
        if code is None or operator is None:
            code, per_element, operator, factor = reduction("all_reduce", tensor, op)
            count *= per_element
        place, target = tensor.data_ptr(), tensor
        if not (tensor.is_contiguous() and tensor.is_cpu and (place != 0 or count == 0)) or tensor.is_neg():
            target = dense("all_reduce", tensor)
            place = target.data_ptr()
        if count >= LEAST_ELEMENTS and target is tensor and called_by_backward() and self._on(tensor) is self._comm:
            place = place_of(self._comm, tensor)
        if self._at_once(opts):
            self._on(target).allreduce_sync(place, place, count, code, operator, "", factor)
            if target is not tensor:
                tensor.detach().copy_(target)
            return DONE
        core = self._on(target).allreduce(place, place, count, code, operator, "", factor)
        return self._start(core, target, [tensor], copy_back(tensor, target))

    def _allreduce_sparse(self, tensor: torch.Tensor, op: Any, opts: Any) -> Work:
        """The sum of tensors in COO form, by gathering their entries."""
        if tensor.layout is not torch.sparse_coo or op != dist.ReduceOp.SUM:
            raise ArgumentError(
                f"all_reduce takes dense tensors, or sparse ones in COO form with SUM, but got {op} of a tensor with "
                f"layout {tensor.layout}"
            )
        from dcoll import ops
        from dcoll.collectives import sparse

        finish = sparse.start_allreduce(self._comm, tensor, "all_reduce", ops.Sum)
        barrier = self._comm.barrier("all_reduce")  # ends after the two gathers

        def store(_: Any) -> None:
            with torch.no_grad():  # a detached tensor would get indices of its own
                tensor.copy_(finish())

        return self._start(barrier, finish, [tensor], store)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        each = _c10d.AllreduceOptions()
        each.reduceOp = operator_of(opts)
        works = [self.allreduce([tensor], each) for tensor in tensors]
        return self._together(works, tensors)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        tensor = one("reduce", tensors)
        root = self._root("reduce", opts)
        code, per_element, operator, factor = reduction("reduce", tensor, operator_of(opts))
        source = dense("reduce", tensor)
        # Only the root's tensor changes; the sum of the others goes where nobody looks.
        into = source if self._comm.rank == root else torch.empty_like(source)
        count, name = source.numel() * per_element, f"reduce to {root}"
        places = source.data_ptr(), into.data_ptr()
        core = self._on(source).allreduce(*places, count, code, operator, name, factor)
        back = copy_back(tensor, source) if into is source else None
        return self._start(core, (source, into), [tensor], back)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        what, count, size = "reduce_scatter", output.numel(), self._comm.size
        if input.numel() != count * size or input.dtype != output.dtype:
            raise ArgumentError(
                f"{what} over {size} ranks got an output of {count} elements of {output.dtype} for an input of "
                f"{input.numel()} of {input.dtype}, but each rank's share is a {size}th of the input, of its dtype"
            )
        same_kind(what, input, [output])
        source, target = dense(what, input), dense(what, output)
        return self._reduce_rows(source, target, output, copy_back(output, target), opts)

    def _reduce_rows(
        self, source: torch.Tensor, target: torch.Tensor, output: torch.Tensor, back: Finish, opts: Any, name: str = ""
    ) -> Work:
        """source: a row for each rank, as long as `target`. back: how what is in `target` comes into `output`."""
        op = operator_of(opts)
        code, operator = PLAIN_DTYPES.get(source.dtype), PLAIN_OPERATORS.get(hash(op))
        per_element, factor = 1, 1.0
        if code is None or operator is None:
            code, per_element, operator, factor = reduction("reduce_scatter", source, op)
        row = target.numel() * per_element
        places = (source.data_ptr(), target.data_ptr(), self._comm.size, row, code, operator, name, factor)
        return self._run("reducescatter", self._on(source), places, opts, (source, target), [output], back)

    def reduce_scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> Work:
        what = "reduce_scatter"
        output = one(what, outputs)
        parts = one_per_rank(what, inputs)
        same_kind(what, output, parts)
        sizes = [part.numel() for part in parts]
        if len(parts) != self._comm.size or output.numel() != sizes[self._comm.rank]:
            raise ArgumentError(
                f"{what} over {self._comm.size} ranks got inputs of {sizes} elements and an output of "
                f"{output.numel()}, but takes one input per rank, and rank {self._comm.rank}'s is of the output's size"
            )
        if len(set(sizes)) > 1:
            return self._reduce_unequal(output, parts, sizes, opts)
        flat = one_behind_the_other(what, parts)
        if flat.numel() == output.numel() and len(parts) > 1:  # the first of a sequence stands for it
            flat = parts[0].as_strided((output.numel() * len(parts),), (1,))
        return self.reduce_scatter_single(output, flat, opts)

    def _reduce_unequal(self, output: torch.Tensor, parts: Tensors, sizes: list[int], opts: Any) -> Work:
        """Parts as rows of one length: the core's reduce-scatter has no other."""
        what, longest = "reduce_scatter", max(sizes)
        rows = torch.zeros(len(sizes), longest, dtype=output.dtype, device=output.device)
        for row, part, size in zip(rows, parts, sizes, strict=True):
            row[:size].copy_(dense(what, part).detach().reshape(-1))
        room = torch.empty(longest, dtype=output.dtype, device=output.device)

        def back(_: Any) -> None:
            output.detach().copy_(room[: output.numel()].view(output.shape))

        return self._reduce_rows(rows, room, output, back, opts, f"{what} of {sizes}")

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._each(self.reduce_scatter_single, outputs, inputs, opts)
