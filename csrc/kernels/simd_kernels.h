// The loops of reduce and cast over the vectors of simd.h, and the table of them. Included by isa_*.cc only.
#pragma once

#include "kernels/dispatch.h"
#include "kernels/simd.h"
#include "kernels/simd_codec.h"
#include "kernels/simd_draw.h"
#include "kernels/simd_low_rank.h"

namespace dcoll::kernels {
namespace {

// ---- operators on vectors of T ----

template <class T>
using UnsignedVec = Vec<std::make_unsigned_t<T>>;

struct Sum {
  template <class T>
  DCOLL_INLINE static Vec<T> apply(Vec<T> a, Vec<T> b) {
    if constexpr (std::is_floating_point_v<T>) {
      return a + b;
    } else {
      return (Vec<T>)((UnsignedVec<T>)a + (UnsignedVec<T>)b);  // signed overflow would be undefined; this wraps
    }
  }
};
struct Product {
  template <class T>
  DCOLL_INLINE static Vec<T> apply(Vec<T> a, Vec<T> b) {
    if constexpr (std::is_floating_point_v<T>) {
      return a * b;
    } else {
      return (Vec<T>)((UnsignedVec<T>)a * (UnsignedVec<T>)b);
    }
  }
};
// For NaN in b the comparison is false and b is taken; NaN in a needs the second select.
struct Min {
  template <class T>
  DCOLL_INLINE static Vec<T> apply(Vec<T> a, Vec<T> b) {
    const Vec<T> least = a < b ? a : b;
    if constexpr (std::is_floating_point_v<T>) return a != a ? a : least;
    return least;
  }
};
struct Max {
  template <class T>
  DCOLL_INLINE static Vec<T> apply(Vec<T> a, Vec<T> b) {
    const Vec<T> most = a > b ? a : b;
    if constexpr (std::is_floating_point_v<T>) return a != a ? a : most;
    return most;
  }
};
struct Or {
  template <class T>
  DCOLL_INLINE static Vec<T> apply(Vec<T> a, Vec<T> b) {
    return a | b;
  }
};
struct And {
  template <class T>
  DCOLL_INLINE static Vec<T> apply(Vec<T> a, Vec<T> b) {
    return a & b;
  }
};
struct Xor {
  template <class T>
  DCOLL_INLINE static Vec<T> apply(Vec<T> a, Vec<T> b) {
    return a ^ b;
  }
};

// ---- scale ----

// Truncating division of integers. Up to 32 bits it is done in floating point, which vectorises, and is exact: a
// quotient that is no integer differs from the nearest integer by more than the type's rounding error (float for 8
// and 16 bits, double for 32).
template <class T>
DCOLL_INLINE Wide<Vec<T>> divide(const Wide<Vec<T>>& w, int64_t divisor) {
  constexpr size_t kLanes = sizeof(w) / sizeof(T);
  T lanes[kLanes];
  __builtin_memcpy(lanes, &w, sizeof(w));
  if constexpr (sizeof(T) <= 2) {
    const float d = (float)divisor;
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = (T)(int32_t)((float)lanes[i] / d);
  } else if constexpr (sizeof(T) == 4) {
    const double d = (double)divisor;
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = (T)((double)lanes[i] / d);
  } else {
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = lanes[i] / divisor;
  }
  Wide<Vec<T>> out;
  __builtin_memcpy(&out, lanes, sizeof(out));
  return out;
}

// Multiplies integers in double and truncates, kept within T. Out of line: it is rare, and long in every loop.
template <class T>
__attribute__((noinline)) void multiply(Wide<Vec<T>>& w, double factor) {
  constexpr bool kSigned = (T)-1 < (T)0;
  constexpr T kLeast = kSigned ? (T)((uint64_t)1 << (8 * sizeof(T) - 1)) : (T)0;
  constexpr T kMost = (T)~kLeast;
  constexpr size_t kLanes = sizeof(w) / sizeof(T);
  T lanes[kLanes];
  __builtin_memcpy(lanes, &w, sizeof(w));
  for (size_t i = 0; i < kLanes; ++i) {
    const double x = (double)lanes[i] * factor;
    lanes[i] = x <= (double)kLeast ? kLeast : x >= (double)kMost ? kMost : (T)x;
  }
  __builtin_memcpy(&w, lanes, sizeof(w));
}

// A Scale made ready for vectors once per call. In the loop, converting it would cost as much as the multiplication.
template <class Lane>
struct VectorScale {
  bool active, divides;
  int64_t divisor;  // integers divide by this,
  double factor;    // or are multiplied by this
  Vec<Lane> by;     // floating types multiply or divide by this

  DCOLL_INLINE explicit VectorScale(const Scale& scale)
      : active(scale.active), divides(scale.divisor != 1), divisor(scale.divisor), factor(scale.factor), by{} {
    if constexpr (std::is_floating_point_v<Lane>) {
      for (size_t i = 0; i < kVectorBytes / sizeof(Lane); ++i) by[i] = divides ? (Lane)divisor : (Lane)scale.factor;
    }
  }
};

template <class Lane>
DCOLL_INLINE void apply_scale(Wide<Vec<Lane>>& w, const VectorScale<Lane>& scale) {
  if constexpr (!std::is_floating_point_v<Lane>) {
    if (scale.divides) {
      w = divide<Lane>(w, scale.divisor);
    } else {
      Wide<Vec<Lane>> scaled = w;  // w itself, its address taken, would live in memory
      multiply<Lane>(scaled, scale.factor);
      w = scaled;
    }
  } else if (scale.divides) {
#pragma GCC unroll 8
    for (size_t u = 0; u < kUnroll; ++u) w.v[u] /= scale.by;
  } else {
#pragma GCC unroll 8
    for (size_t u = 0; u < kUnroll; ++u) w.v[u] *= scale.by;
  }
}

// ---- reduce ----

template <class D, class Op>
DCOLL_INLINE void combine(Wide<Vec<typename D::Lane>>& acc, const Wide<Vec<typename D::Lane>>& x) {
#pragma GCC unroll 8
  for (size_t u = 0; u < kUnroll; ++u) acc.v[u] = Op::template apply<typename D::Lane>(acc.v[u], x.v[u]);
}

// One step at byte offset `at`: every source is loaded before anything is stored, so a destination may be a source. The
// value stays in registers between the first source and the last, so 16-bit floats are rounded once.
// kSrcs, kDsts: known counts, or 0 for n_srcs, n_dsts.
template <class D, class Op, size_t kSrcs, size_t kDsts>
DCOLL_INLINE void reduce_step(char* const* dsts, size_t n_dsts, const char* const* srcs, size_t n_srcs, size_t at,
                              const VectorScale<typename D::Lane>& scale) {
  auto acc = D::load(srcs[0] + at);
  if constexpr (kSrcs != 0) {
#pragma GCC unroll 8
    for (size_t s = 1; s < kSrcs; ++s) combine<D, Op>(acc, D::load(srcs[s] + at));
  } else {
    for (size_t s = 1; s < n_srcs; ++s) combine<D, Op>(acc, D::load(srcs[s] + at));
  }
  if (scale.active) apply_scale(acc, scale);
  if constexpr (kDsts != 0) {
#pragma GCC unroll 8
    for (size_t d = 0; d < kDsts; ++d) D::store(dsts[d] + at, acc);
  } else {
    for (size_t d = 0; d < n_dsts; ++d) D::store(dsts[d] + at, acc);
  }
}

// The last elements, fewer than a step: the same step on zero-padded copies, so the result is the same bits.
template <class D, class Op>
__attribute__((noinline)) void reduce_tail(char* const* dsts, size_t n_dsts, const char* const* srcs, size_t n_srcs,
                                           size_t at, size_t bytes, const Scale& scale_in) {
  const VectorScale<typename D::Lane> scale(scale_in);
  alignas(kVectorBytes) char first[D::kStepBytes] = {}, next[D::kStepBytes] = {};
  __builtin_memcpy(first, srcs[0] + at, bytes);
  auto acc = D::load(first);
  for (size_t s = 1; s < n_srcs; ++s) {
    __builtin_memcpy(next, srcs[s] + at, bytes);
    combine<D, Op>(acc, D::load(next));
  }
  if (scale.active) apply_scale(acc, scale);
  D::store(first, acc);
  for (size_t d = 0; d < n_dsts; ++d) __builtin_memcpy(dsts[d] + at, first, bytes);
}

template <class D, class Op, size_t kSrcs, size_t kDsts>
void reduce_loop(char* const* dsts, size_t n_dsts, const char* const* srcs, size_t n_srcs, size_t bytes,
                 const Scale& scale_in) {
  const VectorScale<typename D::Lane> scale(scale_in);
  const char*
      src[kSrcs + 1];  // local copies stay in registers; through the caller's array each store would reload them
  char* dst[kDsts + 1];
  for (size_t s = 0; s < kSrcs; ++s) src[s] = srcs[s];
  for (size_t d = 0; d < kDsts; ++d) dst[d] = dsts[d];
  const char* const* from = kSrcs != 0 ? src : srcs;
  char* const* to = kDsts != 0 ? dst : dsts;
  size_t at = 0;
  for (; at + D::kStepBytes <= bytes; at += D::kStepBytes) {
    reduce_step<D, Op, kSrcs, kDsts>(to, n_dsts, from, n_srcs, at, scale);
  }
  if (at < bytes) reduce_tail<D, Op>(dsts, n_dsts, srcs, n_srcs, at, bytes - at, scale_in);
}

// Counts of sources and destinations worth a loop of their own: p ranks to one (ring and tree steps, one-shot), p to p
// (two-shot) for the usual small p.
template <class D, class Op>
void reduce(char* const* dsts, size_t n_dsts, const char* const* srcs, size_t n_srcs, size_t count,
            const Scale& scale) {
  const size_t bytes = count * D::kElemBytes;
  const auto loop = [&]() -> decltype(&reduce_loop<D, Op, 0, 0>) {
    if (n_dsts == 1) {
      if (n_srcs == 1) return reduce_loop<D, Op, 1, 1>;
      if (n_srcs == 2) return reduce_loop<D, Op, 2, 1>;
      if (n_srcs == 3) return reduce_loop<D, Op, 3, 1>;
      if (n_srcs == 4) return reduce_loop<D, Op, 4, 1>;
      return reduce_loop<D, Op, 0, 1>;
    }
    if (n_srcs == 2 && n_dsts == 2) return reduce_loop<D, Op, 2, 2>;
    if (n_srcs == 3 && n_dsts == 3) return reduce_loop<D, Op, 3, 3>;
    if (n_srcs == 4 && n_dsts == 4) return reduce_loop<D, Op, 4, 4>;
    return reduce_loop<D, Op, 0, 0>;
  }();
  loop(dsts, n_dsts, srcs, n_srcs, bytes, scale);
}

// ---- cast ----

// Casts go through blocks of float32 on the stack, which stay in L1: a decoder and an encoder for each type instead of
// a loop for each pair. A block is read whole before it is written, so casting in place works for types of one size.
constexpr size_t kBlock = 128;
constexpr size_t kLanesF = kVectorBytes / sizeof(float);

// Rounds to nearest, or to odd: towards zero, then the last bit set if that was inexact. A second rounding to 13 bits
// or fewer less than float32's 24 then gives what rounding once would have (Boldo and Melquiond, "Emulation of a FMA
// and correctly rounded sums: proved algorithms using rounding to odd", section 3).
template <bool kToOdd>
DCOLL_INLINE HalfVec<float> narrow_double(Vec<double> x) {
  const HalfVec<float> nearest = __builtin_convertvector(x, HalfVec<float>);
  if constexpr (!kToOdd) return nearest;
  const Vec<double> back = __builtin_convertvector(nearest, Vec<double>);
  const Vec<int64_t> away = (x > 0.0) ? (Vec<int64_t>)(back > x) : (Vec<int64_t>)(back < x);  // all ones: one too many
  const Vec<int64_t> inexact = (Vec<int64_t>)(back != x);
  const HalfVec<int32_t> bits = (HalfVec<int32_t>)nearest + __builtin_convertvector(away, HalfVec<int32_t>);
  return (HalfVec<float>)(bits | (__builtin_convertvector(inexact, HalfVec<int32_t>) & 1));
}

template <class S, bool kToOdd>
DCOLL_INLINE void decode(float* out, const char* in) {
  char* to = (char*)out;
  if constexpr (std::is_same_v<S, Plain<double>>) {
    for (size_t i = 0; i < kBlock / (kLanesF / 2); ++i) {
      store_vec(to + i * kVectorBytes / 2, narrow_double<kToOdd>(load_vec<Vec<double>>(in + i * kVectorBytes)));
    }
  } else if constexpr (std::is_same_v<S, Plain<float>>) {
    __builtin_memcpy(out, in, kBlock * sizeof(float));
  } else {
    for (size_t i = 0; i < kBlock / kLanesF; ++i) {
      const auto half = load_vec<HalfVec<uint16_t>>(in + i * kVectorBytes / 2);
      if constexpr (std::is_same_v<S, Float16>) {
        store_vec(to + i * kVectorBytes, widen_half(half));
      } else {
        store_vec(to + i * kVectorBytes, (VecF)(__builtin_convertvector(half, VecU) << 16));
      }
    }
  }
}

template <class D>
DCOLL_INLINE void encode(char* to, const float* in) {
  const char* from = (const char*)in;
  if constexpr (std::is_same_v<D, Plain<double>>) {
    for (size_t i = 0; i < kBlock / (kLanesF / 2); ++i) {
      const auto half = load_vec<HalfVec<float>>(from + i * kVectorBytes / 2);
      store_vec(to + i * kVectorBytes, __builtin_convertvector(half, Vec<double>));
    }
  } else if constexpr (std::is_same_v<D, Plain<float>>) {
    __builtin_memcpy(to, in, kBlock * sizeof(float));
  } else {
    for (size_t i = 0; i < kBlock / kLanesF; ++i) {
      const VecF x = load_vec<VecF>(from + i * kVectorBytes);
      if constexpr (std::is_same_v<D, Float16>) {
        store_vec(to + i * kVectorBytes / 2, narrow_half(x));
      } else {
        const VecU bits = float_to_bfloat16_bits(x);
        store_vec(to + i * kVectorBytes / 2, __builtin_convertvector(bits, HalfVec<uint16_t>));
      }
    }
  }
}

template <class S, class D>
DCOLL_INLINE void cast_block(char* dst, const char* src) {
  alignas(kVectorBytes) float block[kBlock];
  decode<S, D::kElemBytes == 2>(block, src);
  encode<D>(dst, block);
}

template <class S, class D>
void cast_loop(char* dst, const char* src, size_t count) {
  size_t i = 0;
  for (; i + kBlock <= count; i += kBlock) cast_block<S, D>(dst + i * D::kElemBytes, src + i * S::kElemBytes);
  if (i == count) return;
  alignas(kVectorBytes) char in[kBlock * S::kElemBytes] = {}, out[kBlock * D::kElemBytes];
  __builtin_memcpy(in, src + i * S::kElemBytes, (count - i) * S::kElemBytes);
  cast_block<S, D>(out, in);
  __builtin_memcpy(dst + i * D::kElemBytes, out, (count - i) * D::kElemBytes);
}

// ---- the table, in the order of DType and ReduceOp ----

using Bytes = Plain<uint8_t>;

// clang-format off
#define DCOLL_REDUCE_ROW(D) {reduce<D, Sum>, reduce<D, Sum>, nullptr, reduce<D, Min>, reduce<D, Max>, reduce<D, Product>}
constexpr Kernels make_table(const char* isa) {
  return {
      isa,
      {
          DCOLL_REDUCE_ROW(Float16),
          DCOLL_REDUCE_ROW(BFloat16),
          DCOLL_REDUCE_ROW(Plain<float>),
          DCOLL_REDUCE_ROW(Plain<double>),
          DCOLL_REDUCE_ROW(Plain<int8_t>),
          {reduce<Bytes, Sum>, reduce<Bytes, Sum>, nullptr, reduce<Bytes, Min>, reduce<Bytes, Max>, reduce<Bytes, Product>, reduce<Bytes, And>, reduce<Bytes, Or>, reduce<Bytes, Xor>},
          DCOLL_REDUCE_ROW(Plain<int32_t>),
          DCOLL_REDUCE_ROW(Plain<int64_t>),
          {reduce<Bool, Or>, reduce<Bool, Or>, nullptr, reduce<Bool, And>, reduce<Bool, Or>, reduce<Bool, And>},
          DCOLL_REDUCE_ROW(Plain<int16_t>),
          DCOLL_REDUCE_ROW(Plain<uint16_t>),
          DCOLL_REDUCE_ROW(Plain<uint32_t>),
          DCOLL_REDUCE_ROW(Plain<uint64_t>),
      },
      {
          {nullptr, cast_loop<Float16, BFloat16>, cast_loop<Float16, Plain<float>>, cast_loop<Float16, Plain<double>>},
          {cast_loop<BFloat16, Float16>, nullptr, cast_loop<BFloat16, Plain<float>>, cast_loop<BFloat16, Plain<double>>},
          {cast_loop<Plain<float>, Float16>, cast_loop<Plain<float>, BFloat16>, nullptr, cast_loop<Plain<float>, Plain<double>>},
          {cast_loop<Plain<double>, Float16>, cast_loop<Plain<double>, BFloat16>, cast_loop<Plain<double>, Plain<float>>, nullptr},
      },
      count_beyond_half,
      clamp_to_half,
      quantize,
      dequantize,
      draw_half,
      draw_bfloat16,
      draw_steps,
      find_beyond,
      low_rank_project,
      low_rank_project_back,
      low_rank_split,
      low_rank_dot,
      low_rank_subtract,
  };
}
#undef DCOLL_REDUCE_ROW
// clang-format on

}  // namespace
}  // namespace dcoll::kernels
