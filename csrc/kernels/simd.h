// Vectors of this translation unit's instruction set, and how each dtype is loaded into and stored from them.
//
// Written with the compilers' vector extensions (GCC, Clang), so one text serves SSE2, AVX2, AVX-512 and other CPUs;
// intrinsics appear only where an instruction has no operator: F16C, blends saturating subtraction and VNNI. See
// dispatch.h for why all of this has internal linkage.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

// The optimiser would leave the larger ones as calls, and pass whole rows of vectors through memory.
#define DCOLL_INLINE [[gnu::always_inline]] inline

namespace dcoll::kernels {
namespace {

#if defined(__AVX512BW__)
constexpr size_t kVectorBytes = 64;
constexpr size_t kUnroll = 2;
#elif defined(__AVX2__)
constexpr size_t kVectorBytes = 32;
constexpr size_t kUnroll = 4;
#else
constexpr size_t kVectorBytes = 16;
constexpr size_t kUnroll = 4;
#endif

template <class T, size_t Bytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(Bytes)));
};
template <class T>
using Vec = typename VectorOf<T, kVectorBytes>::Type;
// As many lanes as Vec<T> has, when the lanes are half as wide: what Vec<T> narrows to.
template <class T>
using HalfVec = typename VectorOf<T, kVectorBytes / 2>::Type;

using VecF = Vec<float>;
using VecU = Vec<uint32_t>;
using VecI = Vec<int32_t>;
using VecH = Vec<uint16_t>;

template <class V>
DCOLL_INLINE V load_vec(const char* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}
template <class V>
DCOLL_INLINE void store_vec(char* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}

// Stores that bypass the caches, to a multiple of the vector's size; and before other threads may read what they wrote.
#if defined(__AVX512BW__)
DCOLL_INLINE void stream_vec(char* p, VecF v) { _mm512_stream_ps((float*)p, (__m512)v); }
#elif defined(__AVX2__)
DCOLL_INLINE void stream_vec(char* p, VecF v) { _mm256_stream_ps((float*)p, (__m256)v); }
#elif defined(__SSE2__)
DCOLL_INLINE void stream_vec(char* p, VecF v) { _mm_stream_ps((float*)p, (__m128)v); }
#else
DCOLL_INLINE void stream_vec(char* p, VecF v) { store_vec(p, v); }
#endif
#if defined(__SSE2__)
DCOLL_INLINE void end_of_streams() { _mm_sfence(); }
#else
DCOLL_INLINE void end_of_streams() {}
#endif

// ---- bfloat16: the upper half of a float32 ----

// The bfloat16 is in the lower half of each lane, zeros above. A NaN is made quiet, so that dropping its low bits
// cannot turn it into infinity.
DCOLL_INLINE VecU float_to_bfloat16_bits(VecF x) {
  const VecU bits = (VecU)x;
  const VecU rounded = bits + (((bits >> 16) & 1u) + 0x7fffu);
  return ((x != x) ? (bits | 0x400000u) : rounded) >> 16;
}

// ---- float16: hardware conversion, or in integers (F. Giesen, "half_to_float_fast5", "float_to_half_fast3_rtne") ----

#if defined(__AVX512BW__)
// The zero-masking forms, all lanes kept: the plain ones make GCC 12 warn of an uninitialised value (PR 105593).
DCOLL_INLINE VecF widen_half(HalfVec<uint16_t> h) { return _mm512_maskz_cvtph_ps(0xffff, (__m256i)h); }
DCOLL_INLINE HalfVec<uint16_t> narrow_half(VecF f) {
  return (HalfVec<uint16_t>)_mm512_maskz_cvtps_ph(0xffff, f, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__AVX2__)
DCOLL_INLINE VecF widen_half(HalfVec<uint16_t> h) { return _mm256_cvtph_ps((__m128i)h); }
DCOLL_INLINE HalfVec<uint16_t> narrow_half(VecF f) {
  return (HalfVec<uint16_t>)_mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT);
}
#else
// Lanes hold a float16 in their lower half, zeros above.
DCOLL_INLINE VecF half_bits_to_float(VecU h) {
  const VecU magnitude = (h & 0x7fffu) << 13;
  const VecU exponent = magnitude & (0x7c00u << 13);
  const VecU rebiased = magnitude + ((127u - 15u) << 23);
  // Infinity and NaN need the exponent raised once more; a NaN comes out quiet, as from the hardware.
  const VecU nan_bit = (VecU)((VecI)magnitude > (int32_t)(0x7c00u << 13)) & 0x400000u;  // signed compares are cheaper
  const VecU special = (rebiased + ((128u - 16u) << 23)) | nan_bit;
  // Subnormals: subtracting the implicit one normalises, and no operand is subnormal (so DAZ cannot bite).
  const VecU subnormal = (VecU)((VecF)(rebiased + (1u << 23)) - (VecF)(VecU{} + (113u << 23)));
  VecU bits = (exponent == (0x7c00u << 13)) ? special : rebiased;
  bits = (exponent == 0u) ? subnormal : bits;
  return (VecF)(bits | ((h & 0x8000u) << 16));
}
// Rounded to nearest even; the float16 is in the lower half of each lane, zeros above.
DCOLL_INLINE VecU float_to_half_bits(VecF x) {
  const VecU sign = (VecU)x & 0x80000000u;
  const VecI bits = (VecI)((VecU)x ^ sign);  // non-negative: signed comparison is right, and cheaper than unsigned
  const VecU u = (VecU)bits;
  const VecU normal = (u + (((uint32_t)(15 - 127) << 23) + 0xfffu) + ((u >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 aligns the mantissa so that the FPU rounds at the right bit.
  const VecU magic = VecU{} + (((127u - 15u) + (23u - 10u) + 1u) << 23);
  const VecU subnormal = (VecU)((VecF)bits + (VecF)magic) - magic;
  const VecU nan = 0x7e00u | ((u >> 13) & 0x3ffu);
  VecU out = (bits < (int32_t)(113u << 23)) ? subnormal : normal;
  out = (bits >= (int32_t)((127u + 16u) << 23)) ? VecU{} + 0x7c00u : out;
  out = (bits > (int32_t)(255u << 23)) ? nan : out;
  return out | (sign >> 16);
}
DCOLL_INLINE VecF widen_half(HalfVec<uint16_t> h) { return half_bits_to_float(__builtin_convertvector(h, VecU)); }
DCOLL_INLINE HalfVec<uint16_t> narrow_half(VecF f) {
  return __builtin_convertvector(float_to_half_bits(f), HalfVec<uint16_t>);
}
#endif

// ---- dtypes: what one step of a kernel loads, computes with and stores ----

template <class V>
struct Wide {
  V v[kUnroll];
};

// Registers hold what memory holds.
template <class T>
struct Plain {
  using Lane = T;
  static constexpr size_t kElemBytes = sizeof(T);
  static constexpr size_t kStepBytes = kUnroll * kVectorBytes;
  DCOLL_INLINE static Wide<Vec<T>> load(const char* p) {
    Wide<Vec<T>> w;
#pragma GCC unroll 8
    for (size_t u = 0; u < kUnroll; ++u) w.v[u] = load_vec<Vec<T>>(p + u * kVectorBytes);
    return w;
  }
  DCOLL_INLINE static void store(char* p, const Wide<Vec<T>>& w) {
#pragma GCC unroll 8
    for (size_t u = 0; u < kUnroll; ++u) store_vec(p + u * kVectorBytes, w.v[u]);
  }
};
struct Bool : Plain<uint8_t> {};

// Two elements share a 32-bit lane: even elements go to one vector, odd ones to the next. Element-wise work does not
// mind the order, and shifts and masks replace the lane-crossing shuffles of widening in order.
struct BFloat16 {
  using Lane = float;
  static constexpr size_t kElemBytes = 2;
  static constexpr size_t kStepBytes = kUnroll * kVectorBytes / 2;
  DCOLL_INLINE static Wide<VecF> load(const char* p) {
    Wide<VecF> w;
#pragma GCC unroll 8
    for (size_t u = 0; u < kUnroll; u += 2) {
      const VecU pair = load_vec<VecU>(p + u * kVectorBytes / 2);
      w.v[u] = (VecF)(pair << 16);
      w.v[u + 1] = (VecF)(pair & 0xffff0000u);
    }
    return w;
  }
  // Rounds to nearest even. Unlike a cast this needs no care for NaN: one computed from bfloat16 inputs has only zeros
  // in the dropped half, and is never rounded up into infinity's neighbour.
#if defined(__AVX512VNNI__)
  DCOLL_INLINE static VecU round(VecF even, VecF odd) {
    return (VecU)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)(carried(even) >> 16), (__m512i)carried(odd));
  }
#else
  // Both elements of a lane at once: up if the dropped half is at least one half, where an even kept half asks for one
  // unit more.
  DCOLL_INLINE static VecU round(VecF even, VecF odd) {
    const VecH kept = upper_halves(even, odd), dropped = lower_halves(even, odd);
    const VecH kept_is_even = ~kept & (VecH{} + (uint16_t)1);
    return (VecU)(kept + (subtract_saturated(dropped, kept_is_even) >> 15));
  }
#endif
  DCOLL_INLINE static void store(char* p, const Wide<VecF>& w) {
#pragma GCC unroll 8
    for (size_t u = 0; u < kUnroll; u += 2) store_vec(p + u * kVectorBytes / 2, round(w.v[u], w.v[u + 1]));
  }

 private:
#if defined(__AVX512VNNI__)
  // The kept half is rounded. What rounding adds, 0x7fff and the last kept bit, are the halves of one operand of a dot
  // product with 1 and 1, which one instruction adds to the lane.
  DCOLL_INLINE static VecU carried(VecF x) {
    constexpr int kAndOr = 0xea;  // (x & 0x10000) | 0x7fff, which GCC 12 would make two instructions
    const __m512i addends =
        _mm512_ternarylogic_epi32((__m512i)x, (__m512i)(VecU{} + 0x10000u), (__m512i)(VecU{} + 0x7fffu), kAndOr);
    return (VecU)_mm512_dpwssd_epi32((__m512i)x, addends, (__m512i)(VecU{} + 0x10001u));
  }
#else
  // The upper (lower) half of every lane of `even` and of `odd`, in turns: bfloat16 in the order of memory.
#if defined(__AVX512BW__)
  // One instruction; a shift and a blend, as below, cost 12 % of the kernel on Zen 4.
  DCOLL_INLINE static VecH upper_halves(VecF even, VecF odd) { return halves(even, odd, 1); }
  DCOLL_INLINE static VecH lower_halves(VecF even, VecF odd) { return halves(even, odd, 0); }
  DCOLL_INLINE static VecH halves(VecF even, VecF odd, uint16_t half) {
    VecH from{};  // loop-invariant: index 2 * lane + half, plus 32 for the second operand
    for (uint16_t lane = 0; lane < 16; ++lane) {
      from[2 * lane] = 2 * lane + half;
      from[2 * lane + 1] = 32 + 2 * lane + half;
    }
    return (VecH)_mm512_permutex2var_epi16((__m512i)even, (__m512i)from, (__m512i)odd);
  }
#else
  DCOLL_INLINE static VecH upper_halves(VecF even, VecF odd) { return merge((VecU)even >> 16, (VecU)odd); }
  DCOLL_INLINE static VecH lower_halves(VecF even, VecF odd) { return merge((VecU)even, (VecU)odd << 16); }
  // The lower half of each lane of `even`, the upper half of each lane of `odd`.
  DCOLL_INLINE static VecH merge(VecU even, VecU odd) {
#if defined(__AVX2__)
    return (VecH)_mm256_blend_epi16((__m256i)even, (__m256i)odd, 0xaa);
#else
    return (VecH)((even & 0xffffu) | (odd & 0xffff0000u));
#endif
  }
#endif
  // Not below zero. b is 0 or 1.
  DCOLL_INLINE static VecH subtract_saturated(VecH a, VecH b) {
#if defined(__AVX512BW__)
    return (VecH)_mm512_subs_epu16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (VecH)_mm256_subs_epu16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (VecH)_mm_subs_epu16((__m128i)a, (__m128i)b);
#else
    return a - (b & (VecH)(a != (uint16_t)0));
#endif
  }
#endif
};

#if defined(__AVX2__)
struct Float16 {
  using Lane = float;
  static constexpr size_t kElemBytes = 2;
  static constexpr size_t kStepBytes = kUnroll * kVectorBytes / 2;
  DCOLL_INLINE static Wide<VecF> load(const char* p) {
    Wide<VecF> w;
#pragma GCC unroll 8
    for (size_t u = 0; u < kUnroll; ++u) {
      w.v[u] = widen_half(load_vec<HalfVec<uint16_t>>(p + u * kVectorBytes / 2));
    }
    return w;
  }
  DCOLL_INLINE static void store(char* p, const Wide<VecF>& w) {
#pragma GCC unroll 8
#if defined(__AVX512BW__)
    for (size_t u = 0; u < kUnroll; ++u) store_vec(p + u * kVectorBytes / 2, narrow_half(w.v[u]));
#else
    // One store for two vectors: a core stores one per cycle, of whatever width.
    for (size_t u = 0; u < kUnroll; u += 2) {
      const __m256i low = _mm256_castsi128_si256((__m128i)narrow_half(w.v[u]));
      store_vec(p + u * kVectorBytes / 2, (VecU)_mm256_inserti128_si256(low, (__m128i)narrow_half(w.v[u + 1]), 1));
    }
#endif
  }
};
#else
// Even and odd elements apart, as for BFloat16.
struct Float16 {
  using Lane = float;
  static constexpr size_t kElemBytes = 2;
  static constexpr size_t kStepBytes = kUnroll * kVectorBytes / 2;
  DCOLL_INLINE static Wide<VecF> load(const char* p) {
    Wide<VecF> w;
#pragma GCC unroll 8
    for (size_t u = 0; u < kUnroll; u += 2) {
      const VecU pair = load_vec<VecU>(p + u * kVectorBytes / 2);
      w.v[u] = half_bits_to_float(pair & 0xffffu);
      w.v[u + 1] = half_bits_to_float(pair >> 16);
    }
    return w;
  }
  DCOLL_INLINE static void store(char* p, const Wide<VecF>& w) {
#pragma GCC unroll 8
    for (size_t u = 0; u < kUnroll; u += 2) {
      store_vec(p + u * kVectorBytes / 2, float_to_half_bits(w.v[u]) | (float_to_half_bits(w.v[u + 1]) << 16));
    }
  }
};
#endif

}  // namespace
}  // namespace dcoll::kernels
