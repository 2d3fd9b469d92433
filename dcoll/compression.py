"""What a gradient is on its way between ranks: as it is, in 16 bits, or whatever a class of the user's makes of it.

Horovod's interface: a class with two static methods. Those given here are known to the core as well, which casts whole
buckets while they are in the cache anyway; a class of the user's is called for each tensor, in Python.
"""

from typing import Any, ClassVar

from dcoll import _C
from dcoll.errors import ArgumentError


class Compressor:
    """Base of all: what is sent in place of a tensor, and how the tensor is made of what came back.

    The sum, or the average, of what compress() returns is formed over the ranks, so it must be of the same shape and
    dtype on each, and decompress(sum of compressed) should be about the sum of the tensors.
    """

    wire_dtype: ClassVar[int | None] = None
    """The dtype, by the core's code, that the core casts floating tensors to; None: compress() is called."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """What is sent, and what decompress() needs to know of the tensor."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor again."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


def _narrow(tensor: Any, name: str) -> tuple[Any, Any]:
    """The tensor in the 16-bit dtype of its library, and its own dtype if it has to be restored."""
    import torch

    if isinstance(tensor, torch.Tensor):
        if not tensor.dtype.is_floating_point or tensor.itemsize <= 2:
            return tensor, None
        return tensor.to(getattr(torch, name)), tensor.dtype
    if tensor.dtype.kind != "f" or tensor.itemsize <= 2:
        return tensor, None
    if name == "bfloat16":
        raise ArgumentError("NumPy has no bfloat16: use Compression.fp16, or pass torch.as_tensor(array)")
    return tensor.astype(name), tensor.dtype


def _widen(tensor: Any, ctx: Any) -> Any:
    if ctx is None:
        return tensor
    return tensor.astype(ctx) if hasattr(tensor, "astype") else tensor.to(ctx)


class FP16Compressor(Compressor):
    """Sends floating tensors as float16: half the bytes, 11 bits of precision, nothing above 65504."""

    wire_dtype = _C.FLOAT16

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _narrow(tensor, "float16")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return _widen(tensor, ctx)


class BF16Compressor(Compressor):
    """Sends floating tensors as bfloat16: half the bytes, 8 bits of precision, the range of float32."""

    wire_dtype = _C.BFLOAT16

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _narrow(tensor, "bfloat16")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return _widen(tensor, ctx)


class Compression:
    """The compressors there are; classes derived from Compressor do as well."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def wire_dtype_of(compression: Any) -> int | None:
    """The dtype the core casts to for `compression`: of the ones given here only, not of a class derived from one,
    whose methods may do anything.
    """
    return compression.wire_dtype if compression in (FP16Compressor, BF16Compressor) else None
