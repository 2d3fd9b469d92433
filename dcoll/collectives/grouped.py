"""Collectives on groups of tensors: a group succeeds or fails as a whole, and is one operation to the caller."""

import math
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from dcoll import _C
from dcoll.collectives import on_communicator
from dcoll.collectives.handle import Handle, Handles
from dcoll.collectives.tensors import CODES, KINDS, code_of, has_gradient, kind_of
from dcoll.compression.codecs import Compression, encode, narrow
from dcoll.errors import ArgumentError
from dcoll.ops import Adasum, ReduceOp, wrong_op


def list_of(tensors: Any, what: str) -> list[Any]:
    if not isinstance(tensors, (list, tuple)):
        raise ArgumentError(f"{what} takes a list of tensors, but got a {type(tensors).__name__}")
    return list(tensors)


def _checked(op: ReduceOp) -> None:
    if type(op) is not ReduceOp:
        raise wrong_op(op)


def _dense(tensors: list[Any], in_place: bool) -> list[Any]:
    """What the core can read: the tensors or row-major copies."""
    kinds = [KINDS.get(type(tensor)) or kind_of(tensor) for tensor in tensors]
    for tensor in tensors:
        code_of(tensor.dtype)
    return [kind.writable(t) if in_place else kind.dense(t) for kind, t in zip(kinds, tensors, strict=True)]


def _finished(tensors: list[Any], dense: list[Any], results: list[Any], in_place: bool) -> list[Any]:
    """The caller's results, from those of the dense tensors."""
    if in_place:
        for tensor, one in zip(tensors, dense, strict=True):
            if one is not tensor:
                KINDS[type(tensor)].store(tensor, one)
        for of in set(map(type, tensors)):
            KINDS[of].changed(*(tensor for tensor in tensors if type(tensor) is of))
        return tensors
    pairs = zip(tensors, dense, results, strict=True)
    return [out if one is tensor else KINDS[type(tensor)].like(tensor, out) for tensor, one, out in pairs]


def compressed(tensors: Sequence[Any], compression: Any, run: Callable[[Sequence[Any]], Any]) -> list[Any]:
    """What `run` makes of the tensors, which travel compressed."""
    if compression is Compression.none:
        return run(tensors)  # type: ignore[no-any-return]
    pairs = [narrow(compression, tensor) for tensor in tensors]
    results = run([sent for sent, _ in pairs])
    return [compression.decompress(out, context) for out, (_, context) in zip(results, pairs, strict=True)]


def encoded(tensors: Any, compression: Any, op: ReduceOp) -> tuple[list[Any], str, Callable[[list[Any]], list[Any]]]:
    """What of the tensors travels, the codec of what is float32, and what makes the results of what arrives."""
    each = [encode(compression, tensor, op) for tensor in list_of(tensors, "grouped_allreduce")]
    codec = max((codec for _, _, codec in each), default="")  # of all float32 there is; "" for what is cast here

    def wide(results: list[Any]) -> list[Any]:
        return [compression.decompress(out, context) for out, (_, context, _) in zip(results, each, strict=True)]

    return [sent for sent, _, _ in each], codec, wide


def start_compressed(
    comm: on_communicator.Lane,
    tensors: Any,
    compression: Any,
    options: tuple[ReduceOp, str, float, float],
    in_place: bool,
) -> Handle:
    """start_allreduce() of what travels compressed, or not. options: its own, from op to postscale."""
    if compression is Compression.none:
        return start_allreduce(comm, tensors, *options, in_place=in_place)
    sent, codec, wide = encoded(tensors, compression, options[0])
    if in_place and all(one is tensor for one, tensor in zip(sent, tensors, strict=True)):
        return start_allreduce(comm, sent, *options, in_place=True, codec=codec)

    def finish(results: list[Any]) -> list[Any]:
        whole = wide(results)
        pairs = zip(tensors, whole, strict=True)
        return [on_communicator.stored(tensor, one) for tensor, one in pairs] if in_place else whole

    return start_allreduce(comm, sent, *options, in_place=False, codec=codec).then(finish)


def _graded() -> bool:
    """Whether the core has to leave alone what requires a gradient. It is asked to look before Python does: for a
    hundred tensors that takes a quarter of the time that reducing them does."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.is_grad_enabled()


def allreduce_sync(
    comm: _C.Communicator,
    tensors: Any,
    op: ReduceOp,
    name: str,
    prescale: float,
    postscale: float,
    codec: str = "",
    in_place: bool = False,
    *,
    carries: bool = False,
) -> Any:
    """All tensors reduced as one. carries: None where one of them requires a gradient, and nothing is done."""
    _checked(op)
    listed = list_of(tensors, "grouped_allreduce")
    graded = carries and _graded()
    out = _C.grouped_allreduce_sync(comm, listed, in_place, op, name, prescale, postscale, graded, codec)
    if out is not None or (carries and any(map(has_gradient, listed))):
        return out
    return start_allreduce(comm, listed, op, name, prescale, postscale, in_place, codec).wait()


def start_allreduce(
    comm: on_communicator.Lane,
    tensors: Any,
    op: ReduceOp,
    name: str,
    prescale: float,
    postscale: float,
    in_place: bool,
    codec: str = "",
) -> Handle:
    """A handle whose result is the list. In place, the tensors are written to by wait(), or poll() that says True."""
    _checked(op)
    listed = list_of(tensors, "grouped_allreduce")
    dense = _dense(listed, in_place)
    started: Any = _C.grouped_allreduce(comm, dense, in_place, op, name, prescale, postscale, codec)
    if started is not None:
        core, results = started
        return Handle(core, listed, lambda _: _finished(listed, dense, results, in_place), None)
    # In place one alone would be written to when it arrives, also where nobody waits for it any more.
    parts = _parts_on_devices(dense, least=1 if in_place else 2) if op is not Adasum else {}
    alone = [i for i in range(len(listed)) if not any(i in part for part in parts.values())]
    options = prescale, postscale, "", codec
    handles = [
        on_communicator.allreduce(comm, listed[i], op, f"{name}[{i}]", *options, in_place=in_place) for i in alone
    ]
    for part in parts.values():
        some = [dense[i] for i in part]
        flat = sys.modules["torch"].cat([tensor.detach().reshape(-1) for tensor in some])
        first = f"{name}[{part[0]}]"
        handles.append(on_communicator.allreduce(comm, flat, op, first, *options, _text_of(some), in_place=True))

    def finish(results: list[Any]) -> list[Any]:
        found = dict(zip(alone, results, strict=False))
        for part, flat in zip(parts.values(), results[len(alone) :], strict=True):
            outs = [listed[i] if in_place else KINDS[type(listed[i])].empty_like(listed[i]) for i in part]
            _spread(flat, outs)
            found.update(zip(part, outs, strict=True))
        return [found[i] for i in range(len(listed))]

    return _together(handles, finish)


def _parts_on_devices(tensors: list[Any], least: int) -> dict[Any, list[int]]:
    """Those that travel as one: of one dtype and device, `least` or more. Put together there, which costs little beside
    the way to the host."""
    parts: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if kind_of(tensor).on_device(tensor):
            parts.setdefault((tensor.dtype, tensor.device), []).append(i)
    return {kind: part for kind, part in parts.items() if len(part) >= least}


def _text_of(tensors: list[Any]) -> str:
    """What ranks compare of tensors that travel as one, and messages say: the first in words, all as a hash."""
    shown = 3
    texts = [f"{'x'.join(map(str, tensor.shape)) or '1'}" for tensor in tensors]
    hashed = f", ... #{zlib.crc32(' '.join(texts).encode()):08x}" if len(texts) > shown else ""
    return f"{len(texts)} tensors: {', '.join(texts[:shown])}{hashed}"


def _spread(flat: Any, outs: list[Any]) -> None:
    torch = sys.modules["torch"]
    pieces = torch.split(flat, [out.numel() for out in outs])
    with torch.no_grad():
        torch._foreach_copy_(outs, [piece.view(out.shape) for piece, out in zip(pieces, outs, strict=True)])


def _together(handles: list[Handle], finish: Callable[[list[Any]], list[Any]] = lambda results: results) -> Handle:
    """finish: makes the group's results of those of the handles."""
    core: Any = Handles(handles)
    return Handle(core, handles, lambda _: finish(core.results), None)


def _run_rows(run: Callable[[list[Any]], Any], listed: list[Any], what: str) -> tuple[list[Any], Any] | None:
    """The tensors or row-major copies, and what `run` returned for them. None where one of them lies on a device."""
    core = run(listed)
    if core is not None:
        return listed, core
    for tensor in listed:
        kind_of(tensor)
        on_communicator.rows_of(tensor, what)
    if any(kind_of(tensor).on_device(tensor) for tensor in listed):
        return None
    dense = _dense(listed, in_place=False)
    described = []
    for tensor in dense:
        kind = kind_of(tensor)  # a copy may be of another type than the tensor was
        row_elems = math.prod(tensor.shape[1:])
        described.append((kind.address(tensor), tuple(tensor.shape), row_elems, CODES[tensor.dtype]))
    return dense, run(described)


def _unpacked(dense: list[Any], core: Any) -> list[Any]:
    """New tensors with the results of a finished group of rows."""
    one_of_each = {type(tensor): tensor for tensor in dense}
    makers = {of: (KINDS.get(of) or kind_of(tensor)).new_empty for of, tensor in one_of_each.items()}
    results = _C.unpack_rows(core, dense, makers)
    if results is not None:
        return results
    results = []
    for tensor, rows in zip(dense, core.rows(), strict=True):
        results.append(kind_of(tensor).new_empty(tensor, (rows, *tensor.shape[1:])))
    core.unpack([kind_of(out).address(out) for out in results])
    return results


def _handle_of(started: tuple[list[Any], Any]) -> Handle:
    dense, core = started
    return Handle(core, None, lambda _: _unpacked(dense, core), None)


def _rows_sync(
    run: Callable[..., Any],
    start: Callable[..., Handle],
    what: str,
    comm: _C.Communicator,
    tensors: Any,
    options: tuple[Any, ...],
    carries: bool,
) -> Any:
    listed = list_of(tensors, what)
    core = run(comm, listed, *options, graded=carries and _graded())
    if core is not None:
        return _unpacked(listed, core)
    if carries and any(map(has_gradient, listed)):
        return None
    done = _run_rows(lambda given: run(comm, given, *options), listed, what)
    return start(comm, listed, *options).wait() if done is None else _unpacked(*done)


def allgather_sync(comm: _C.Communicator, tensors: Any, name: str, carries: bool = False) -> Any:
    """Each of the tensors gathered, by one operation. carries: as allreduce_sync() takes it."""
    what, options = "grouped_allgather", (name,)
    return _rows_sync(_C.grouped_allgather_sync, start_allgather, what, comm, tensors, options, carries)


def start_allgather(comm: on_communicator.Lane, tensors: Any, name: str) -> Handle:
    """A handle whose result is the list of the gathered tensors. The tensors are copied at once."""
    listed = list_of(tensors, "grouped_allgather")
    started = _run_rows(lambda given: _C.grouped_allgather(comm, given, name), listed, "grouped_allgather")
    if started is None:
        return _together([on_communicator.allgather(comm, t, f"{name}[{i}]") for i, t in enumerate(listed)])
    return _handle_of(started)


def reducescatter_sync(
    comm: _C.Communicator,
    tensors: Any,
    op: ReduceOp,
    name: str,
    prescale: float,
    postscale: float,
    *,
    carries: bool = False,
) -> Any:
    """This rank's shares of each of the tensors, by one operation per dtype. carries: as allreduce_sync() takes it."""
    _checked(op)
    what, options = "grouped_reducescatter", (op, name, prescale, postscale)
    return _rows_sync(_C.grouped_reducescatter_sync, start_reducescatter, what, comm, tensors, options, carries)


def start_reducescatter(
    comm: on_communicator.Lane, tensors: Any, op: ReduceOp, name: str, prescale: float, postscale: float
) -> Handle:
    """A handle whose result is the list of this rank's shares. The tensors are copied at once."""
    _checked(op)
    listed = list_of(tensors, "grouped_reducescatter")
    options = (op, name, prescale, postscale)
    started = _run_rows(lambda given: _C.grouped_reducescatter(comm, given, *options), listed, "grouped_reducescatter")
    if started is None:
        one = on_communicator.reducescatter
        return _together([one(comm, t, op, f"{name}[{i}]", prescale, postscale) for i, t in enumerate(listed)])
    return _handle_of(started)
