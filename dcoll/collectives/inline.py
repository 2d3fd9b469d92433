"""How the public collectives are called: in C where the call is a plain one, and so that other ranks can be told of a
call that was refused here."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from dcoll import _C
from dcoll.collectives import on_communicator
from dcoll.collectives.handle import Handle
from dcoll.compression.codecs import Compression
from dcoll.ops import ReduceOp

Function = TypeVar("Function", bound=Callable[..., Any])


def inline(
    kind: str, in_place: bool = False, starts: bool = False, grouped: bool = False
) -> Callable[[Function], Function]:
    """The usual calls of the decorated collective are done in C, without Python; all others by the function itself.

    Usual are a dense torch.Tensor that requires no gradient, or a numpy.ndarray, arguments of the types in the
    signature but for `average`, and no compression. starts: it is asynchronous. grouped: it takes a list of tensors;
    all calls are the function's.

    Where a call is refused before the other ranks hear of it, they may have made it: the core keeps the reason for
    them.
    """

    def decorate(function: Function) -> Function:
        options: dict[str, Any] = {"handle": Handle} if starts else {}
        options |= {"no_compression": Compression.none, "wrap_rows": on_communicator.wrap_rows, "grouped": grouped}
        called: Any = _C.InlineCall(function, kind, tuple(ReduceOp), in_place, **options)
        functools.update_wrapper(called, function)
        return cast(Function, called)

    return decorate
