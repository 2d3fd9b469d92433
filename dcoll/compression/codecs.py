"""What a gradient is on its way between nodes: as it is, in fewer bits, or whatever a class of the user's makes of it.

Horovod's interface: a class with two static methods. Those given here are known to the core as well, which encodes
float32 that is summed or averaged itself, between nodes only (csrc/kernels/codec.h says how). For other dtypes and
operators, and for classes of the user's, compress() is called, in Python.
"""

import ctypes
import numbers
from typing import Any, ClassVar

from dcoll import _C
from dcoll.errors import ArgumentError
from dcoll.ops import Adasum, Average, ReduceOp, Sum


class Compressor:
    """Base of all: what is sent in place of a tensor, and how the tensor is made of what came back.

    The sum, or the average, of what compress() returns is formed over the ranks, so it must be of the same shape and
    dtype on each, and decompress(sum of compressed) should be about the sum of the tensors.
    """

    codec: ClassVar[str] = ""
    """The core's name for what it makes of float32; "": compress() is called."""
    wire_dtype: ClassVar[int | None] = None
    """The dtype, by the core's code, that the core casts wider floating tensors to; None: compress() is called."""

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


def _check_flag(codec: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ArgumentError(f"Compression.{codec} got {name} {value!r}, but takes True or False")


def _is_number(value: Any) -> bool:
    """NumPy's too."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _rounded(codec: str, stochastic: bool) -> str:
    """The core's name for a codec that rounds so."""
    _check_flag(codec, "stochastic", stochastic)
    return f"{codec} stochastic" if stochastic else codec


class _Narrow(Compressor):
    """Sends floating tensors in a 16-bit dtype of their library."""

    _dtype: ClassVar[str]

    def __init__(self, *, stochastic: bool = False) -> None:
        """stochastic: float32 is rounded up or down at random, the nearer neighbour being the likelier, so that the
        mean of many results is the value. The class itself rounds to nearest.
        """
        self.codec = _rounded(type(self).codec, stochastic)  # type: ignore[misc]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """The tensor so, and its own dtype if it has to be restored."""
        import torch

        if isinstance(tensor, torch.Tensor):
            if not tensor.dtype.is_floating_point or tensor.itemsize <= 2:
                return tensor, None
            return tensor.to(getattr(torch, cls._dtype)), tensor.dtype
        if tensor.dtype.kind != "f" or tensor.itemsize <= 2:
            return tensor, None
        if cls._dtype == "bfloat16":
            raise ArgumentError("NumPy has no bfloat16: use Compression.fp16, or pass torch.as_tensor(array)")
        return tensor.astype(cls._dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        if ctx is None:
            return tensor
        return tensor.astype(ctx) if hasattr(tensor, "astype") else tensor.to(ctx)


class FP16Compressor(_Narrow):
    """Sends floating tensors as float16: half the bytes, 11 bits of precision, nothing above 65504.

    float32 beyond that goes as 65504, which the log says once; every element is rounded twice, however many nodes. By
    NCCL it becomes infinity, and NCCL rounds each time that it passes a rank.
    """

    codec, wire_dtype, _dtype = "fp16", _C.FLOAT16, "float16"


class BF16Compressor(_Narrow):
    """Sends floating tensors as bfloat16: half the bytes, 8 bits of precision, the range of float32."""

    codec, wire_dtype, _dtype = "bf16", _C.BFLOAT16, "bfloat16"


class Int8Compressor(NoneCompressor):
    """Sends float32 as multiples of a scale for each 256 elements: about a quarter of the bytes.

    An element is off by half a scale at most, the greatest magnitude of its block / 254, twice. For sums and averages;
    other dtypes travel as they are. DistributedOptimizer adds what was lost to the next step's gradients.
    """

    codec = "int8"
    feedback = True

    def __init__(self, *, feedback: bool = True, stochastic: bool = False) -> None:
        """feedback: False forgets what was lost. stochastic: rounded up or down at random, as by bf16(stochastic=True);
        for those who want no feedback. The class itself is as good as an instance with feedback.
        """
        _check_flag("int8", "feedback", feedback)
        self.feedback = feedback
        self.codec = _rounded("int8", stochastic)  # type: ignore[misc]

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _unless_float32(tensor, "Compression.int8")


class TopKCompressor(NoneCompressor):
    """Sends the elements of greatest magnitude of float32 alone: of each piece of the tensor, about two megabytes, a
    share.

    The result is the sum, or the average, of what each node sends, so of an element that only one node sends, that.
    For sums and averages; other dtypes travel as they are. With DistributedOptimizer what is not sent is added to the
    next step's gradients.

        optimizer = dcoll.DistributedOptimizer(optimizer, compression=dcoll.Compression.topk(ratio=0.01))
    """

    codec = "topk 0.01"
    feedback = True
    momentum = 0.0
    warmup_steps = 0
    start_step = 0

    def __init__(
        self,
        ratio: float = 0.01,
        *,
        feedback: bool = True,
        momentum: float = 0.0,
        warmup_steps: int = 0,
        start_step: int = 0,
        exchange: str = "auto",
    ) -> None:
        """ratio: the share of the elements that is sent, more than 0 and at most 1.
        feedback: False forgets what is not sent.
        momentum: momentum correction of Deep Gradient Compression (Lin et al., 2018): what is not sent gathers momentum
            before it is. In place of the optimizer's own, which is to have none then.
        warmup_steps: in so many steps more is sent at first: a quarter, then less at each step, geometrically.
        start_step: in so many first steps gradients travel as they are, and warmup_steps come after them. Checkpoints
            have how many there were.
        exchange: "gather": every node's selection goes to every other one, and up to ratio times nodes of the elements
            arrive. "owners": to the nodes who own the elements, who add up, select again and pass on, so that ratio of
            them arrive (Ok-Topk; Li and Hoefler, 2022); the bytes do not grow with the number of nodes. What an owner
            does not pass on it keeps as what is lost. "auto": owners where that is predicted to halve the time.

        Raises ArgumentError for others.
        """
        if not _is_number(ratio) or not 0 < ratio <= 1 or not ctypes.c_float(float(ratio)).value:
            raise ArgumentError(
                f"ratio is {ratio!r}, but must be a share of the elements: more than 0, as a float32 too, and at most 1"
            )
        if not _is_number(momentum) or not 0 <= momentum < 1:
            raise ArgumentError(f"momentum is {momentum!r}, but must be at least 0 and less than 1")
        for name, steps in (("warmup_steps", warmup_steps), ("start_step", start_step)):
            if type(steps) is not int or steps < 0:
                raise ArgumentError(f"{name} is {steps!r}, but must be a number of steps, 0 for none")
        _check_flag("topk", "feedback", feedback)
        if momentum and not feedback:
            raise ArgumentError("momentum corrects what is kept for later steps: pass feedback=True, or no momentum")
        if exchange not in ("auto", "gather", "owners"):
            raise ArgumentError(f"exchange is {exchange!r}, but must be 'auto', 'gather' or 'owners'")
        self.ratio = float(ratio)
        self.codec = f"topk {self.ratio!r}" + ("" if exchange == "auto" else f" {exchange}")  # type: ignore[misc]
        self.feedback = feedback
        self.momentum = float(momentum)
        self.warmup_steps = warmup_steps
        self.start_step = start_step

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _unless_float32(tensor, "Compression.topk")


def _unless_float32(tensor: Any, name: str) -> tuple[Any, Any]:
    """What the core would have encoded for another operator."""
    if "float32" in str(getattr(tensor, "dtype", "")):
        raise ArgumentError(f"{name} is for all-reduces with op Sum or Average. Use Compression.fp16, bf16 or none")
    return tensor, None


class AutoCompressor(NoneCompressor):
    """Sends float32 by the codec that is allowed where that is predicted to be faster than as it is, bucket by bucket.

    The first large all-reduce between nodes measures the links and how fast this machine encodes; every later one is
    predicted both ways (`python -m dcoll.plan explain --compression` shows how), and a line on standard error of rank 0
    says what was chosen for its size, and why. All ranks choose alike. What DistributedOptimizer does with what is lost
    is as with the codec itself. "bf16" and "fp16" are always used where NCCL sums.

        optimizer = dcoll.DistributedOptimizer(optimizer, compression=dcoll.Compression.auto(lossy="bf16"))
    """

    feedback = True

    def __init__(self, lossy: str | None = None, *, ratio: float = 0.01) -> None:
        """lossy: the loss you allow: "bf16", "fp16", "int8" or "topk"; None: none, so everything goes as it is.
        ratio: of "topk". Raises ArgumentError for others.
        """
        codecs = {"bf16": "bf16", "fp16": "fp16", "int8": "int8", "topk": TopKCompressor(ratio).codec}
        if lossy is not None and lossy not in codecs:
            raise ArgumentError(f"Compression.auto got lossy {lossy!r}, but takes {', '.join(codecs)} or None")
        self.codec = f"auto {codecs[lossy]}" if lossy is not None else ""  # type: ignore[misc]


class OptimizersCompressor:
    """Base of what keeps something from step to step: an object for one DistributedOptimizer, not for single calls."""


class StatefulCompressor(OptimizersCompressor):
    """Base for compressors of your own that keep something of each parameter, as the error they made.

    Pass an instance to DistributedOptimizer(compression=...), each optimizer its own. encode() is called for every
    gradient of a step, in the same order on all ranks, and decode() for every result. What encode() returns is summed,
    or averaged, over the ranks, as op says: then all ranks must return the same number of tensors, of the same shapes
    and of one dtype. With gathers = True it is gathered instead, and the first dimensions may differ.

        import torch, dcoll

        class ScaledSign(dcoll.compression.StatefulCompressor):
            '''A byte for each element: its sign, times the mean magnitude.'''

            gathers = True

            def __init__(self):
                self.errors = {}

            def encode(self, name, tensor):
                tensor = tensor + self.errors.get(name, 0)
                scale, signs = tensor.abs().mean(), tensor.sign()
                self.errors[name] = tensor - scale * signs
                return [signs.flatten().to(torch.int8), scale]

            def decode(self, name, tensors, like):
                return sum(scale * signs for signs, scale in tensors).view_as(like)

        dcoll.init()
        model = torch.nn.Linear(20, 10)
        optimizer = dcoll.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=ScaledSign())
        model(torch.ones(5, 20)).sum().backward()
        optimizer.step()
    """

    gathers: ClassVar[bool] = False
    """decode() gets what each rank has encoded, instead of the sum or average."""

    def encode(self, name: str, tensor: Any) -> Any:
        """What is sent for a gradient: a tensor or a list of them, of any shape and dtype.

        tensor: of the parameter's shape and dtype; zeros where this rank has none. clone() it to keep it: the result
        is written to it. For a parameter that no rank has a gradient of, what decode() returns is not used.
        """
        raise NotImplementedError

    def decode(self, name: str, tensors: Any, like: Any) -> Any:
        """The gradient: a tensor of the shape of `like`, whose values mean nothing.

        tensors: a list with the sum, or average, of each tensor. With gathers = True, for each rank the list of its
        tensors (those without dimensions with one), and decode() returns the sum, which is divided if op is Average.
        """
        raise NotImplementedError


class PowerSGD(OptimizersCompressor):
    """Sends of a matrix of gradients two thin factors: a projection on `rank` directions, which follow the gradients.

    For DistributedOptimizer, with op Average or Sum. A gradient of shape (n, ...), m values for each of the n, is a
    matrix n x m; (n + m) * rank values travel for it. What the projection loses is added to the next step's gradient,
    which takes memory of a gradient's size. Gradients of float16 or bfloat16, those of one dimension, and small ones
    travel as they are. A matrix with infinity or NaN in it on any rank arrives as NaN, and what is kept stays.

    rank: 1 or more; more is more exact. min_compression_rate: gradients travel as they are where n * m is not more than
    so many times what the factors have. seed: of the first directions; the same on every rank. start_step: in so many
    first steps gradients travel as they are; those of a training's beginning have no few directions yet. Raises
    ArgumentError.

        optimizer = dcoll.DistributedOptimizer(optimizer, compression=dcoll.Compression.powersgd(rank=4))
    """

    def __init__(self, rank: int = 4, min_compression_rate: float = 2.0, seed: int = 0, start_step: int = 0) -> None:
        for name, number, least in (("rank", rank, 1), ("seed", seed, 0), ("start_step", start_step, 0)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ArgumentError(
                    f"Compression.powersgd got {name} {number!r}, but takes a whole number of {least} or more"
                )
        if not _is_number(min_compression_rate) or not min_compression_rate >= 1:
            raise ArgumentError(
                f"Compression.powersgd got min_compression_rate {min_compression_rate!r}, but takes a number of 1 or "
                "more: times that the factors are smaller than the matrix"
            )
        self.rank = rank
        self.min_compression_rate = min_compression_rate
        self.seed = seed
        self.start_step = start_step

    def __repr__(self) -> str:
        return f"Compression.powersgd(rank={self.rank})"

    def compresses(self, tensor: Any) -> bool:
        """Whether two factors travel for a torch tensor of this shape and dtype."""
        if tensor.dim() < 2 or tensor.numel() == 0 or str(tensor.dtype) not in ("torch.float32", "torch.float64"):
            return False
        rows = tensor.shape[0]
        factors = (rows + tensor.numel() // rows) * self.rank
        return bool(factors * self.min_compression_rate < tensor.numel())


class Compression:
    """The compressors there are; classes derived from Compressor do as well."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    topk = TopKCompressor
    powersgd = PowerSGD
    auto = AutoCompressor


_OURS = (FP16Compressor, BF16Compressor, Int8Compressor, TopKCompressor, AutoCompressor)


def _is_ours(compression: Any) -> bool:
    """Whether the core knows it: one of the classes given here, or an instance, but not of a class derived from one,
    whose methods may do anything.
    """
    return compression in _OURS or type(compression) in _OURS


def check_compression(compression: Any) -> None:
    """Raises ArgumentError, which lists what is allowed, for what is no compressor."""
    if isinstance(compression, OptimizersCompressor):
        return
    if not callable(getattr(compression, "compress", None)) or not callable(getattr(compression, "decompress", None)):
        raise ArgumentError(
            f"compression is {compression!r}, but must be dcoll.Compression.none, fp16, bf16, int8, topk(ratio) or "
            "auto(lossy), or a class with compress() and decompress(); for DistributedOptimizer also "
            "Compression.powersgd(rank=4), or an object of a class derived from dcoll.compression.StatefulCompressor"
        )


def codec_of(compression: Any, tensor: Any, op: ReduceOp) -> str:
    """The core's codec for this all-reduce; "" where compress() is to be called, and where nothing is compressed."""
    if not _is_ours(compression) or op not in (Sum, Average):
        return ""
    return compression.codec if str(getattr(tensor, "dtype", "")) in ("torch.float32", "float32") else ""


def narrow(compression: Any, tensor: Any) -> tuple[Any, Any]:
    """What compress() makes of it: what travels, and what decompress() needs."""
    if compression is NoneCompressor:
        return tensor, None
    check_compression(compression)
    if isinstance(compression, OptimizersCompressor):
        name = repr(compression) if isinstance(compression, PowerSGD) else type(compression).__name__
        raise ArgumentError(
            f"{name} keeps something from step to step, so it is for DistributedOptimizer(compression=...). Here use "
            "Compression.fp16, bf16, int8 or none"
        )
    if name := _called_if_stochastic(compression):
        _unless_float32(tensor, name)
    return compression.compress(tensor)  # type: ignore[no-any-return]


def encode(compression: Any, tensor: Any, op: ReduceOp) -> tuple[Any, Any, str]:
    """What is handed to the core, what decompress() needs, and the core's codec. With one the tensor itself is the
    operand, and decompress() leaves the result alone.
    """
    if compression is NoneCompressor:
        return tensor, None, ""
    if op is Adasum:
        check_adasum(compression)
    codec = codec_of(compression, tensor, op)
    return (tensor, None, codec) if codec else (*narrow(compression, tensor), "")


def codec_for_buckets(compression: Any) -> dict[str, Any]:
    """The core's codec of float32 buckets, which are summed or averaged, and its options; {} if it has none."""
    if not _is_ours(compression):
        return {}
    options = ("codec", "feedback", "momentum", "warmup_steps", "start_step")
    return {name: getattr(compression, name) for name in options if hasattr(compression, name)}


def codec_on_devices(compression: Any) -> str | None:
    """The core's codec of float32 buckets that stay on a device; None: those lie in the CPU's memory, where codecs are
    and what they keep. 16 bits to nearest are a cast, which a GPU makes.
    """
    if compression is NoneCompressor:
        return ""
    casts = ("", "fp16", "bf16", "auto fp16", "auto bf16")
    return compression.codec if _is_ours(compression) and compression.codec in casts else None


def check_adasum(compression: Any) -> None:
    """Raises ArgumentError for what encodes sums and averages alone, and would do nothing here."""
    ours = compression if isinstance(compression, type) else type(compression)
    name = {Int8Compressor: "Compression.int8", TopKCompressor: "Compression.topk"}.get(ours, "")
    name = name or _called_if_stochastic(compression)
    if ours is AutoCompressor and compression.codec:
        name = f"Compression.auto({compression.codec.split()[1]!r})"
    if name:
        raise ArgumentError(f"{name} encodes sums and averages, but op is Adasum. Use Compression.fp16, bf16 or none")


def _called_if_stochastic(compression: Any) -> str:
    """The name of 16 bits at random, which compress() would round to nearest; "" for everything else."""
    ours = _is_ours(compression) and isinstance(compression, _Narrow)
    stochastic = ours and compression.codec.endswith(" stochastic")
    return f"Compression.{compression.codec.split()[0]}(stochastic=True)" if stochastic else ""


def wire_dtype_of(compression: Any) -> int | None:
    """The dtype the core casts to for `compression`."""
    return compression.wire_dtype if _is_ours(compression) else None
