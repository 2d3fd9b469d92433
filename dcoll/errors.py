"""What dcoll raises. Every class comes from the core, so that C++ and Python share one regime."""

from dcoll._C import ArgumentError, DcollError, JoinedError, MismatchError, PeerError, TimeoutError, TransportError

HorovodInternalError = DcollError
"""Horovod's name for "a collective failed"."""

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
