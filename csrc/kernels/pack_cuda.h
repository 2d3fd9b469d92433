// Gathering tensors into a flat buffer and back on the GPU: the contract of pack.h plus a stream (see reduce_cuda.h).
// The segments are read before the call returns.
#pragma once

#include <span>

#include "kernels/pack.h"

namespace dcoll::kernels::cuda {

void pack(void* flat, std::span<const Segment> segments, void* stream);
void unpack(std::span<const Segment> segments, const void* flat, void* stream);

}  // namespace dcoll::kernels::cuda
