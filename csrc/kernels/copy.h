// Copying a gradient into the bucket that peers will read.
#pragma once

#include <cstddef>

namespace dcoll::kernels {

// dst[0 .. bytes) = src[0 .. bytes); they do not overlap. Large copies bypass the caches on their way to dst, so that
// dst is not read first, and what the caller computes with stays cached.
// Memory order: all stores are complete before any later store of the calling thread, also the bypassing ones, which
// the processor would otherwise be free to delay.
void stream_copy(void* dst, const void* src, size_t bytes);

}  // namespace dcoll::kernels
