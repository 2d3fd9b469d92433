"""What dcoll raises. Every class comes from the core, so that C++ and Python share one regime."""

from dcoll._C import ArgumentError, DcollError, JoinedError, MismatchError, PeerError, TimeoutError, TransportError

HorovodInternalError = DcollError
"""Horovod's name for "a collective failed"."""


def text_of(error: BaseException) -> str:
    """Class and text of an error as other ranks can be told, whatever its own text is: it may be one that `__str__`
    fails to make, or have the name of a file that is no UTF-8."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text.encode(errors="backslashreplace").decode()


__all__ = [
    "ArgumentError",
    "DcollError",
    "HorovodInternalError",
    "JoinedError",
    "MismatchError",
    "PeerError",
    "TimeoutError",
    "TransportError",
]
