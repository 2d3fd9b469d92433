// The CPU kernels of pack.h. memcpy is the right tool: libc's is tuned per CPU, for small and for large copies.
#include <cstring>

#include "kernels/pack.h"

namespace dcoll::kernels {

void pack(void* flat, std::span<const Segment> segments) {
  for (const Segment& segment : segments) {
    if (segment.bytes == 0) continue;
    char* to = static_cast<char*>(flat) + segment.offset_bytes;
    if (!segment.tensor) {
      std::memset(to, 0, segment.bytes);
    } else if (to != segment.tensor) {  // a view of the flat buffer is where it belongs already
      std::memcpy(to, segment.tensor, segment.bytes);
    }
  }
}

void pack_range(void* flat, std::span<const Segment> segments, size_t begin, size_t end) {
  char* to = static_cast<char*>(flat) + begin;
  for_each_part(segments, begin, end, [&](const char* from, size_t bytes) {
    std::memcpy(to, from, bytes);
    to += bytes;
  });
}

void unpack_range(std::span<const Segment> segments, const void* flat, size_t begin, size_t end) {
  const char* from = static_cast<const char*>(flat) + begin;
  for_each_part(segments, begin, end, [&](char* to, size_t bytes) {
    std::memcpy(to, from, bytes);
    from += bytes;
  });
}

void unpack(std::span<const Segment> segments, const void* flat) {
  for (const Segment& segment : segments) {
    if (segment.bytes == 0 || !segment.tensor) continue;
    const char* from = static_cast<const char*>(flat) + segment.offset_bytes;
    if (from != segment.tensor) std::memcpy(segment.tensor, from, segment.bytes);
  }
}

}  // namespace dcoll::kernels
