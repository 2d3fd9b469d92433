// Conversion between floating dtypes on the GPU: the contract of cast.h plus a stream (see reduce_cuda.h).
#pragma once

#include <cstddef>

#include "base/types.h"

namespace dcoll::kernels::cuda {

void cast(void* dst, DType dst_type, const void* src, DType src_type, size_t count, void* stream);

}  // namespace dcoll::kernels::cuda
