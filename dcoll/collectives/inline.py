"""How the public collectives are called: in C where the call is a plain one, and so that other ranks can be told of a
call that was refused here."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from dcoll import _C
from dcoll.collectives import on_communicator
from dcoll.collectives.handle import Handle
from dcoll.compression.codecs import Compression
from dcoll.errors import ArgumentError, DcollError
from dcoll.job.process_sets import global_process_set
from dcoll.job.world import WORLD
from dcoll.ops import ReduceOp

Function = TypeVar("Function", bound=Callable[..., Any])


def inline(kind: str, in_place: bool = False, starts: bool = False) -> Callable[[Function], Function]:
    """The usual calls of the decorated collective are done in C, without Python; all others by the function itself.

    Usual are a dense torch.Tensor that requires no gradient, or a numpy.ndarray, arguments of the types in the
    signature but for `average`, and no compression. starts: it is asynchronous.
    """

    def decorate(function: Function) -> Function:
        ops, wrap = tuple(ReduceOp), on_communicator.wrap_rows
        handle = (Handle,) if starts else ()
        called: Any = _C.InlineCall(function, kind, ops, in_place, None, Compression.none, wrap, *handle)
        functools.update_wrapper(called, function)
        return cast(Function, called)

    return decorate


def in_order(function: Function, *, unless_named: bool = False) -> Function:
    """Where a call of the decorated function is refused before the other ranks hear of it, they may have made it: the
    core keeps the reason for them, as it does itself for calls that are done in C."""
    parameters = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            given = dict(zip(parameters, args, strict=False)) | kwargs
            process_set, named = given.get("process_set", global_process_set), given.get("name")
            comm = WORLD.comm if process_set is global_process_set else getattr(process_set, "comm", None)
            refused = isinstance(error, ArgumentError) or not isinstance(error, DcollError)
            if comm is not None and refused and not (named and unless_named):
                comm.note_refused(f"{type(error).__name__}: {error}")
            raise

    return cast(Function, call)


def in_order_or_by_name(function: Function) -> Function:
    """in_order() for asynchronous calls: those with a name meet by it, and nobody gets out of step."""
    return in_order(function, unless_named=True)
