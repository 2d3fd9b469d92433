// Stochastic rounding (codec.h): loops over elements. Internal linkage, as in simd.h.
//
// Of a block of 256 elements, element i and element i + 128 share the 32 bits of hash(key, number of the block * 128 +
// i): the lower and the upper half. So what is drawn does not depend on the length of vectors.
#pragma once

#include "kernels/simd_codec.h"

namespace dcoll::kernels {
namespace {

constexpr size_t kDrawLanes = kVectorBytes / 4, kHalfBlock = kEncodedBlock / 2;

// C. Wellons, "Prospecting for hash functions", 2018 (lowbias32), with a half of the key before and one inside.
DCOLL_INLINE VecU drawn(VecU number, uint64_t key) {
  VecU x = number + static_cast<uint32_t>(key);
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15) ^ static_cast<uint32_t>(key >> 32)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Calls work(place in the block, lower halves, upper halves) for the vectors of a block; element 0 is number `first`.
template <class Work>
DCOLL_INLINE void draw_block(uint64_t key, size_t first, const Work& work) {
  VecU number;
  for (size_t lane = 0; lane < kDrawLanes; ++lane) number[lane] = static_cast<uint32_t>(first / 2 + lane);
  for (size_t i = 0; i < kHalfBlock; i += kDrawLanes, number += static_cast<uint32_t>(kDrawLanes)) {
    const VecU bits = drawn(number, key);
    work(i, bits & 0xffffu, bits >> 16);
  }
}

// 16 drawn bits are added below the kept half. Nothing to the greatest value, to infinity and to NaN.
DCOLL_INLINE VecU draw_bfloat16_bits(VecF x, VecU draw) {
  const VecU bits = (VecU)x;
  const VecI magnitude = (VecI)(bits & 0x7fffffffu);
  const VecU quiet = (VecU)(magnitude > 0x7f800000) & 0x400000u;
  return ((bits | quiet) + (draw & (VecU)(magnitude < 0x7f7f0000))) >> 16;
}

// 13 drawn bits below what normal float16 keeps, 16 below what subnormal ones do. x is at most the greatest float16.
DCOLL_INLINE VecU draw_half_bits(VecF x, VecU draw) {
  const VecU sign = (VecU)x & 0x80000000u, u = (VecU)x ^ sign;
  const VecI magnitude = (VecI)u;
  const VecU normal = (u + (draw >> 3) - (112u << 23)) >> 13;
  const VecI steps = __builtin_convertvector((VecF)u * 0x1p40f, VecI);  // of 2^-40, what is less is cut off
  const VecU subnormal = ((VecU)steps + draw) >> 16;
  const VecU special = 0x7c00u | ((VecU)(magnitude > 0x7f800000) & (0x200u | ((u >> 13) & 0x3ffu)));
  VecU out = magnitude < (113 << 23) ? subnormal : normal;
  out = magnitude >= 0x7f800000 ? special : out;
  return out | (sign >> 16);
}

DCOLL_INLINE void store_narrow(char* p, VecU x) { store_vec(p, __builtin_convertvector(x, HalfVec<uint16_t>)); }

template <class Round>
DCOLL_INLINE void draw_16_bits(char* dst, const char* src, size_t count, uint64_t key, size_t first,
                               const Round& round) {
  const auto block = [&](char* to, const char* from, size_t number) {
    draw_block(key, number, [&](size_t i, VecU lower, VecU upper) {
      store_narrow(to + i * 2, round(load_vec<VecF>(from + i * 4), lower));
      store_narrow(to + (i + kHalfBlock) * 2, round(load_vec<VecF>(from + (i + kHalfBlock) * 4), upper));
    });
  };
  size_t at = 0;
  for (; at + kEncodedBlock <= count; at += kEncodedBlock) block(dst + at * 2, src + at * 4, first + at);
  if (at == count) return;
  alignas(kVectorBytes) char from[kEncodedBlock * 4] = {}, to[kEncodedBlock * 2];
  __builtin_memcpy(from, src + at * 4, (count - at) * 4);
  block(to, from, first + at);
  __builtin_memcpy(dst + at * 2, to, (count - at) * 2);
}

void draw_bfloat16(char* dst, const char* src, size_t count, uint64_t key, size_t first) {
  draw_16_bits(dst, src, count, key, first, [](VecF x, VecU draw) { return draw_bfloat16_bits(x, draw); });
}

void draw_half(char* dst, const char* src, size_t count, uint64_t key, size_t first) {
  draw_16_bits(dst, src, count, key, first, [](VecF x, VecU draw) { return draw_half_bits(x, draw); });
}

// What is added before the nearest whole number is taken: between -1/2 and 1/2, both excluded.
DCOLL_INLINE VecF dither(VecU draw) { return __builtin_convertvector((VecI)draw, VecF) * 0x1p-16f - 0x1.fffep-2f; }

DCOLL_INLINE void draw_steps_of_block(char* dst, const char* src, size_t n, uint64_t key, size_t first) {
  alignas(kVectorBytes) float dithers[kEncodedBlock];
  draw_block(key, first, [&](size_t i, VecU lower, VecU upper) {
    store_vec(reinterpret_cast<char*>(dithers + i), dither(lower));
    store_vec(reinterpret_cast<char*>(dithers + i + kHalfBlock), dither(upper));
  });
  quantize_block(dst, src, n, dithers);
}

void draw_steps(char* dst, const char* src, size_t count, uint64_t key, size_t first) {
  size_t at = 0;
  for (; at + kEncodedBlock <= count; at += kEncodedBlock, dst += 4 + kEncodedBlock) {
    draw_steps_of_block(dst, src + at * 4, kEncodedBlock, key, first + at);
  }
  if (at < count) draw_steps_of_block(dst, src + at * 4, count - at, key, first + at);
}

}  // namespace
}  // namespace dcoll::kernels
