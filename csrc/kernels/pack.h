// Gathering many small tensors into one flat buffer and back: what fusing gradients costs when they are not views.
#pragma once

#include <algorithm>
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

// Calls use(address, bytes) for each stretch of bytes [begin, end) of the flat buffer where it lies in its tensor. The
// segments are in order and without gaps, and all have a tensor.
template <typename Use>
void for_each_part(std::span<const Segment> segments, size_t begin, size_t end, Use use) {
  if (begin >= end) return;
  const auto behind = std::upper_bound(segments.begin(), segments.end(), begin,
                                       [](size_t at, const Segment& segment) { return at < segment.offset_bytes; });
  for (auto segment = behind - 1; begin < end; ++segment) {
    const size_t skip = begin - segment->offset_bytes, bytes = std::min(segment->bytes - skip, end - begin);
    if (bytes > 0) use(static_cast<char*>(segment->tensor) + skip, bytes);
    begin += bytes;
  }
}

// pack() and unpack() of bytes [begin, end) of the flat buffer alone; as for_each_part().
void pack_range(void* flat, std::span<const Segment> segments, size_t begin, size_t end);
void unpack_range(std::span<const Segment> segments, const void* flat, size_t begin, size_t end);

}  // namespace dcoll::kernels
