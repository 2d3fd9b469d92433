// Non-temporal stores need only SSE2, which every x86-64 has: a cache line is written whole either way.
#include <cstdint>
#include <cstring>

#include "kernels/copy.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace dcoll::kernels {
namespace {

constexpr size_t kStreamBytes = size_t{64} << 10;  // below, the copy is still cached when it is reduced
constexpr size_t kLineBytes = 64;

}  // namespace

#ifdef __SSE2__

void stream_copy(void* dst, const void* src, size_t bytes) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  if (bytes >= kStreamBytes) {
    const size_t head = -reinterpret_cast<uintptr_t>(to) % kLineBytes;
    std::memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
    for (; bytes >= kLineBytes; bytes -= kLineBytes, to += kLineBytes, from += kLineBytes) {
      const auto* source = reinterpret_cast<const __m128i*>(from);
      auto* target = reinterpret_cast<__m128i*>(to);
      const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();
  }
  if (bytes > 0) std::memcpy(to, from, bytes);
}

#else

void stream_copy(void* dst, const void* src, size_t bytes) {
  if (bytes > 0) std::memcpy(dst, src, bytes);
}

#endif

}  // namespace dcoll::kernels
