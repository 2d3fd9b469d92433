// Conversion between floating dtypes, rounding to nearest even; NaN stays NaN, overflow becomes infinity.
#pragma once

#include <cstddef>

#include "base/types.h"

namespace dcoll::kernels {

// dst[i] = (dst_type)src[i]. float16, bfloat16, float32 and float64, any pair, the same type included (a copy).
// dst and src may not overlap unless dst == src and both types have the same size. Throws ArgumentError for integers.
void cast(void* dst, DType dst_type, const void* src, DType src_type, size_t count);

}  // namespace dcoll::kernels
