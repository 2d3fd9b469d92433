// Encoded forms on the GPU: the contract of codec.h with the same bits, plus a stream (see reduce_cuda.h). Encoded
// forms are aligned to 4 bytes here. Two NaNs of different bits that are added leave either.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/codec.h"

namespace dcoll::kernels::cuda {

// How many values float16 had no room for is added to *beyond, which lies in the device's memory, unless it is null.
void encode(Codec codec, void* dst, const float* src, size_t count, float* error, unsigned long long* beyond,
            void* stream);
void decode(Codec codec, float* dst, const void* src, size_t count, void* stream);
void sum_encoded(Codec codec, void* dst, std::span<const void* const> srcs, size_t count, double scale, float* error,
                 unsigned long long* beyond, void* stream);

}  // namespace dcoll::kernels::cuda
