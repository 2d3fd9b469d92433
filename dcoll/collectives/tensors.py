"""What a tensor is to the core: an address, a count and a dtype code.

The core knows neither torch nor NumPy, and this module imports neither: whoever passes a tensor has imported its
library. Each library has one Kind; collectives look it up by the tensor's type and are otherwise the same for both.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dcoll import _C
from dcoll.errors import ArgumentError

T = TypeVar("T")

CODES: dict[object, int] = {}
"""torch.dtype or numpy.dtype -> the core's code. Filled when the library is first seen."""

DTYPE_NAMES: dict[str, int] = {
    name: getattr(_C, name.upper())
    for name in "float16 bfloat16 float32 float64 int8 uint8 int16 uint16 int32 int64 uint32 uint64 bool".split()  # noqa: SIM905
}


class Kind:
    """One library of arrays. The callables that need no Python of ours are the library's own, for speed."""

    address: Callable[[Any], int]
    count: Callable[[Any], int]
    empty_like: Callable[[Any], Any]  # of a dense tensor: dense, without gradient
    new_empty: Callable[[Any, tuple[int, ...]], Any]  # of that shape and the tensor's dtype: dense, without gradient

    def on(self, comm: Any, tensor: Any) -> Any:
        """What has the collectives on `comm`, a communicator or its by_name, for the memory that the tensor lies in."""
        return comm

    def on_device(self, tensor: Any) -> bool:
        """Whether that is not the memory of the CPU, where the core works."""
        return False

    def dense(self, tensor: Any) -> Any:
        """The tensor itself if the core can read its memory in row-major order, else a row-major copy."""
        raise NotImplementedError

    def writable(self, tensor: Any) -> Any:
        """As dense(), for a tensor that is about to be overwritten."""
        raise NotImplementedError

    def store(self, tensor: Any, values: Any) -> None:
        """Copy `values` into the tensor, whatever its layout."""
        raise NotImplementedError

    def like(self, tensor: Any, values: Any) -> Any:
        """`values` in a new tensor laid out as `tensor` is (channels_last stays channels_last)."""
        raise NotImplementedError

    def changed(self, *tensors: Any) -> None:
        """The core wrote to their memory."""

    def wrap(self, buffer: _C.Buffer, dtype: Any, shape: tuple[int, ...], like: Any = None) -> Any:
        """The buffer's memory as a tensor, which keeps it alive; where `like` is on a device, a copy there."""
        raise NotImplementedError

    def counts(self, values: list[int]) -> Any:
        """Row counts as a one-dimensional int32 tensor."""
        raise NotImplementedError


class TorchKind(Kind):
    """torch.Tensor in the memory of the CPU or of a GPU of CUDA."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._strided = torch.strided
        self.address = torch.Tensor.data_ptr
        self.count = torch.Tensor.numel
        self.empty_like = torch.empty_like
        self.new_empty = torch.Tensor.new_empty
        for name, code in DTYPE_NAMES.items():
            CODES[getattr(torch, name)] = code
        self._written = _version_counter(torch)
        self._emulates = _C.emulates_device()
        if self._emulates:
            return  # no tensor is plain to the core then: they come here
        _C.use_torch(torch, self._written)
        _C.use_streams(lambda device: torch.cuda.current_stream(device).cuda_stream)

    def on_device(self, tensor: Any) -> bool:
        return self._emulates or not tensor.is_cpu

    def on(self, comm: Any, tensor: Any) -> Any:
        if not tensor.is_cpu:
            return _C.OnDevice(comm, tensor.get_device())
        return _C.OnDevice(comm, _C.EMULATED_DEVICE) if self._emulates else comm

    def dense(self, tensor: Any) -> Any:
        if tensor.layout is not self._strided:
            raise ArgumentError(
                f"got a tensor with layout {tensor.layout}, but dcoll takes dense ones: pass tensor.to_dense(), or its "
                "indices and values separately"
            )
        if not (tensor.is_cpu or tensor.is_cuda):
            raise ArgumentError(
                f"got a tensor on device {tensor.device}, but dcoll's collectives work on tensors of the CPU and of "
                "CUDA: pass tensor.cpu()"
            )
        if tensor.is_contiguous() and not tensor.is_neg():
            # A tangent of torch.autograd.forward_ad may be zeros without memory.
            return tensor if tensor.data_ptr() != 0 or tensor.numel() == 0 else tensor.detach().clone()
        return tensor.detach().contiguous().resolve_neg()

    writable = dense

    def store(self, tensor: Any, values: Any) -> None:
        tensor.detach().copy_(values)

    def like(self, tensor: Any, values: Any) -> Any:
        return self._torch.empty_like(tensor, requires_grad=False).copy_(values)

    def changed(self, *tensors: Any) -> None:
        # So that autograd notices when a value it saved for backward was overwritten.
        self._written(tensors)

    def wrap(self, buffer: _C.Buffer, dtype: Any, shape: tuple[int, ...], like: Any = None) -> Any:
        if math.prod(shape) == 0:
            return self._torch.empty(shape, dtype=dtype, device="cpu" if like is None else like.device)
        values = self._torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape)).view(shape)
        return values if like is None or like.is_cpu else values.to(like.device)

    def counts(self, values: list[int]) -> Any:
        return self._torch.tensor(values, dtype=self._torch.int32, device="cpu")


def _version_counter(torch: Any) -> Callable[[Sequence[Any]], None]:
    """What increments the version counters of tensors: torch's own C function where it takes several, as it does from
    some version on. It is private, and so tried before it is used.
    """
    public: Callable[[Any], None] = torch.autograd.graph.increment_version
    private: Callable[[Sequence[Any]], None] | None = getattr(torch._C, "_increment_version", None)
    probe = torch.empty(0)
    try:
        if private is not None:
            private([probe])
    except (TypeError, RuntimeError):
        private = None
    if private is not None and probe._version == 1:
        return private

    def one_by_one(tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            public(tensor)

    return one_by_one


class NumpyKind(Kind):
    """numpy.ndarray."""

    def __init__(self, numpy: Any) -> None:
        self._numpy = numpy
        self.empty_like = numpy.empty_like
        for name, code in DTYPE_NAMES.items():
            if name != "bfloat16":  # not NumPy's own: see code_of
                CODES[numpy.dtype(name)] = code
        _C.use_numpy(numpy)

    @staticmethod
    def address(tensor: Any) -> int:
        return int(tensor.__array_interface__["data"][0])

    @staticmethod
    def count(tensor: Any) -> int:
        return int(tensor.size)

    def dense(self, tensor: Any) -> Any:
        return tensor if tensor.flags.c_contiguous else self._numpy.ascontiguousarray(tensor)

    def writable(self, tensor: Any) -> Any:
        if not tensor.flags.writeable:
            raise ArgumentError("got a read-only array for a collective that works in place: pass array.copy()")
        return self.dense(tensor)

    def store(self, tensor: Any, values: Any) -> None:
        tensor[...] = values

    def new_empty(self, tensor: Any, shape: tuple[int, ...]) -> Any:
        return self._numpy.empty(shape, tensor.dtype)

    def like(self, tensor: Any, values: Any) -> Any:
        out = self._numpy.empty_like(tensor)
        out[...] = values
        return out

    def wrap(self, buffer: _C.Buffer, dtype: Any, shape: tuple[int, ...], like: Any = None) -> Any:
        if math.prod(shape) == 0:
            return self._numpy.empty(shape, dtype=dtype)
        return self._numpy.frombuffer(buffer, dtype=dtype, count=math.prod(shape)).reshape(shape)

    def counts(self, values: list[int]) -> Any:
        return self._numpy.array(values, dtype=self._numpy.int32)


KINDS: dict[type, Kind] = {}


@functools.cache
def library(name: str) -> Kind:
    """The kind of "torch" or "numpy", which is imported."""
    return TorchKind(sys.modules["torch"]) if name == "torch" else NumpyKind(sys.modules["numpy"])


def kind_of(tensor: object) -> Kind:
    """The kind of a tensor whose type is not in KINDS yet."""
    for name, class_name in (("torch", "Tensor"), ("numpy", "ndarray")):
        module = sys.modules.get(name)
        if module is not None and isinstance(tensor, getattr(module, class_name)):
            kind = KINDS[type(tensor)] = library(name)
            return kind
    raise ArgumentError(
        f"got a {type(tensor).__module__}.{type(tensor).__qualname__}, but dcoll's collectives take torch.Tensor or "
        "numpy.ndarray: convert it with torch.as_tensor() or numpy.asarray()"
    )


def code_of(dtype: Any) -> int:
    """The core's code of a dtype that CODES may not have yet."""
    code = CODES.get(dtype)
    if code is not None:
        return code
    if getattr(dtype, "name", "") == "bfloat16" and dtype.itemsize == 2:  # ml_dtypes.bfloat16, an add-on to NumPy
        CODES[dtype] = _C.BFLOAT16
        return _C.BFLOAT16
    allowed = ", ".join(DTYPE_NAMES)
    raise ArgumentError(f"got dtype {dtype}, but the allowed ones are {allowed}: convert the tensor to one of them")


def has_gradient(tensor: Any) -> bool:
    """Whether the result has to carry a gradient: then the call goes through autograd.py."""
    return getattr(tensor, "requires_grad", False) and bool(sys.modules["torch"].is_grad_enabled())
