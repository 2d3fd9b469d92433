// Element-wise reduction on the GPU: the contract of reduce.h, bit for bit (NaN payloads aside), plus a stream.
//
// Work is enqueued on `stream` (a cudaStream_t; null is the default stream) of the current device and the call returns.
// All pointers must be readable or writable from that device: its own memory, or a peer's that is mapped.
#pragma once

#include <cstddef>
#include <span>

#include "base/types.h"

namespace dcoll::kernels::cuda {

// Pointers travel as kernel parameters, of which there are 4 KiB.
inline constexpr size_t kMaxPointers = 128;

void reduce2(void* dst, const void* a, const void* b, size_t count, DType dtype, ReduceOp op, double scale,
             void* stream);

// At most kMaxPointers sources; ArgumentError above that.
void reduce_n(void* dst, std::span<const void* const> srcs, size_t count, DType dtype, ReduceOp op, double scale,
              void* stream);

// At most kMaxPointers sources and as many destinations.
void reduce_n_to_n(std::span<void* const> dsts, std::span<const void* const> srcs, size_t count, DType dtype,
                   ReduceOp op, double scale, void* stream);

void scale(void* dst, const void* src, size_t count, DType dtype, double scale, void* stream);

}  // namespace dcoll::kernels::cuda
