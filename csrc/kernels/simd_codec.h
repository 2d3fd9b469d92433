// Loops over elements of the encoded forms of codec.h and topk.h. Internal linkage, as in simd.h.
#pragma once

#include "kernels/simd.h"

namespace dcoll::kernels {
namespace {

constexpr size_t kEncodedBlock = 256;

constexpr int32_t kGreatestHalf = 0x477fe000, kInfinityBits = 0x7f800000;  // the bits of 65504 and of infinity

DCOLL_INLINE bool beyond_half(int32_t x) {
  const int32_t magnitude = x & 0x7fffffff;
  return (magnitude > kGreatestHalf) & (magnitude < kInfinityBits);
}

size_t count_beyond_half(const char* src, size_t count) {
  size_t found = 0;
  for (size_t at = 0; at < count; at += kEncodedBlock) {
    const size_t n = count - at < kEncodedBlock ? count - at : kEncodedBlock;
    int32_t here = 0;
    for (size_t i = 0; i < n; ++i) {
      int32_t x;
      __builtin_memcpy(&x, src + (at + i) * 4, 4);
      here += beyond_half(x);
    }
    found += static_cast<size_t>(here);
  }
  return found;
}

void clamp_to_half(char* dst, const char* src, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    int32_t x;
    __builtin_memcpy(&x, src + i * 4, 4);
    x = beyond_half(x) ? (x & ~0x7fffffff) | kGreatestHalf : x;
    __builtin_memcpy(dst + i * 4, &x, 4);
  }
}

// n is a constant for all blocks but the last, so that copies become loads and stores. dithers: what is added to each
// multiple of the scale before it is rounded, or null.
DCOLL_INLINE void quantize_block(char* dst, const char* src, size_t n, const float* dithers) {
  alignas(kVectorBytes) float x[kEncodedBlock] = {};
  alignas(kVectorBytes) int8_t steps[kEncodedBlock];
  __builtin_memcpy(x, src, n * 4);
  int32_t most = 0;  // of the bits of magnitudes, which are ordered as they are
  for (size_t i = 0; i < kEncodedBlock; ++i) {
    const int32_t magnitude = __builtin_bit_cast(int32_t, x[i]) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  const float greatest = __builtin_bit_cast(float, most);
  const bool finite = most < kInfinityBits, counts = greatest >= 1e-36f;  // below, 127 / greatest would be infinite
  float scale = !finite ? __builtin_nanf("") : counts ? greatest / 127.0f : 0.0f;
  if (finite && scale * 127.0f > 0x1.fffffep127f) {
    scale = __builtin_bit_cast(float, __builtin_bit_cast(int32_t, scale) - 1);
  }
  const float per_step = finite && counts ? 127.0f / greatest : 0.0f;
  for (size_t i = 0; i < kEncodedBlock; ++i) {
    // Adding 1.5 * 2^23 leaves the whole number, rounded to nearest even, in the low bits.
    const float shifted = x[i] * per_step + (dithers == nullptr ? 0.0f : dithers[i]) + 12582912.0f;
    int32_t step = __builtin_bit_cast(int32_t, shifted) - 0x4b400000;
    if (dithers != nullptr) step = step > 127 ? 127 : step < -127 ? -127 : step;  // x * per_step may be 127 and a bit
    steps[i] = static_cast<int8_t>(step);
  }
  if (!finite) __builtin_memset(steps, 0, kEncodedBlock);  // 0 * NaN
  __builtin_memcpy(dst, &scale, 4);
  __builtin_memcpy(dst + 4, steps, n);
}

void quantize(char* dst, const char* src, size_t count) {
  size_t at = 0;
  for (; at + kEncodedBlock <= count; at += kEncodedBlock, dst += 4 + kEncodedBlock) {
    quantize_block(dst, src + at * 4, kEncodedBlock, nullptr);
  }
  if (at < count) quantize_block(dst, src + at * 4, count - at, nullptr);
}

// GCC 12 would take the bytes one by one.
DCOLL_INLINE VecI widen_steps(const int8_t* p) {
#if defined(__AVX512BW__)
  return (VecI)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (VecI)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  VecI whole;
  for (size_t i = 0; i < kVectorBytes / 4; ++i) whole[i] = p[i];
  return whole;
#endif
}

DCOLL_INLINE void dequantize_block(char* dst, const char* src, size_t n) {
  alignas(kVectorBytes) float x[kEncodedBlock];
  alignas(kVectorBytes) int8_t steps[kEncodedBlock] = {};
  float scale;
  __builtin_memcpy(&scale, src, 4);
  __builtin_memcpy(steps, src + 4, n);
  for (size_t i = 0; i < kEncodedBlock; i += kVectorBytes / 4) {
    store_vec(reinterpret_cast<char*>(x + i), __builtin_convertvector(widen_steps(steps + i), VecF) * scale);
  }
  __builtin_memcpy(dst, x, n * 4);
}

void dequantize(char* dst, const char* src, size_t count) {
  size_t at = 0;
  for (; at + kEncodedBlock <= count; at += kEncodedBlock, src += 4 + kEncodedBlock) {
    dequantize_block(dst + at * 4, src, kEncodedBlock);
  }
  if (at < count) dequantize_block(dst + at * 4, src, count - at);
}

// ---- top-k: where magnitudes begin that are worth a look (topk.h) ----

DCOLL_INLINE size_t add_lanes(uint32_t lanes, uint32_t first, uint32_t* found, size_t n) {
  for (; lanes != 0; lanes &= lanes - 1) found[n++] = first + static_cast<uint32_t>(__builtin_ctz(lanes));
  return n;
}

DCOLL_INLINE uint32_t magnitude_bits(const char* p) {
  uint32_t x;
  __builtin_memcpy(&x, p, 4);
  return x & 0x7fffffffu;
}

// The numbers, from `first` on, of elements whose magnitude's bits are `least` or more. `found` has room for all and a
// vector more. Few are expected.
size_t find_beyond(uint32_t* found, const char* src, size_t count, uint32_t least, uint32_t first) {
  constexpr size_t kLanes = kVectorBytes / 4;
  size_t n = 0, i = 0;
#if defined(__AVX512BW__)
  // Compressed in a register and stored whole: vpcompressd to memory is microcode on Zen 4. Merge-masked, because the
  // zero-masked form waits for what its register held.
  __m512i numbers = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)),
                                     _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  const __m512i step = _mm512_set1_epi32(kLanes), magnitude = _mm512_set1_epi32(0x7fffffff),
                threshold = _mm512_set1_epi32(static_cast<int>(least));
  for (; i + kLanes <= count; i += kLanes) {
    const __m512i x = _mm512_and_si512(_mm512_loadu_si512(src + i * 4), magnitude);
    const __mmask16 lanes = _mm512_cmpge_epi32_mask(x, threshold);
    _mm512_storeu_si512(found + n, _mm512_mask_compress_epi32(numbers, lanes, numbers));
    n += static_cast<size_t>(__builtin_popcount(lanes));
    numbers = _mm512_add_epi32(numbers, step);
  }
#elif defined(__AVX2__)
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), below = _mm256_set1_epi32(static_cast<int>(least - 1));
  for (; i + kLanes <= count; i += kLanes) {
    const __m256i x = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i * 4)), magnitude);
    const int lanes = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(x, below)));
    n = add_lanes(static_cast<uint32_t>(lanes), first + static_cast<uint32_t>(i), found, n);
  }
#elif defined(__SSE2__)
  const __m128i magnitude = _mm_set1_epi32(0x7fffffff), below = _mm_set1_epi32(static_cast<int>(least - 1));
  for (; i + kLanes <= count; i += kLanes) {
    const __m128i x = _mm_and_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i * 4)), magnitude);
    const int lanes = _mm_movemask_ps(_mm_castsi128_ps(_mm_cmpgt_epi32(x, below)));
    n = add_lanes(static_cast<uint32_t>(lanes), first + static_cast<uint32_t>(i), found, n);
  }
#endif
  for (; i < count; ++i)
    n = add_lanes(magnitude_bits(src + i * 4) >= least, first + static_cast<uint32_t>(i), found, n);
  return n;
}

}  // namespace
}  // namespace dcoll::kernels
