"""What a gradient is on its way between nodes (codecs), and what compressing it has lost so far (residuals).

Horovod's horovod.torch.compression has the first of these names.
"""

from dcoll.compression.codecs import (
    AutoCompressor,
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    Int8Compressor,
    NoneCompressor,
    PowerSGD,
    StatefulCompressor,
    TopKCompressor,
)

__all__ = [
    "AutoCompressor",
    "BF16Compressor",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "Int8Compressor",
    "NoneCompressor",
    "PowerSGD",
    "StatefulCompressor",
    "TopKCompressor",
]
