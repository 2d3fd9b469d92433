// Gathering many small tensors into one flat buffer and back: what fusing gradients costs when they are not views.
#pragma once

#include <cstddef>
#include <span>

namespace dcoll::kernels {

struct Segment {
  void* tensor;         // the private tensor; null means "absent": packed as zeros, skipped when unpacking
  size_t offset_bytes;  // where it lies in the flat buffer
  size_t bytes;         // 0 allowed
};

// flat[offset .. offset+bytes) = tensor, for each segment. Segments do not overlap.
void pack(void* flat, std::span<const Segment> segments);
// tensor = flat[offset .. offset+bytes), for each segment that has a tensor.
void unpack(std::span<const Segment> segments, const void* flat);

}  // namespace dcoll::kernels
